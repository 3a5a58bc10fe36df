//! The experiment `attributes`, small: what a limit, a neighbour and a look from outside come to.

mod support;

use fathom_lab::experiment::Context;
use support::value;

/// A script in the place of `fathom`, which is no program of this crate's: what it prints comes
/// from inside.
fn probe(dir: &std::path::Path) -> std::path::PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = dir.join("fathom");
    std::fs::write(&path, "#!/bin/sh\necho 1000.5 20\n").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn a_container_is_limited_and_seen_and_has_a_neighbour() {
    let parent = tempfile::tempdir_in("/var/tmp").unwrap();
    let dir = parent.path().join("run");
    let settings = [
        ("technology", "container"),
        ("size", "16M"),
        ("runtime", "2s"),
        ("cap", "0.3"),
    ];
    let context = Context {
        fathom: probe(parent.path()),
    };
    let (plan, cells) = support::run_in(&dir, &context, "attributes", &settings);
    let cell = &cells[0];
    assert_eq!(
        (value(cell, "cpu"), value(cell, "memory-access")),
        (1000.5, 20.0)
    );
    let got = value(cell, "cap.got");
    assert!((5.0..40.0).contains(&got), "{got}");
    // The container has this machine's kernel: the host sees all processes in the container, and
    // the container sees no events of the kernel.
    assert_eq!(value(cell, "processes.seen"), 100.0);
    assert_eq!(value(cell, "events.own"), 0.0);
    assert!(value(cell, "memory") > 4096.0 && value(cell, "start-up") > 0.0);
    // Percentiles need a thousand reads, which a busy machine may not complete.
    let is_told = |name: &str| cell.measure(name).is_some();
    for who in ["disk", "disk-limited", "cpu", "cpu-limited"] {
        let base = if who.starts_with("cpu") {
            "p99.pinned"
        } else {
            "p99.alone"
        };
        let (p99, times) = (format!("p99.{who}"), format!("neighbour.{who}"));
        assert_eq!(is_told(&times), is_told(&p99) && is_told(base), "{who}");
        if is_told(&times) {
            let ratio = value(cell, &p99) / value(cell, base);
            assert!((value(cell, &times) / ratio - 1.0).abs() < 1e-9);
        }
    }
    let sheet = plan.sheet.unwrap();
    for row in sheet.rows.iter().filter_map(|row| row.measure.as_deref()) {
        let is_machines = row == "memory.kernel" || row == "events.host";
        let is_percentile = row.starts_with("p99.") || row.starts_with("neighbour.");
        assert!(is_machines || is_percentile || is_told(row), "{row}");
    }
}
