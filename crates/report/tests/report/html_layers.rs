//! Layers in the HTML report, read in a browser: a single legend, the same colour for a layer
//! everywhere, and stripes where nothing was traced.

use crate::support::example::analysis;
use crate::support::page::{Page, one, show};
use fathom_report::analysis::{Analysis, HostClass, Layer};
use serde_json::{Value, json};

/// Converts a cell in us to nanoseconds.
fn ns(cell: &str) -> f64 {
    cell.parse::<f64>().unwrap() * 1e3
}

/// Returns the computed style of an element.
fn style(page: &mut Page, selector: &str, property: &str) -> String {
    page.browser.text(&format!(
        "getComputedStyle(document.querySelector('{selector}')).{property}"
    ))
}

/// Returns the run as if KVM was not watched: a kick is one layer.
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

/// Returns the steps on a side of the path from the top: their names and vertical positions.
fn steps(page: &mut Page, side: &str) -> Vec<(String, f64)> {
    let steps = page.browser.eval(&format!(
        "[...document.querySelectorAll('.way .{side} > .step')].map((step) => \
         [step.querySelector('strong')?.textContent ?? step.textContent, \
         step.getBoundingClientRect().top + scrollY]).sort((a, b) => a[1] - b[1])"
    ));
    serde_json::from_value(steps).unwrap()
}

fn names(steps: &[(String, f64)]) -> Vec<&str> {
    steps.iter().map(|(name, _)| name.as_str()).collect()
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
    // The time lines have their own legend: the colours of calls are different.
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
    assert_eq!(page.count(".dim"), 0);
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
    ] {
        assert_eq!(style(&mut page, selector, "opacity"), "1", "{selector}");
        assert_eq!(style(&mut page, others, "opacity"), "0.25", "{others}");
    }
    let ground = ["host_device", "guest_submit"].map(|key| {
        let cell = format!("#layers-table [data-key={key}] td");
        style(&mut page, &cell, "backgroundColor")
    });
    assert_ne!(ground[0], ground[1]);
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
        // Only the total of the untraced rounds is known.
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

#[test]
fn the_path_leads_down_through_the_layers_and_up_again() {
    let run = analysis();
    let exact = run.exact.clone().unwrap();
    let mut page = show(&one(run));
    let nothing = "no request was seen here";
    let down = steps(&mut page, "down");
    let expected = [
        "guest: call to driver",
        "guest: in the ring before the kick",
        "kick: vCPU leaves the guest",
        "kick: KVM to eventfd",
        "kick: eventfd to server",
        "server: wake to taken",
        nothing,
        nothing,
    ];
    assert_eq!(names(&down), expected);
    let up = steps(&mut page, "up");
    let expected = [
        "guest: completion to return",
        "guest: handler to completion",
        "interrupt: to the guest's handler",
        nothing,
        "server: finish",
        nothing,
    ];
    assert_eq!(names(&up), expected);
    let both = steps(&mut page, "both");
    assert_eq!(
        names(&both),
        ["a request, from call to return", "host: device"]
    );
    assert!(both[0].1 < down[0].1 && both[1].1 > down[7].1 && both[1].1 > up[5].1);

    for row in &exact.layers {
        let key = serde_json::to_value(row.layer).unwrap();
        let step = format!(".way .step[data-key={}]", key.as_str().unwrap());
        assert_eq!(page.count(&step), 1, "{step}");
        let words = page
            .browser
            .text(&format!("document.querySelector('{step}').innerText"));
        let share = format!("{:.1}%", row.share * 100.0);
        let tail = format!("slowest 1%: {:.1}%", row.tail_share.unwrap() * 100.0);
        assert!(words.contains(&share) && words.contains(&tail), "{words}");
        let mean = match row.time.mean {
            below if below < 1e3 => format!("{below:.0} ns"),
            ns => format!("{:.2} \u{b5}s", ns / 1e3),
        };
        assert!(words.contains(&mean), "{mean}: {words}");
    }
    let colour = style(&mut page, BAR, "backgroundColor");
    let edge =
        "getComputedStyle(document.querySelector('.way [data-key=host_device]'), '::before')";
    assert_eq!(
        page.browser.text(&format!("{edge}.backgroundColor")),
        colour
    );
    page.assert_no_complaints();
}

#[test]
fn stations_that_nobody_watched_are_hatched_and_say_so() {
    let mut run = without_kvm();
    for round in &mut run.rounds {
        round.traced.retain(|name| name != "kvm" && name != "block");
    }
    let exact = run.exact.as_mut().unwrap();
    exact
        .layers
        .retain(|row| row.layer != Layer::InterruptEntry && row.layer != Layer::HostDevice);
    let mut page = show(&one(run));
    let untraced: Vec<String> = ["down", "up", "both"]
        .iter()
        .flat_map(|side| steps(&mut page, side))
        .filter_map(|(name, _)| (name == "not traced").then_some(name))
        .collect();
    // KVM on the way up, the host's block layer on both ways, and the device.
    assert_eq!(untraced.len(), 4);
    let kick = ".way .step[data-key=kick_path]";
    for selector in [kick, ".way .step.gap:not([data-key])"] {
        let image = style(&mut page, selector, "backgroundImage");
        assert!(
            image.starts_with("repeating-linear-gradient"),
            "{selector}: {image}"
        );
    }
    let words = page
        .browser
        .text(&format!("document.querySelector('{kick}').innerText"));
    assert!(words.contains("not traced"), "{words}");
    page.assert_no_complaints();
}

#[test]
fn the_tail_is_told_in_time_above_the_median_request() {
    let run = analysis();
    let exact = run.exact.clone().unwrap();
    let mut page = show(&one(run));
    let rows = page.table("tail-table");
    assert_eq!(rows.len(), exact.layers.len() + 1);
    let mut last = f64::MAX;
    for cells in &rows[..exact.layers.len()] {
        let row = exact
            .layers
            .iter()
            .find(|row| row.name == cells[0])
            .unwrap();
        let (middle, tail) = (row.middle_mean.unwrap(), row.tail_mean.unwrap());
        for (cell, wanted) in cells[1..].iter().zip([middle, tail, tail - middle]) {
            assert!((ns(cell) - wanted).abs() < 6.0, "{cells:?}: {wanted} ns");
        }
        assert!(tail - middle <= last, "{cells:?} is above a smaller one");
        last = tail - middle;
    }
    assert_eq!(rows[0][0], "host: device");
    assert!(rows[0][3].starts_with('+'), "{:?}", rows[0]);
    let total = &rows[exact.layers.len()];
    assert!(
        (ns(&total[1]) + ns(&total[3]) - ns(&total[2])).abs() < 16.0,
        "{total:?}"
    );

    // The chart has the same sum, and a request shows its own difference.
    let bars = "[...document.querySelectorAll('[data-chart=bars] .bars')].at(-1)";
    let sum = page.browser.text(&format!(
        "[...{bars}.querySelectorAll('.sum')].at(-1).textContent"
    ));
    assert_eq!(sum, format!("{} \u{b5}s", total[3].trim_start_matches('+')));
    let slow = &exact.slowest[0];
    page.browser.click("document.querySelector('.request')");
    let above = page.browser.text(
        "[...document.querySelectorAll('.request-layers tr')].find((row) => \
         row.cells[0].textContent === 'host: device').cells[2].textContent",
    );
    let (layer, spent) = slow.layers[6];
    assert_eq!(layer, Layer::HostDevice);
    let row = exact.layers.iter().find(|row| row.layer == layer).unwrap();
    assert!(
        (ns(&above) - (spent as f64 - row.middle_mean.unwrap())).abs() < 6.0,
        "{above}"
    );
    page.assert_no_complaints();
}

/// A page of one run and a page of several, on a phone.
#[test]
fn a_phone_shows_the_page_without_scrolling_sideways() {
    let two = vec![
        ("a.run".into(), analysis()),
        ("b.run".into(), without_kvm()),
    ];
    for runs in [one(analysis()), two] {
        let mut page = show(&runs);
        let phone = json!({"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": true});
        page.browser
            .call("Emulation.setDeviceMetricsOverride", phone);
        page.browser
            .eval("new Promise((done) => setTimeout(done, 200))");
        page.browser.click("document.querySelector('.request')");
        let wide = page.browser.number("document.documentElement.scrollWidth");
        assert_eq!(wide, 390.0);
        // Elements beyond the window's edge are in a box that scrolls.
        let beyond = page.browser.eval(
            "[...document.querySelectorAll('main *, nav *')].filter((it) => it.getClientRects().length \
             && it.getBoundingClientRect().right > 391 && !it.closest('.scroll, .layers, nav, .detail')) \
             .map((it) => it.outerHTML.slice(0, 90))",
        );
        assert_eq!(beyond, json!([]));
        let small = page.browser.eval(
            "[...document.querySelectorAll('body *')].filter((it) => it.getClientRects().length && \
             [...it.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) && \
             parseFloat(getComputedStyle(it).fontSize) < 12).map((it) => it.outerHTML.slice(0, 90))",
        );
        assert_eq!(small, json!([]));
        // Charts use the available width: bars are as wide as the box, below their labels.
        for chart in ["[data-chart=bars] .bars", ".waterfall"] {
            let [track, label, box_] = [".track", ".label", ""].map(|part| {
                let rect =
                    format!("document.querySelector('{chart} {part}').getBoundingClientRect()");
                page.browser.eval(&format!(
                    "(({{ top, bottom, width }}) => [top, bottom, width])({rect})"
                ))
            });
            let at = |rect: &Value, i: usize| rect[i].as_f64().unwrap();
            assert!(
                at(&track, 0) >= at(&label, 1),
                "{chart}: {track} below {label}"
            );
            assert!(
                at(&track, 2) > at(&box_, 2) - 20.0,
                "{chart}: {track} in {box_}"
            );
        }
        let plots = page.browser.eval(
            "[...document.querySelectorAll('.plot')].map((box) => box.plot.width - box.clientWidth)",
        );
        assert!(
            plots.as_array().unwrap().iter().all(|less| less == 0),
            "{plots}"
        );
        page.assert_no_complaints();
    }
}

#[test]
fn io_is_hatched_where_the_hosts_block_layer_was_not_watched() {
    let swatches = ["#layers-table", "#tail-table", ".layers"];
    for (class, image) in [
        (HostClass::Unknown, "repeating"),
        (HostClass::Cached, "none"),
    ] {
        let mut run = analysis();
        let exact = run.exact.as_mut().unwrap();
        let row = exact
            .layers
            .iter_mut()
            .find(|row| row.layer == Layer::HostDevice);
        row.unwrap().layer = Layer::HostIo;
        exact.truth.hosts = vec![(class, 2000)];
        let mut page = show(&one(run));
        let swatches = swatches.map(|at| format!("{at} [data-key=host_io] .swatch"));
        let others = [
            "[data-chart=bars] .segment[data-key=host_io]",
            ".way .step[data-key=host_io]",
        ];
        for selector in swatches.iter().map(String::as_str).chain(others) {
            let drawn = style(&mut page, selector, "backgroundImage");
            assert!(drawn.starts_with(image), "{selector}, {class:?}: {drawn}");
        }
        page.assert_no_complaints();
    }
}
