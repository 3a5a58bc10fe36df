//! The experiment `backends`, small: what each bed takes, and whether fsync inside means anything.

mod support;

use fathom_lab::instance::check_cpu;
use fathom_run::Cell;
use support::value;

fn run(settings: &[(&str, &str)]) -> Vec<Cell> {
    support::run("backends", settings)
}

#[test]
fn every_bed_that_runs_here_does_every_test() {
    let cells = run(&[("size", "1M"), ("calls", "2000")]);
    assert!(cells.len() >= 10, "{}", cells.len());
    for cell in &cells {
        let settings = &cell.planned.settings;
        assert!(value(cell, "time") > 0.0);
        let took = value(cell, "cpu");
        assert!(took >= 0.0, "{settings:?}: {took}");
        match settings["test"].as_str() {
            "start-up" => assert_eq!(cell.measure("throughput"), None),
            "syscalls" => {
                let each = value(cell, "call") * 2000.0 / 1e9;
                assert!((each / value(cell, "time") - 1.0).abs() < 1e-6);
            }
            _ => {
                let bytes = value(cell, "throughput") * value(cell, "time") * 1e6;
                assert!((bytes - 1048576.0).abs() < 1.0, "{settings:?}: {bytes}");
            }
        }
    }
}

/// User-mode Linux 6.1 drops flushes, which the cell detects if this machine's kernel counts
/// unwritten data. With `cache=none`, data is written at once and needs no flush.
#[test]
fn who_flushes_and_who_does_not_is_told_apart() {
    let beds = match check_cpu() {
        Ok(()) => "container,uml",
        Err(_) => "container", // user-mode Linux does not run here
    };
    let settings = [("size", "1M"), ("test", "write-no-upload"), ("bed", beds)];
    let all = [&settings[..], &[("cache", "writeback,none")]].concat();
    for cell in run(&all) {
        let settings = &cell.planned.settings;
        let Some(unwritten) = cell.measure("unwritten") else {
            let release = fathom_lab::run("uname", &["-r"]).unwrap();
            assert!(
                release.starts_with("5.") || release.starts_with("6.1"),
                "{release}"
            );
            continue; // a kernel that cannot tell
        };
        let is_honest = settings["bed"] == "container" || settings["cache"] == "none";
        assert_eq!(
            unwritten.value < 65536.0,
            is_honest,
            "{settings:?}: {unwritten:?}"
        );
        let said = cell.problems.join("\n");
        assert_eq!(said.is_empty(), is_honest, "{said}");
        assert!(
            is_honest || said.starts_with("uml does not flush"),
            "{said}"
        );
    }
}
