//! Pages of experiments, read in a browser: they show the table's figures, lengths of bars match
//! their figures, and names from a run stay text. The pages have no scripts.

use crate::support::browser::Browser;
use crate::support::experiment::{HOSTILE, cell, one_factor, run, settings, whole, write};
use fathom_report::cells::{Comparison, Table, Verdict, html, terminal};
use fathom_report::render::terminal::Style;
use fathom_run::Cell;

struct Shown {
    browser: Browser,
    _dir: tempfile::TempDir,
}

fn show(page: &str) -> Shown {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("report.html");
    std::fs::write(&file, page).unwrap();
    let mut browser = Browser::start(1400, 1000);
    browser.dark(false);
    browser.open(&file);
    Shown { browser, _dir: dir }
}

impl Shown {
    /// Returns the cells of a table, by rows; the lines of a cell are joined with a bar.
    fn table(&mut self, id: &str) -> Vec<Vec<String>> {
        let rows = self.browser.eval(&format!(
            "[...document.querySelectorAll('#{id} tr')].map((row) => [...row.cells].map((cell) => \
             [...cell.childNodes].map((node) => node.textContent).join('|')))"
        ));
        serde_json::from_value(rows).unwrap()
    }

    /// Returns the number of tables that are wider than the page.
    fn cut_tables(&mut self) -> f64 {
        self.browser.number(
            "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > \
             one.clientWidth).length",
        )
    }

    fn assert_is_sound(&mut self) {
        assert_eq!(self.browser.complaints(), [""; 0]);
        let wide = "document.documentElement.scrollWidth - innerWidth";
        let wide = self.browser.number(wide);
        assert!(wide <= 0.0, "the page is {wide} px wider than the window");
        assert_eq!(self.browser.number("document.scripts.length"), 0.0);
    }
}

fn table(rounds: u32) -> Table {
    let dir = tempfile::tempdir().unwrap();
    whole(dir.path(), rounds);
    Table::load(dir.path()).unwrap()
}

#[test]
fn a_page_shows_what_the_table_says() {
    let mut table = table(8);
    table.points[0].limiter = Some("device".into());
    table.points[0].verdict = Some("device: 31.8 of 32 in flight".into());
    let mut page = show(&html::render(&table));
    page.assert_is_sound();
    // Columns beyond the width are in a second table, with the labels of the rows.
    let second = page.table("points-table-2").into_iter();
    let rows = page.table("points-table").into_iter().zip(second);
    let rows = rows.map(|(first, second)| [&first[..], &second[2..]].concat());
    let rows: Vec<Vec<String>> = rows.collect();
    assert_eq!(page.cut_tables(), 0.0);
    let headings = [
        "server",
        "threads",
        "vcpu0.busy (%)",
        "latency.p99 (\u{b5}s)",
        "iops (k/s)",
        "vs bare",
        "bandwidth (MB/s)",
        "cpu (\u{b5}s CPU/request)",
    ];
    assert_eq!(rows[0], headings);
    assert_eq!(rows.len(), 1 + table.points.len());
    for (cells, point) in rows[1..].iter().zip(&table.points) {
        let place = settings(&[("server", &cells[0]), ("threads", &cells[1])]);
        assert_eq!(place, point.settings);
        let iops = &point.measures["iops"];
        let lines: Vec<&str> = cells[4].split('|').collect();
        let told: f64 = lines[0].parse().unwrap();
        assert!((told - iops.median / 1e3).abs() < 0.006, "{cells:?}");
        assert_eq!(lines.len(), if iops.ratio.is_some() { 3 } else { 2 });
        let is_noise = iops
            .ratio
            .as_ref()
            .is_some_and(|ratio| ratio.verdict == Verdict::NoDifferenceShown);
        let word = "no difference shown";
        assert_eq!(cells[4].contains(word), is_noise, "{cells:?}");
        assert!(
            !cells[2].contains('|'),
            "what describes is not judged: {cells:?}"
        );
    }
    let limiters = "document.querySelector('#limiters-list').innerText";
    let limiters = page.browser.text(limiters);
    let first = limiters.lines().next();
    assert_eq!(
        first,
        Some("server=qemu, threads=1: device: 31.8 of 32 in flight")
    );
    assert_eq!(limiters.lines().count(), table.points.len());
    let words = page
        .browser
        .text("document.querySelector('#environment-list').innerText");
    for word in [
        "6.12.41",
        "10.0.2",
        "scenario=random reads",
        "seed 42",
        "8 rounds",
    ] {
        assert!(words.contains(word), "{word}: {words}");
    }
}

#[test]
fn bars_are_as_long_as_their_figures_in_light_and_dark() {
    let table = table(5);
    let mut page = show(&html::render(&table));
    let width = |page: &mut Shown, selector: &str| -> Vec<f64> {
        let widths = page.browser.eval(&format!(
            "[...document.querySelectorAll('#main-bars {selector}')].map((bar) => \
             bar.getBoundingClientRect().width)"
        ));
        serde_json::from_value(widths).unwrap()
    };
    let bars = width(&mut page, "i[class=\"\"]");
    let bare = width(&mut page, "i.bare");
    let lines = width(&mut page, "i.interval");
    assert_eq!([bars.len(), bare.len(), lines.len()], [6; 3]);
    // Pixels per request per second, from the longest bar.
    let by = bare[0] / table.points[0].bare.as_ref().unwrap().median;
    for (i, point) in table.points.iter().enumerate() {
        let iops = &point.measures["iops"];
        let (low, high) = iops.interval.unwrap();
        assert!((bars[i] - iops.median * by).abs() < 1.0, "{i}: {}", bars[i]);
        assert!(
            (lines[i] - (high - low) * by).abs() < 1.0,
            "{i}: {}",
            lines[i]
        );
    }
    let paint = "getComputedStyle(document.querySelector('#main-bars i')).backgroundColor + \
                 getComputedStyle(document.body).backgroundColor";
    let light = page.browser.text(paint);
    page.browser.dark(true);
    assert_ne!(light, page.browser.text(paint));
    page.assert_is_sound();
}

#[test]
fn a_point_without_the_main_measure_has_no_bar() {
    let mut table = table(5);
    table.points[1].measures.remove("iops");
    table.points[2].measures.remove("iops");
    table.points[2].bare = None;
    let mut page = show(&html::render(&table));
    let count = |page: &mut Shown, selector: &str| {
        let script = format!("document.querySelectorAll('#main-bars {selector}').length");
        page.browser.number(&script)
    };
    let labels = count(&mut page, ".label");
    let bars = count(&mut page, "i[class=\"\"]");
    assert_eq!((labels, bars), (5.0, 4.0));
}

#[test]
fn a_setting_is_not_broken_at_its_hyphens() {
    let mut table = table(1);
    for point in &mut table.points {
        point.settings.insert("server".into(), "q-e-m-u".into());
    }
    let mut page = show(&html::render(&table));
    let lines = page.browser.number(
        "(() => {
            document.body.style.width = '300px';
            const cells = [...document.querySelectorAll('#points-table td')];
            const range = document.createRange();
            range.selectNodeContents(cells.find((cell) => cell.textContent === 'q-e-m-u'));
            return range.getClientRects().length;
        })()",
    );
    assert_eq!(lines, 1.0);
}

#[test]
fn curves_go_through_their_points_with_the_limiter_at_each() {
    let mut table = table(5);
    let mut page = show(&html::render(&table));
    let count = |page: &mut Shown, selector: &str| {
        let script = format!("document.querySelectorAll('.curves {selector}').length");
        page.browser.number(&script)
    };
    // An axis with two values is shown as bars.
    assert_eq!(count(&mut page, "polyline"), 0.0);
    let eight = table
        .points
        .iter()
        .filter(|one| one.settings["threads"] == "8");
    let more: Vec<_> = eight
        .cloned()
        .map(|mut point| {
            point.settings.insert("threads".into(), "64".into());
            point.limiter = Some(HOSTILE.into());
            point
        })
        .collect();
    table.points.extend(more);
    let mut page = show(&html::render(&table));
    page.assert_is_sound();
    assert_eq!(count(&mut page, "polyline"), 3.0);
    assert_eq!(count(&mut page, "circle"), 9.0);
    let places = page.browser.eval(
        "[...document.querySelectorAll('.curves circle')].map((dot) => \
         [dot.cx.baseVal.value, dot.cy.baseVal.value])",
    );
    let places: Vec<(f64, f64)> = serde_json::from_value(places).unwrap();
    for line in places.chunks(3) {
        // 1, 8 and 64 threads are evenly spaced; the last two points have the same figure.
        assert!(
            (line[1].0 * 2.0 - line[0].0 - line[2].0).abs() < 0.2,
            "{line:?}"
        );
        assert!((line[1].1 - line[2].1).abs() < 0.1, "{line:?}");
        assert!(
            line[1].1 < line[0].1,
            "more threads, more requests: {line:?}"
        );
    }
    let limiters =
        "[...document.querySelectorAll('.curves g text')].map((e) => e.textContent).join()";
    assert!(page.browser.text(limiters).contains("onerror=alert(1)"));
}

/// Up to four threads each add as much as the first; further threads add nothing.
#[test]
fn a_knee_has_a_ring_and_is_told_with_what_limits_beyond_it() {
    let mut run = run(1);
    let experiment = run.experiment.as_mut().unwrap();
    let threads = ["1", "2", "4", "8", "16", "32"];
    for (planned, threads) in experiment.cells.iter_mut().zip(threads) {
        planned.settings = settings(&[("threads", threads), ("server", "qemu")]);
    }
    let servers = experiment.parameters.get_mut("server").unwrap();
    servers.truncate(1);
    let cells = experiment.cells.iter().map(|planned| {
        let mut cell = cell(planned);
        let threads: f64 = planned.settings["threads"].parse().unwrap();
        let mut measures = cell.measures.iter_mut();
        let iops = measures.find(|one| one.name == "iops").unwrap();
        iops.value = 1000.0 * threads.min(4.0);
        cell
    });
    let cells: Vec<Cell> = cells.collect();
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &run, cells);
    let table = Table::load(dir.path()).unwrap();
    let [knee] = table.knees.as_slice() else {
        panic!("{:?}", table.knees);
    };
    assert_eq!((&*knee.at, &*knee.beyond, knee.gain), ("4", "8", 0.0));
    let told = "iops has its knee at threads=4: up to 8, each further unit gains 0.00 of what each of \
                the first gained; at 8: ";
    let mut page = show(&html::render(&table));
    page.assert_is_sound();
    assert!(page.browser.text("document.body.innerText").contains(told));
    let places = page.browser.eval(
        "[...document.querySelectorAll('.curves circle')].map((dot) => \
         [dot.className.baseVal, dot.cx.baseVal.value])",
    );
    let places: Vec<(String, f64)> = serde_json::from_value(places).unwrap();
    let rings = places.iter().filter(|(class, _)| class == "knee");
    let rings: Vec<f64> = rings.map(|(_, x)| *x).collect();
    let dots = places.iter().filter(|(class, _)| class.is_empty());
    assert_eq!(rings, [dots.map(|(_, x)| *x).nth(2).unwrap()]);
    let page = terminal::report(&table, Style::default());
    let page: Vec<&str> = page.split_whitespace().collect();
    assert!(page.join(" ").contains(told), "{page:?}");
}

#[test]
fn effects_lie_on_both_sides_of_one_as_far_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    one_factor(dir.path(), 8);
    let table = Table::load(dir.path()).unwrap();
    let mut page = show(&html::render(&table));
    page.assert_is_sound();
    let places = |page: &mut Shown, selector: &str| -> Vec<f64> {
        let places = page.browser.eval(&format!(
            "[...document.querySelectorAll('#forest-2 {selector}')].map((mark) => {{\
             const box = mark.getBoundingClientRect(); return box.left + box.width / 2; }})"
        ));
        serde_json::from_value(places).unwrap()
    };
    let marks = places(&mut page, "circle");
    let ones = places(&mut page, "line.one");
    let ranking = &table.rankings[1];
    assert_eq!((ranking.measure.as_str(), marks.len()), ("latency.p99", 3));
    // Pixels per factor of e, from the greatest effect.
    let by = (marks[0] - ones[0]) / ranking.effects[0].ratio.median.ln();
    assert!(by > 10.0, "{by}");
    for (i, effect) in ranking.effects.iter().enumerate() {
        let wanted = effect.ratio.median.ln() * by;
        assert!((marks[i] - ones[i] - wanted).abs() < 1.5, "{i}: {marks:?}");
    }
    let classes = "[...document.querySelectorAll('#forest-2 svg.effect')].map((row) => \
                   row.getAttribute('class')).join()";
    let said = page.browser.text(classes);
    assert_eq!(said, "effect worse,effect better,effect noise");
    let paint = "getComputedStyle(document.querySelector('#forest-2 svg.better circle')).fill";
    let light = page.browser.text(paint);
    page.browser.dark(true);
    assert_ne!(light, page.browser.text(paint));
    page.assert_is_sound();
}

#[test]
fn samples_over_time_unfold() {
    let mut page = show(&html::render(&table(2)));
    let shown = "document.querySelector('details svg').checkVisibility()";
    assert_eq!(page.browser.eval(shown), false);
    page.browser
        .click("document.querySelector('details summary')");
    assert_eq!(page.browser.eval(shown), true);
    let corners = "document.querySelector('details polyline').points.length";
    assert_eq!(page.browser.number(corners), 30.0);
    let caption = page
        .browser
        .text("document.querySelector('figcaption').innerText");
    assert!(caption.starts_with("iops (k/s): "), "{caption}");
    page.assert_is_sound();
}

#[test]
fn two_runs_stand_side_by_side() {
    let (a, mut b) = (table(5), table(6));
    b.environment.host.kernel = "6.18.0".into();
    let pair = Comparison::of(("a.run".into(), a), ("b.run".into(), b)).unwrap();
    let mut page = show(&html::compare(&pair));
    page.assert_is_sound();
    assert_eq!(page.cut_tables(), 0.0);
    let rows = page.table("compare-table");
    assert_eq!(rows.len(), 7);
    assert_eq!(
        rows[0][2..5],
        ["vcpu0.busy (%) A", "B", "latency.p99 (\u{b5}s) A"]
    );
    assert!(rows[1][6].contains("no difference shown"), "{:?}", rows[1]);
    let differences = page.table("compare-differences");
    assert!(differences[1][2].contains("6.18.0"), "{differences:?}");
    for id in [
        "A-points-table",
        "B-points-table",
        "A-main-bars",
        "B-main-bars",
    ] {
        let found = page
            .browser
            .eval(&format!("document.getElementById('{id}') !== null"));
        assert_eq!(found, true, "{id}");
    }
}

#[test]
fn what_a_run_holds_stays_text() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = run(2);
    run.title = HOSTILE.into();
    run.environment.host.cpu = HOSTILE.into();
    run.problems.push(HOSTILE.into());
    let experiment = run.experiment.as_mut().unwrap();
    experiment.name = HOSTILE.into();
    for (i, planned) in experiment.cells.iter_mut().enumerate() {
        planned.id = format!("{i}{}", HOSTILE.replace('/', ""));
        planned
            .settings
            .insert(HOSTILE.into(), [HOSTILE, "b"][i % 2].into());
    }
    let cells = experiment.cells.iter().map(|planned| {
        let mut cell = cell(planned);
        cell.measures[2].name = HOSTILE.into();
        cell.series[0].name = HOSTILE.into();
        cell.problems.push(HOSTILE.into());
        cell
    });
    let cells: Vec<Cell> = cells.collect();
    write(dir.path(), &run, cells.into_iter().take(9));
    let table = Table::load(dir.path()).unwrap();
    let other = table.clone();
    let pair = Comparison::of((HOSTILE.into(), table.clone()), ("b".into(), other)).unwrap();
    for text in [html::render(&table), html::compare(&pair)] {
        let mut page = show(&text);
        page.assert_is_sound();
        assert_eq!(page.browser.number("document.images.length"), 0.0);
        let title = page.browser.text("document.body.innerText");
        assert!(title.contains("<img src=x onerror=alert(1)>"), "{title}");
        assert!(title.contains("9 of 12 cells are complete"), "{title}");
    }
}
