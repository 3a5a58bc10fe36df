//! CPU profiles in reports of runs whose cells have folded stacks.

use crate::support::experiment;

use std::fs;
use std::path::Path;

use crate::support::browser::Browser;
use fathom_report::cells::{self, Comparison, Table, html, terminal};
use fathom_report::render::terminal::Style;
use fathom_run::evidence::LockWait;
use fathom_testing::until;
use serde_json::{Value, json};

/// Writes a run in which the disk's server works more with more threads, with names like markup.
fn run(dir: &Path, served: u64) {
    let run = experiment::whole(dir, 2);
    for planned in &run.experiment.as_ref().unwrap().cells {
        if planned.settings["server"] != "fathom" {
            continue;
        }
        let folder = planned.folder(dir);
        let guest = "fio;main [fio];io_submit [libaio.so.1];virtio_queue_rq [virtio_blk.ko] 60\n\
                     fio;main [fio] 20\nno count\n";
        fs::write(folder.join("guest.folded"), guest).unwrap();
        let host = format!(
            "qemu: CPU 0/KVM;ioctl [libc.so.6];vmx_vcpu_run [kvm_intel.ko] 10\n\
             server: </iframe><script>alert(1)</script>;main [fathom];read \"x\" [kernel] {served}\n\
             kworker/0:1;blk_mq_run_hw_queue [kernel] 5\n"
        );
        fs::write(folder.join("host.folded"), host).unwrap();
        let mut cell = experiment::cell(planned);
        let lock = |name: &str, seconds| LockWait {
            name: name.into(),
            side: "guest".into(),
            waits: 3,
            seconds,
        };
        let evidence = cell.evidence.as_mut().unwrap();
        evidence.locks = vec![
            lock("SPIN virtio_queue_rq [virtio_blk.ko]", 0.002),
            lock("</td>", 0.1),
        ];
        let text = serde_json::to_string(&cell).unwrap();
        fs::write(folder.join("cell.json"), text).unwrap();
    }
}

fn table(served: u64) -> Table {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), served);
    Table::load(dir.path()).unwrap()
}

#[test]
fn the_talks_table_is_there_for_each_side_of_each_point() {
    let table = table(35);
    let json: Value = serde_json::from_str(&cells::json(&table)).unwrap();
    let points = json["points"].as_array().unwrap();
    let sampled: Vec<&Value> = points
        .iter()
        .filter_map(|point| point.get("profile"))
        .collect();
    assert_eq!(sampled.len(), 2);
    for profile in sampled {
        // The sum of two rounds.
        assert_eq!(
            profile[0],
            json!({"side": "guest", "samples": 160, "top": [
                {"overhead": 75.0, "command": "fio", "object": "virtio_blk.ko", "symbol": "virtio_queue_rq"},
                {"overhead": 25.0, "command": "fio", "object": "fio", "symbol": "main"},
            ]})
        );
        assert_eq!(
            (&profile[1]["side"], &profile[1]["samples"]),
            (&json!("host"), &json!(100))
        );
        assert_eq!(profile[1]["top"][0]["symbol"], "read \"x\"");
    }
    let text = terminal::report(&table, Style::default());
    let (answer, tables) = text.split_once("Where the CPU goes").unwrap();
    let most = "guest: 75.0% in virtio_queue_rq (virtio_blk.ko); host:";
    assert!(answer.contains(most), "{text}");
    let line = |words: &str| {
        let line = tables.lines().find(|line| line.contains(words));
        let line = line.unwrap_or_else(|| panic!("no {words}: {text}"));
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(
        line("virtio_queue_rq"),
        "75.00% fio virtio_blk.ko virtio_queue_rq"
    );
    assert_eq!(
        line("kvm_intel.ko"),
        "20.00% qemu: CPU 0/KVM kvm_intel.ko vmx_vcpu_run"
    );
    assert_eq!(
        line("SPIN"),
        "guest SPIN virtio_queue_rq [virtio_blk.ko] 6 4.000"
    );
    assert!(
        text.lines().all(|line| line.chars().count() <= 100),
        "{text}"
    );
}

#[test]
fn what_is_damaged_is_told_and_what_is_not_there_is_not() {
    let dir = tempfile::tempdir().unwrap();
    experiment::whole(dir.path(), 1);
    let table = Table::load(dir.path()).unwrap();
    assert!(table.points.iter().all(|point| point.profile.is_empty()));
    assert!(!cells::json(&table).contains("profile"));
    assert!(!html::render(&table).contains("Where the CPU goes"));
    let target = dir.path().join("run.json");
    std::os::unix::fs::symlink(target, dir.path().join("cells/0001/host.folded")).unwrap();
    let table = Table::load(dir.path()).unwrap();
    assert_eq!(table.problems, ["cell 0001: host.folded cannot be read"]);
}

struct Page {
    browser: Browser,
    _dir: tempfile::TempDir,
}

impl Page {
    fn show(page: &str) -> Page {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("report.html");
        fs::write(&file, page).unwrap();
        let mut browser = Browser::start(1400, 1000);
        browser.dark(false);
        browser.open(&file);
        Page { browser, _dir: dir }
    }

    /// Evaluates a script in every flame graph, once it is loaded.
    fn each(&mut self, script: &str) -> Vec<Value> {
        let frames =
            "[...document.querySelectorAll('.flame iframe')].map((frame) => frame.contentDocument)";
        let ready = format!(
            "{frames}.every((page) => page.querySelector('svg') && page.readyState === 'complete')"
        );
        until("all flame graphs", || self.browser.eval(&ready) == true);
        let values = self
            .browser
            .eval(&format!("{frames}.map((page) => {script})"));
        serde_json::from_value(values).unwrap()
    }
}

#[test]
fn each_graph_is_drawn_in_a_frame_of_its_own_in_light_and_dark() {
    let mut page = Page::show(&html::render(&table(35)));
    // Four parts of two points.
    let titles = page.each("page.getElementById('title').textContent");
    let parts = [
        "Guest",
        "QEMU, on the host",
        "The disk's server, on the host",
        "The rest of the host",
    ];
    assert_eq!(titles, [parts, parts].concat());
    let widths = page.each(
        "page.getElementById('frames').getBoundingClientRect().width / page.defaultView.innerWidth",
    );
    for width in widths {
        assert!((0.9..=1.0).contains(&width.as_f64().unwrap()), "{width}");
    }
    let whole = "page.documentElement.scrollHeight - page.defaultView.innerHeight";
    assert!(
        page.each(whole)
            .iter()
            .all(|more| more.as_f64().unwrap() <= 0.0)
    );
    let paint = "getComputedStyle(page.querySelector('svg > rect')).fill + getComputedStyle(page.getElementById('title')).fill";
    let light = page.each(paint);
    page.browser.dark(true);
    let dark = page.each(paint);
    assert!(
        light.iter().zip(&dark).all(|(light, dark)| light != dark),
        "{light:?} {dark:?}"
    );
    // A click makes one frame as wide as the graph; the other graphs do not change.
    page.browser.eval(
        "(() => { const page = document.querySelector('.flame iframe').contentDocument; \
         [...page.querySelectorAll('#frames > g')].find((one) => \
         one.textContent.includes('virtio_queue_rq')).dispatchEvent(new MouseEvent('click', \
         {bubbles: true})); })()",
    );
    let zoomed = page.each("page.querySelectorAll('.parent').length > 0");
    assert_eq!(
        zoomed.iter().filter(|&one| one == true).count(),
        1,
        "{zoomed:?}"
    );
    assert_eq!(page.browser.complaints(), [""; 0]);
    assert_eq!(page.browser.number("document.scripts.length"), 0.0);
    let told = page
        .browser
        .text("document.querySelector('#profile-0-host').innerText");
    assert!(told.contains("<script>alert(1)</script>"), "{told}");
}

#[test]
fn two_runs_have_graphs_of_their_difference() {
    let pair = Comparison::of(("a".into(), table(35)), ("b".into(), table(85))).unwrap();
    let page = html::compare(&pair);
    let mut page = Page::show(&page);
    let first =
        page.each("[...page.querySelectorAll('title')].map((one) => one.textContent).join('|')");
    // The four parts of two points in the comparison, then those of each run.
    assert_eq!(first.len(), 24);
    assert!(
        first[0].as_str().unwrap().contains("75.00%; 0.00%"),
        "{}",
        first[0]
    );
    let other = page.each("page.querySelectorAll('#frames rect').length");
    assert!(
        other.iter().all(|count| count.as_f64().unwrap() >= 3.0),
        "{other:?}"
    );
    assert_eq!(page.browser.complaints(), [""; 0]);
}
