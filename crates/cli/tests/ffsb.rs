//! Tests `fathom lab run ffsb`: the talk's scenarios in guests and on this machine, and the table.

mod support;

use std::fs;
use std::path::Path;
use std::process::Stdio;

use fathom_run::{Cell, Run};
use support::{fathom, stdout_of};

const ARGS: &[&str] = &[
    "--disk=qemu-no-ioeventfd,fathom,bare",
    "--scenario=large-file-creates-256k,random-reads,mail-server",
    "--threads=2",
    "--vcpus=2",
    "--scale=0.001",
    "--runtime=1s",
    "--size=512M",
    "--seed=1",
];

/// Runs the experiment. Returns the number of guests that it has booted.
fn lab(dir: &Path) -> usize {
    let mut command = fathom();
    command.args(["lab", "run", "ffsb"]).args(ARGS);
    command.arg("--output").arg(dir).stdin(Stdio::null());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    said.matches("booting a guest").count()
}

fn check(cell: &Cell) {
    let setting = |name: &str| cell.planned.settings[name].as_str();
    let value = |name: &str| {
        let found = cell.measure(name);
        found
            .unwrap_or_else(|| panic!("no {name}: {cell:#?}"))
            .value
    };
    let (iops, throughput) = (value("iops"), value("throughput"));
    assert!(iops > 0.0 && throughput > 0.0, "{cell:#?}");
    // The mail server's files end with partial blocks.
    let block = match setting("scenario") {
        "large-file-creates-256k" => Some(256.0 * 1024.0),
        "random-reads" => Some(8192.0),
        _ => None,
    };
    let size = throughput * 1e6 / iops;
    match block {
        Some(block) => assert!((size / block - 1.0).abs() < 0.02, "{size}: {cell:#?}"),
        None => assert!((512.0..=8192.0).contains(&size), "{size}: {cell:#?}"),
    }
    let evidence = cell.evidence.as_ref().unwrap();
    assert_eq!(evidence.load.threads, 2);
    // The load ran for the requested time.
    assert!(evidence.load.seconds >= 0.9, "{evidence:#?}");
    let host = evidence.host.as_ref().unwrap();
    let (busy, per) = (value("guest.busy"), value("guest.busy-per-mb"));
    assert!((0.0..=100.0).contains(&value("host.busy")));
    if setting("disk") == "bare" {
        assert_eq!((&evidence.guest, &evidence.bare), (&None, &None));
        let sum: f64 = host.busy.iter().sum();
        assert!((busy - sum).abs() < 1e-6, "{cell:#?}");
        return;
    }
    let guest = evidence.guest.as_ref().unwrap();
    assert_eq!(guest.busy.len(), 2, "{guest:?}");
    assert!((busy - value("guest.vcpu0") - value("guest.vcpu1")).abs() < 1e-6);
    assert!(busy > 0.0 && busy <= 200.5, "{busy}");
    let around = busy / per / throughput;
    assert!((around - 1.0).abs() < 0.02, "{around}: {cell:#?}");
    let bare = evidence.bare.as_ref().unwrap();
    assert!(bare.requests_per_second > 0.0 && bare.bytes_per_second > 0.0);
    assert_eq!(
        setting("disk") == "fathom",
        cell.measures.iter().any(|m| m.name.starts_with("fathom."))
    );
}

#[test]
fn scenarios_in_guests_and_on_the_host_are_compared() {
    let parent = support::disk_dir();
    let dir = parent.path().join("r");
    assert_eq!(lab(&dir), 2, "one boot for all cells of a server");
    let plan = Run::load(&dir).unwrap().experiment.unwrap();
    let cells = plan.load_cells(&dir).unwrap();
    assert_eq!(cells.len(), 9);
    cells.iter().for_each(check);
    // Guests are compared with the host's cell of the same scenario.
    for guest in cells
        .iter()
        .filter(|cell| cell.planned.settings["disk"] != "bare")
    {
        let same = |cell: &&Cell| {
            let of = |cell: &Cell| cell.planned.settings["scenario"].clone();
            cell.planned.settings["disk"] == "bare" && of(cell) == of(guest)
        };
        let host = cells.iter().find(same).unwrap();
        let iops = host.measure("iops").unwrap().value;
        let bare = guest.evidence.as_ref().unwrap().bare.as_ref().unwrap();
        let ratio = bare.requests_per_second / iops;
        assert!((ratio - 1.0).abs() < 0.02, "{ratio}");
    }

    let run = dir.to_str().unwrap();
    let text = stdout_of(&["report", run]);
    for words in [
        "A: disk=qemu-no-ioeventfd, B: disk=fathom",
        "A: disk=qemu-no-ioeventfd, B: disk=bare",
        "A IOPS",
        "B/A IOPS",
        "MB/s",
        "vCPU %",
        "total %",
        "% per MB/s",
        "host %",
        "mail-server",
    ] {
        assert!(text.contains(words), "no '{words}' in:\n{text}");
    }
    assert!(
        text.lines().all(|line| line.chars().count() <= 100),
        "{text}"
    );
    let page = parent.path().join("page.html");
    stdout_of(&["report", run, "--html", page.to_str().unwrap()]);
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("id=\"beside-2\"") && page.contains("B/A IOPS"));
}
