//! Tests the launches of guests: their parts, their timelines, and the comparison of two runs.

use fathom_run::{Cell, Run, Timeline};
use fathom_tests::fathom;
use std::path::Path;
use std::process::Command;

/// Delay in seconds of each of the disk's first reads in the slow run.
const DELAY: f64 = 0.8;

fn run(dir: &Path, more: &[&str]) -> String {
    let mut command = Command::new(fathom());
    command.args(["lab", "run", "boot", "--disk=fathom"]);
    command.args(["--warm-ups=0", "--output"]).arg(dir);
    let output = command.args(more).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the shortest total time in seconds of these parts, over all launches.
fn least(dir: &Path, parts: &[&str]) -> f64 {
    let plan = Run::load(dir).unwrap().experiment.unwrap();
    let cells = plan.load_cells(dir).unwrap();
    let value = |cell: &Cell, part: &&str| cell.measure(part).unwrap().value;
    let sums = { cells.iter() }.map(|cell| parts.iter().map(|part| value(cell, part)).sum());
    sums.fold(f64::INFINITY, f64::min)
}

#[test]
fn a_slow_disk_shows_where_a_boot_waits_for_it() {
    let parent = tempfile::tempdir().unwrap();
    let [quick, slow] = ["quick", "slow"].map(|name| parent.path().join(name));
    run(&quick, &["--rounds=1"]);
    let filter = format!("--serve=--filter=delay:read={DELAY}s");
    let against = [
        "--against",
        quick.to_str().unwrap(),
        "--time-line=off",
        &filter,
    ];
    let told = run(&slow, &against);
    assert!(told.contains("boot of B is "), "{told}");
    // SeaBIOS reads the disk, and so does user space, which loads the disk's driver. The kernel
    // does not.
    //
    // The part `firmware` begins when the lab has connected to QEMU's monitor. On a busy machine,
    // SeaBIOS may run before. The part ends when the kernel's clock starts, which is wrong on a
    // very busy machine.
    assert!(least(&slow, &["vmm", "firmware"]) > DELAY);
    assert!(least(&slow, &["user-space"]) > DELAY);

    let plan = Run::load(&quick).unwrap().experiment.unwrap();
    for cell in plan.load_cells(&quick).unwrap() {
        let part = |name| cell.measure(name).unwrap().value;
        let parts = ["vmm", "firmware", "kernel", "user-space", "agent"].map(part);
        // The parts follow each other without gaps.
        let boot = part("boot");
        assert!((parts.iter().sum::<f64>() - boot).abs() < 0.01, "{cell:?}");
        assert!(parts.iter().all(|seconds| *seconds > 0.0), "{cell:?}");
    }
    let lines = plan.cells.iter();
    let lines = lines.filter_map(|cell| Timeline::load(&quick, cell).unwrap());
    let lines: Vec<Timeline> = lines.collect();
    let [line] = &lines[..] else {
        panic!("{} time lines", lines.len());
    };
    let span = |name: &str| line.spans.iter().find(|span| span.name == name).unwrap();
    // Initcalls are within the kernel's part, and programs within user space.
    let (kernel, user) = (span("kernel"), span("user-space"));
    let within = |inner: &str, outer: &fathom_run::Span| {
        let inner = span(inner);
        assert!(
            inner.begin > outer.begin && inner.end() < outer.end(),
            "{inner:?}"
        );
    };
    within("acpi_init", kernel);
    within("mount", user);
}

#[test]
fn a_run_is_compared_with_its_like_only() {
    let parent = tempfile::tempdir().unwrap();
    let nothing = parent.path().join("nothing");
    let mut command = Command::new(fathom());
    command
        .args(["lab", "run", "boot", "--against"])
        .arg(&nothing);
    let output = command.current_dir(parent.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("nothing"),
        "{said}"
    );
    assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
}
