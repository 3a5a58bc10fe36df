//! Requests' paths, in reports of runs whose cells recorded them.

use crate::support::experiment;

use std::path::Path;

use crate::support::browser::Browser;
use crate::support::experiment::HOSTILE;
use fathom_report::cells::{self, Table, html, terminal};
use fathom_report::render::terminal::Style;
use fathom_run::{Between, Crossing, Handed, RequestPath, Side, Stack};
use serde_json::Value;

fn handed(side: Side, device: &str, thread: &str, frames: &[&str], ns: f64) -> Handed {
    Handed {
        side,
        device: device.into(),
        requests: 500,
        device_ns: Some(ns),
        stacks: vec![Stack {
            requests: 498,
            thread: thread.into(),
            frames: frames.iter().map(|&frame| frame.to_owned()).collect(),
        }],
    }
}

/// A guest's read: through a scheduler to the disk, and on the host to the device.
fn path() -> RequestPath {
    let program = [
        "pread64 [libc.so.6]",
        "entry_SYSCALL_64_after_hwframe [kernel]",
        "vfs_read [kernel]",
        "blk_mq_submit_bio [kernel]",
        "dd_insert_requests [kernel]",
    ];
    let worker = ["worker_thread [kernel]", "virtio_queue_rq [virtio_blk.ko]"];
    let host = [
        "io_uring_enter [qemu-system-x86_64]",
        "do_syscall_64 [kernel]",
        "blk_mq_start_request [kernel]",
    ];
    let between = |side, what, per_request| Between {
        side,
        what,
        per_request,
    };
    RequestPath {
        total_ns: Some(100_000.0),
        devices: vec![
            handed(Side::Guest, "vda scheduler", "fio", &program, 90_000.0),
            handed(Side::Guest, "vda", "kworker", &worker, 70_000.0),
            handed(Side::Host, "nvme0n1", "qemu: IO io0", &host, 30_000.0),
        ],
        between: vec![
            between(Side::Guest, Crossing::Switches, 2.0),
            between(Side::Host, Crossing::Exits, 3.5),
            between(Side::Host, Crossing::Switches, 4.0),
        ],
    }
}

/// Writes a run with one point.
fn run(dir: &Path, path: &RequestPath) -> Table {
    let mut run = experiment::run(1);
    let experiment = run.experiment.as_mut().unwrap();
    experiment.cells.truncate(1);
    let planned = experiment.cells[0].clone();
    experiment::write(dir, &run, [experiment::cell(&planned)]);
    path.save(&planned.folder(dir)).unwrap();
    Table::load(dir).unwrap()
}

#[test]
fn stacks_are_side_by_side_on_a_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let table = run(dir.path(), &path());
    let text = terminal::report(&table, Style::default());
    let (_, section) = text.split_once("The path of a request").unwrap();
    let lines: Vec<&str> = section.lines().skip(1).collect();
    let wanted = [
        "  guest: vda scheduler            guest: vda                       host: nvme0n1",
        "  pread64 [libc.so.6]             worker_thread                    io_uring_enter [qemu-system-x86_64]",
    ];
    for (line, wanted) in lines.iter().zip(wanted) {
        let words = |text: &str| {
            text.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(words(line), words(wanted), "{section}");
        assert!(line.chars().count() <= 100);
    }
    for wanted in [
        "guest: vda scheduler: 10.00 us until here and back; fio, 498 of 500 requests; 5 functions, 4 of the kernel",
        "guest: vda: 20.00 us until here and back; kworker",
        "host: nvme0n1: 40.00 us until here and back; qemu: IO io0, 498 of 500 requests; 3 functions, 2 of the kernel; 30.00 us in the device",
        "VM exits - 3.50",
        "context switches 2.00 4.00",
        "copies not measured not measured",
    ] {
        let said = section.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(said.contains(wanted), "{wanted}: {said}");
    }
    let json: Value = serde_json::from_str(&cells::json(&table)).unwrap();
    let told = &json["points"][0]["path"]["devices"][2]["stacks"][0];
    assert_eq!(told["thread"], "qemu: IO io0");
}

#[test]
fn a_picture_has_a_column_for_each_side_and_fits_any_screen() {
    let mut path = path();
    path.devices[0].device = HOSTILE.into();
    path.devices[1].stacks[0].frames[0] = HOSTILE.into();
    let long = "f".repeat(300);
    path.devices[2].stacks[0]
        .frames
        .push(format!("{long} [kernel]"));
    let dir = tempfile::tempdir().unwrap();
    let table = run(dir.path(), &path);
    let file = dir.path().join("report.html");
    std::fs::write(&file, html::render(&table)).unwrap();
    for (width, dark) in [(1400, false), (390, true)] {
        let mut browser = Browser::start(width, 900);
        browser.dark(dark);
        browser.open(&file);
        assert_eq!(browser.complaints(), [""; 0]);
        assert_eq!(browser.number("document.scripts.length"), 0.0);
        let wide = browser.number("document.documentElement.scrollWidth - innerWidth");
        assert!(wide <= 0.0, "{width}: {wide} px wider than the window");
        // The left edges of frames: two columns, without overlap.
        let left = "[...document.querySelectorAll('.path .frame')].map((one) => \
                    Math.round(one.getBBox().x))";
        let mut left: Vec<i64> = serde_json::from_value(browser.eval(left)).unwrap();
        assert_eq!(left.len(), 11);
        left.dedup();
        assert_eq!(left.len(), 2, "{left:?}");
        let right = "Math.max(...[...document.querySelectorAll('.path .frame')].slice(0, 7).map(\
                     (one) => one.getBBox().x + one.getBBox().width))";
        assert!(browser.number(right) <= left[1] as f64);
        let end = "Math.max(...[...document.querySelectorAll('.path text')].map((one) => \
                   one.getBBox().x + one.getBBox().width))";
        assert!(browser.number(end) <= 905.0, "{}", browser.number(end));
        // Two arrows: to the driver, and to the host.
        assert_eq!(
            browser.number("document.querySelectorAll('.path polygon').length"),
            2.0
        );
    }
}

#[test]
fn a_path_that_is_damaged_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let mut path = path();
    path.devices[0].stacks.clear();
    let table = run(dir.path(), &path);
    assert!(table.points[0].path.is_none());
    let said = table.problems.join("\n");
    assert!(
        said.contains("the path of its requests cannot be read"),
        "{said}"
    );
}
