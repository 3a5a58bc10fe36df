//! The HTML report, read in a browser: it shows the analysis's figures, reacts to the pointer and
//! to clicks, and keeps names from a run as text.

use std::path::Path;
use std::process::Command;

use crate::support::example::{HOSTILE, REQUESTS, analysis};
use crate::support::page::{Page, one, show};
use fathom_report::analysis::{Analysis, Distribution, LayerRow};
use fathom_report::render::html::render;
use serde_json::Value;

/// Compares a cell in us with nanoseconds: they are equal except for rounding.
fn assert_micros(cell: &str, ns: f64) {
    let decimals = cell.split('.').nth(1).map_or(0, str::len);
    let told: f64 = cell
        .parse()
        .unwrap_or_else(|_| panic!("{cell} is no number"));
    let rounding = 0.5001 * 10f64.powi(-(decimals as i32));
    assert!((told - ns / 1e3).abs() <= rounding, "{cell} for {ns} ns");
}

fn assert_maybe_micros(cell: &str, ns: Option<i64>) {
    match ns {
        Some(ns) => assert_micros(cell, ns as f64),
        None => assert_eq!(cell, "-"),
    }
}

fn assert_distribution(cells: &[String], time: &Distribution) {
    assert_eq!(cells[0], time.count.to_string());
    assert_micros(&cells[1], time.mean);
    for (cell, ns) in cells[2..6]
        .iter()
        .zip([time.p50, time.p90, time.p99, time.p999])
    {
        assert_maybe_micros(cell, ns);
    }
    assert_micros(&cells[6], time.max as f64);
}

fn assert_layer(cells: &[String], row: &LayerRow) {
    assert_eq!(cells[0], row.name);
    assert_distribution(&cells[1..8], &row.time);
    assert_eq!(cells[8], format!("{:.1}%", row.share * 100.0));
    assert_micros(&cells[9], row.tail_mean.unwrap());
    assert_eq!(
        cells[10],
        format!("{:.1}%", row.tail_share.unwrap() * 100.0)
    );
}

#[test]
fn the_same_runs_give_the_same_bytes() {
    let runs = || vec![("a".to_owned(), analysis()), ("b".to_owned(), analysis())];
    assert!(render(&runs()) == render(&runs()));
    assert!(render(&one(analysis())) == render(&one(analysis())));
}

#[test]
fn the_library_is_as_it_was_published() {
    let vendor = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/render/html/vendor");
    let readme = std::fs::read_to_string(vendor.join("README.md")).unwrap();
    let files = ["uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE"];
    let sums = Command::new("sha256sum")
        .args(files)
        .current_dir(vendor)
        .output()
        .unwrap();
    let sums = String::from_utf8(sums.stdout).unwrap();
    assert_eq!(sums.lines().count(), files.len());
    for line in sums.lines() {
        let (sum, file) = line.split_once("  ").unwrap();
        assert!(readme.contains(&format!("| {file} | `{sum}` |")), "{line}");
    }
}

#[test]
fn tables_say_what_the_analysis_says() {
    let run = analysis();
    let mut page = show(&one(run.clone()));
    page.assert_no_complaints();
    let exact = run.exact.as_ref().unwrap();

    let rows = page.table("layers-table");
    assert_eq!(rows.len(), exact.layers.len() + 1);
    for (cells, row) in rows.iter().zip(&exact.layers) {
        assert_layer(cells, row);
    }
    assert_distribution(&rows[exact.layers.len()][1..8], &exact.total);

    let groups = page.table("groups-table");
    for cells in &groups {
        let of = exact.layers.iter().filter(|row| {
            let key = serde_json::to_value(row.group).unwrap();
            cells[0]
                .to_lowercase()
                .starts_with(match key.as_str().unwrap() {
                    "guest" => "guest",
                    "switching" => "host/guest",
                    "server_switching" => "host/server",
                    "server" => "server",
                    "host_io" => "host i/o",
                    other => panic!("{other} is not in the example"),
                })
        });
        assert_micros(&cells[1], of.map(|row| row.time.mean).sum());
    }
    assert_eq!(groups.len(), 5);

    let wiki = run.wiki.as_ref().unwrap();
    let rows = page.table("wiki-cumulative");
    assert_eq!(rows.len(), wiki.cumulative.len());
    for (cells, (name, ns, control)) in rows.iter().zip(&wiki.cumulative) {
        let control = control.map_or(String::new(), |ns| ns.to_string());
        assert_eq!(cells, &[name.clone(), ns.to_string(), control]);
    }
    let rows = page.table("wiki-delta");
    assert_eq!(rows.len(), wiki.delta.len());
    for (cells, (name, ns, percent)) in rows.iter().zip(&wiki.delta) {
        assert_eq!(
            cells,
            &[name.clone(), ns.to_string(), format!("{percent:.2}%")]
        );
    }
    the_other_tables(&mut page, &run);
}

fn the_other_tables(page: &mut Page, run: &Analysis) {
    let calls = page.table("calls-0");
    // Sorted by total time, as in the wiki, each with its _post.
    let names: Vec<&str> = calls.iter().map(|cells| cells[0].as_str()).collect();
    assert_eq!(
        names,
        [
            "io_uring_enter()",
            "io_uring_enter_post",
            "write()",
            "write_post"
        ]
    );
    let enter = &run.calls[0].calls[0];
    assert_eq!(calls[0][1], enter.time.count.to_string());
    assert_eq!(calls[0][6], format!("{:.6}", enter.total as f64 / 1e9));
    assert_eq!(calls[1][6], format!("{:.6}", enter.post_total as f64 / 1e9));
    assert_eq!(page.table("calls-1")[0][0], "ioctl(KVM_RUN)");

    let lock = &page.table("locks-table")[0];
    assert_eq!(
        (lock[0].as_str(), lock[3].as_str()),
        ("the big QEMU lock", "100")
    );
    assert_micros(&lock[4], run.locks[0].time.mean);

    let steps = page.table("qemu-table");
    assert_micros(&steps[0][3], run.qemu[0].time.mean);
    assert_eq!(steps[1][2..], ["0", "-", "-", "-", "-"]);

    let rounds = page.table("rounds-table");
    assert_eq!(rounds.len(), run.rounds.len());
    for (cells, round) in rounds.iter().zip(&run.rounds) {
        assert_eq!(cells[0], round.name);
        assert_micros(&cells[6], round.benchmark.as_ref().unwrap().mean_ns);
    }
    let cost = &page.table("overhead-table")[0];
    assert_micros(&cost[4], run.overhead[0].difference_ns);
    assert_eq!(cost[5], "+19.9%");

    let truth = page.table("truth-table");
    assert_eq!(truth[0][2], "2,000 of 2,001");
    assert_eq!(truth[1][0], "\u{2713}");
    let words = page
        .browser
        .text("document.querySelector('#environment-list').innerText");
    for word in ["6.12.41", "10.0.2", "aio=io_uring", "eventfd-id", "nvme0n1"] {
        assert!(words.contains(word), "{word}");
    }
}

#[test]
fn the_top_says_where_the_time_goes_and_what_not_to_trust() {
    let mut run = analysis();
    let exact = run.exact.as_mut().unwrap();
    exact.truth.lost = vec![("kvm".into(), 12)];
    exact.truth.violations = 3;
    let mut page = show(&one(run));
    page.assert_no_complaints();
    let top = page
        .browser
        .text("document.querySelector('header').innerText");
    for words in [
        "on average",
        "host I/O",
        "Suspect: host: device, 76.31 \u{b5}s, 81.5% of the mean.",
        "12 events of kvm",
        "INVALID",
        "3 effects seen before their causes",
        "server: finish (40 requests)",
        "stretched",
    ] {
        assert!(top.contains(words), "{words}: {top}");
    }
    let problems = page
        .browser
        .text("document.querySelector('.warning.mild').innerText");
    let words = "the guest's clock source is not the TSC";
    assert!(problems.contains(words), "{problems}");
    let wide = page
        .browser
        .number("document.documentElement.scrollWidth - innerWidth");
    assert!(wide <= 0.0, "the page is {wide} px wider than the window");
}

#[test]
fn pointing_at_a_chart_tells_its_figures() {
    let run = analysis();
    let exact = run.exact.clone().unwrap();
    let mut page = show(&one(run));

    let device = exact
        .layers
        .iter()
        .find(|row| row.name == "host: device")
        .unwrap();
    let segment = "document.querySelector('[data-chart=bars] .segment[data-key=host_device]')";
    page.browser.point(segment, 10.0, 10.0);
    let tip = page.tooltip().unwrap();
    let mean = format!("{:.2} \u{b5}s", device.time.mean / 1e3);
    assert!(
        tip.contains("host: device") && tip.contains(&mean),
        "{mean}: {tip}"
    );
    assert!(
        tip.contains(&format!("{:.1}%", device.share * 100.0)),
        "{tip}"
    );

    // At the end of a bucket, where the curve is exact; a pixel is 0.6% of time.
    let (end, below) = exact
        .total
        .buckets
        .iter()
        .scan(0, |sum, (end, count)| {
            *sum += count;
            Some((*end, *sum))
        })
        .find(|(_, sum)| *sum >= REQUESTS as u64 / 2)
        .unwrap();
    page.point_at("ecdf", end as f64, 0.3);
    let tip = page.tooltip().unwrap();
    let told = tip
        .split("total")
        .nth(1)
        .and_then(|rest| rest.split('%').next())
        .unwrap();
    let told: f64 = told.trim().parse().unwrap();
    let share = below as f64 / REQUESTS as f64 * 100.0;
    assert!((told - share).abs() < 5.0, "{share}%: {tip}");
    page.point_at("ecdf", exact.total.max as f64 * 1.05, 0.3);
    assert!(page.tooltip().unwrap().contains("100.00%"));

    let heat = &exact.heat;
    let middle = (heat.start[3] + heat.column_ns / 2) as f64;
    page.point_at("heat", middle, (heat.latency[1] + 4000) as f64);
    let tip = page.tooltip().unwrap();
    assert!(tip.contains("39 requests"), "{tip}");
    assert!(tip.contains("81.92 \u{b5}s to 98.30 \u{b5}s"), "{tip}");
    assert!(tip.contains("60.00 ms to 80.00 ms"), "{tip}");

    page.point_at("lines", 30_000.0, 0.5);
    let tip = page.tooltip().unwrap();
    assert!(
        tip.contains("io_uring_enter") && tip.contains("62.00 \u{b5}s"),
        "{tip}"
    );
    page.browser.point("document.querySelector('h1')", 1.0, 1.0);
    assert_eq!(page.tooltip(), None);
    page.assert_no_complaints();
}

#[test]
fn clicks_do_what_they_say() {
    let run = analysis();
    let exact = run.exact.clone().unwrap();
    let mut page = show(&one(run));

    let bars = "[data-chart=bars]";
    let device = format!("{bars} .segment[data-key=host_device]");
    let shown = page.count(&device);
    // In the bars of the guest, of all requests and of the slowest, and in those of the median
    // request, the slowest and the difference. The wiki's bar has groups.
    assert_eq!(shown, 6);
    let button = "document.querySelector('.layers [data-key=host_device]')";
    page.browser.click(button);
    assert_eq!(page.count(&device), 0);
    let sum = page.browser.text(&format!(
        "document.querySelector('{bars} .sum').textContent"
    ));
    let rest: f64 = exact.layers.iter().map(|row| row.time.mean).sum::<f64>();
    let device_mean = exact
        .layers
        .iter()
        .find(|row| row.name == "host: device")
        .unwrap()
        .time
        .mean;
    assert_eq!(sum, format!("{:.2} \u{b5}s", (rest - device_mean) / 1e3));
    page.browser.click(button);
    assert_eq!(page.count(&device), shown);

    the_waterfall(&mut page, &exact.slowest[1]);
    page.browser
        .click("document.querySelector('[data-chart=waterfall] .more')");
    let all = page.count("[data-chart=waterfall] .request");
    assert_eq!(all, exact.slowest.len() as u64);

    let scale = "(() => { const {min, max} = document.querySelector('[data-chart=ecdf] .plot').plot\
                 .scales.x; return [min, max]; })()";
    let whole = page.browser.eval(scale);
    let over = "document.querySelector('[data-chart=ecdf] .u-over')";
    page.browser.drag(over, 300.0, 500.0);
    let zoomed = page.browser.eval(scale);
    let width = |scale: &Value| scale[1].as_f64().unwrap() / scale[0].as_f64().unwrap();
    assert!(width(&zoomed) < width(&whole) / 2.0, "{whole} {zoomed}");
    page.browser
        .eval(&format!("{over}.dispatchEvent(new MouseEvent('dblclick'))"));
    page.browser.eval("new Promise(requestAnimationFrame)");
    assert_eq!(page.browser.eval(scale), whole);
    page.browser
        .click("document.querySelector('[data-chart=ecdf] .choice button:last-child')");
    page.assert_no_complaints();
}

fn the_waterfall(page: &mut Page, request: &fathom_report::analysis::Joined) {
    let row = format!(
        "document.querySelector('.request[data-number=\"{}\"]')",
        request.number
    );
    page.browser.click(&row);
    let cells = page.browser.eval(
        "[...document.querySelectorAll('.points tbody tr')].map((row) => \
         [...row.cells].map((cell) => cell.textContent))",
    );
    let cells: Vec<Vec<String>> = serde_json::from_value(cells).unwrap();
    assert_eq!(cells.len(), request.points.len());
    for (cells, (point, at)) in cells.iter().zip(&request.points) {
        let name = serde_json::to_value(point).unwrap();
        assert_eq!(cells[0], name.as_str().unwrap().replace('_', " "));
        assert_micros(&cells[1], *at as f64);
    }
    assert_eq!(
        page.count(".request-layers tbody tr"),
        request.layers.len() as u64
    );
    page.browser.click(&row);
    assert_eq!(page.count(".points"), 0);
}

#[test]
fn a_change_of_theme_is_drawn_at_once() {
    let mut page = show(&one(analysis()));
    let looks = "[...document.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL())";
    let back = "getComputedStyle(document.body).backgroundColor";
    let light = (page.browser.eval(looks), page.browser.text(back));
    page.browser.dark(true);
    page.browser
        .eval("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))");
    let dark = (page.browser.eval(looks), page.browser.text(back));
    let (light_charts, dark_charts) = (light.0.as_array().unwrap(), dark.0.as_array().unwrap());
    assert_eq!((light_charts.len(), dark_charts.len()), (3, 3));
    for (light, dark) in light_charts.iter().zip(dark_charts) {
        assert_ne!(light, dark);
    }
    assert_ne!(light.1, dark.1);
    page.browser.dark(false);
    page.browser
        .eval("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))");
    assert_eq!(page.browser.text(back), light.1);
    page.assert_no_complaints();
}

#[test]
fn names_stay_text() {
    let mut run = analysis();
    let hostile = || HOSTILE.to_owned();
    run.title = hostile();
    run.disks[0].name = hostile();
    run.problems = vec![hostile()];
    run.rounds[0].name = hostile();
    run.rounds[0].benchmark.as_mut().unwrap().call = hostile();
    run.calls[0].thread.name = hostile();
    run.calls[0].calls[0].name = hostile();
    run.locks[0].name = Some(hostile());
    run.qemu[0].today = hostile();
    run.time_lines[0].thread.name = hostile();
    run.time_lines[0].spans[0].2 = hostile();
    run.wiki.as_mut().unwrap().delta[0].0 = hostile();
    run.exact.as_mut().unwrap().truth.lost = vec![(hostile(), 1)];
    run.environment.qemu = Some(hostile());
    let runs = [(hostile(), run), ("other".to_owned(), analysis())];
    for runs in [&runs[..1], &runs[..]] {
        let mut page = show(runs);
        page.assert_no_complaints();
        assert_eq!(page.count("img"), 0);
        assert_eq!(page.count("script"), 3);
        let title = page
            .browser
            .text("document.querySelector('.note, h1').textContent + document.title");
        assert!(title.contains("fathom"), "{title}");
        let body = page.browser.text("document.body.innerText");
        assert!(body.contains("<img src=x onerror=alert(1)>"));
        page.point_at("lines", 30_000.0, 0.5);
        assert!(page.tooltip().unwrap().contains("</script><img"));
        page.assert_no_complaints();
    }
}

#[test]
fn a_run_with_little_to_say_is_shown() {
    let bare = Analysis {
        scenario: None,
        exact: None,
        wiki: None,
        disks: Vec::new(),
        rounds: Vec::new(),
        calls: Vec::new(),
        locks: Vec::new(),
        qemu: Vec::new(),
        time_lines: Vec::new(),
        picture: None,
        overhead: Vec::new(),
        problems: Vec::new(),
        ..analysis()
    };
    let mut empty = analysis();
    let exact = empty.exact.as_mut().unwrap();
    *exact = Default::default();
    empty.time_lines[0].spans.clear();
    let mut page = show(&one(bare.clone()));
    page.assert_no_complaints();
    let top = page
        .browser
        .text("document.querySelector('header').innerText");
    assert!(top.contains("no request could be followed"), "{top}");
    let mut page = show(&[("bare".into(), bare), ("empty".into(), empty)]);
    page.assert_no_complaints();
    assert_eq!(page.count(".runs dt"), 2);
}

#[test]
fn compared_runs_stand_side_by_side() {
    let mut slower = analysis();
    let row = &mut slower.exact.as_mut().unwrap().layers[0];
    row.time.mean *= 1.5;
    let slow = row.time.mean;
    slower.environment.host.kernel = "6.18.0".into();
    let base = analysis();
    let fast = base.exact.as_ref().unwrap().layers[0].time.mean;
    let mut page = show(&[("before".into(), base), ("after".into(), slower)]);
    page.assert_no_complaints();
    let cells = &page.table("compare-mean")[0];
    assert_micros(&cells[1], fast);
    assert_micros(&cells[2], slow);
    assert_micros(cells[3].trim_start_matches('+'), slow - fast);
    assert_eq!(cells[4], "+50%");
    let differences = page.table("compare-differences");
    assert_eq!(differences.len(), 1);
    assert_eq!(differences[0][0], "host");
    assert!(differences[0][2].contains("6.18.0"));
    assert_eq!(
        page.count("[data-chart=compare-bars] .bars:not(.share) .track"),
        2
    );
    for id in [
        "A-layers-table",
        "B-layers-table",
        "A-wiki-delta",
        "B-truth-table",
    ] {
        assert_eq!(page.count(&format!("#{id}")), 1, "{id}");
    }
    page.browser.point(
        "document.querySelector('[data-chart=compare-ecdf] .u-over')",
        500.0,
        100.0,
    );
    let tip = page.tooltip().unwrap();
    assert!(
        tip.contains("A: before") && tip.contains("B: after"),
        "{tip}"
    );
}
