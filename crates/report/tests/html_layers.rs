//! Layers in the HTML report, read in a browser: one legend and one colour for each wherever it is,
//! and stripes where nothing was traced.

#[path = "support/browser.rs"]
#[allow(dead_code, reason = "other tests do more with it")]
mod browser;
#[path = "support/example.rs"]
#[allow(dead_code, reason = "other tests need more of it")]
mod example;
#[path = "support/page.rs"]
#[allow(dead_code, reason = "other tests need more of it")]
mod page;

use example::analysis;
use fathom_report::analysis::{Analysis, Layer};
use page::{Page, one, show};

/// A style of an element, as it is drawn.
fn style(page: &mut Page, selector: &str, property: &str) -> String {
    page.browser.text(&format!(
        "getComputedStyle(document.querySelector('{selector}')).{property}"
    ))
}

/// The run as it is where KVM was not watched: a kick is one layer.
fn without_kvm() -> Analysis {
    let mut run = analysis();
    let exact = run.exact.as_mut().unwrap();
    let row = &mut exact.layers[2];
    assert_eq!(row.layer, Layer::KickExit);
    (row.layer, row.name) = (Layer::KickPath, Layer::KickPath.describe().0);
    for request in &mut exact.slowest {
        request.layers[2].0 = Layer::KickPath;
    }
    run
}

const BAR: &str = "[data-chart=bars] .segment[data-key=host_device]";
const SLOW: &str = "[data-chart=waterfall] .segment[data-key=host_device]";
const ENTRY: &str = ".layers [data-key=host_device]";

#[test]
fn one_legend_and_one_colour_are_for_the_whole_page() {
    let run = analysis();
    let layers = run.exact.as_ref().unwrap().layers.len() as u64;
    let mut page = show(&one(run));
    assert_eq!(page.count(".layers button"), layers);
    // Of calls, whose colours are others, the time lines have their own.
    assert_eq!(page.count(".chart:not([data-chart=lines]) .legend"), 0);
    for dark in [false, true] {
        page.browser.dark(dark);
        let colour = style(&mut page, BAR, "backgroundColor");
        let swatches =
            [ENTRY, "#layers-table [data-key=host_device]"].map(|at| format!("{at} .swatch"));
        for selector in [SLOW.to_owned()].iter().chain(&swatches) {
            assert_eq!(
                style(&mut page, selector, "backgroundColor"),
                colour,
                "{selector}"
            );
        }
    }

    let slow = page.count(SLOW);
    page.browser
        .click(&format!("document.querySelector('{ENTRY}')"));
    assert_eq!(page.count(BAR), 0);
    assert_eq!(page.count(&format!("{SLOW}[hidden]")), slow);
    page.assert_no_complaints();
}

#[test]
fn a_layer_that_is_pointed_at_stands_out_everywhere() {
    let mut page = show(&one(analysis()));
    let strokes = "document.querySelector('[data-chart=ecdf] .plot').plot.series.slice(1)\
                   .filter((one) => one.show && one._focus === false).length";
    assert_eq!(page.browser.number(strokes), 0.0);
    page.browser
        .point(&format!("document.querySelector('{ENTRY}')"), 5.0, 5.0);
    for (selector, others) in [
        (BAR, "[data-chart=bars] .segment[data-key=guest_submit]"),
        (
            SLOW,
            "[data-chart=waterfall] .segment[data-key=guest_submit]",
        ),
        (
            "#layers-table [data-key=host_device]",
            "#layers-table [data-key=guest_submit]",
        ),
    ] {
        assert_eq!(style(&mut page, selector, "opacity"), "1", "{selector}");
        assert_eq!(style(&mut page, others, "opacity"), "0.25", "{others}");
    }
    // The total and the four other layers.
    assert_eq!(page.browser.number(strokes), 5.0);
    page.browser.point("document.querySelector('h1')", 1.0, 1.0);
    assert_eq!(page.count(".dim"), 0);
    assert_eq!(page.browser.number(strokes), 0.0);
    page.assert_no_complaints();
}

#[test]
fn what_was_not_traced_is_hatched() {
    let mut page = show(&one(without_kvm()));
    let kick = "[data-key=kick_path]";
    for selector in [
        format!("[data-chart=bars] .segment{kick}"),
        format!("[data-chart=waterfall] .segment{kick}"),
        format!(".layers {kick} .swatch"),
        format!("#layers-table {kick} .swatch"),
        format!("#layers-table {kick} .bar"),
        // Of the untraced rounds nothing is known but the whole.
        "[data-chart=bars] .segment:not([data-key]):only-child".to_owned(),
    ] {
        let image = style(&mut page, &selector, "backgroundImage");
        assert!(
            image.starts_with("repeating-linear-gradient"),
            "{selector}: {image}"
        );
    }
    for traced in [BAR, SLOW, ".layers [data-key=host_device] .swatch"] {
        assert_eq!(
            style(&mut page, traced, "backgroundImage"),
            "none",
            "{traced}"
        );
    }
    let segment = format!("document.querySelector('.bars.share .segment{kick}')");
    page.browser.point(&segment, 2.0, 5.0);
    let tip = page.tooltip().unwrap();
    assert!(
        tip.contains("kick: guest to server") && tip.contains("not traced"),
        "{tip}"
    );
    page.assert_no_complaints();
}
