//! Tests experiments in an emulated KVM host.
//!
//! The tests show what a machine without hardware virtualisation cannot show of its own guests.

use std::path::Path;
use std::process::Command;

use fathom_lab::experiment::runner::Runner;
use fathom_run::{Cell, Folded, Run, Side};
use fathom_tests::fathom;

/// Runs an experiment as users do.
fn lab_run(dir: &Path, args: &[&str]) {
    let mut command = Command::new(fathom());
    command.args(["lab", "run"]).args(args);
    command.arg("--kvm-host").arg("--output").arg(dir);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}

fn load(dir: &Path) -> (Run, Vec<Cell>) {
    let run = Run::load(dir).unwrap();
    let plan = run.experiment.as_ref().unwrap();
    let cells: Vec<Cell> = plan.load_cells(dir).unwrap();
    assert_eq!(cells.len(), plan.cells.len());
    (run, cells)
}

#[test]
fn kvm_counts_the_exits_of_ide_and_of_virtio() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("run");
    let few = ["--size", "16M", "--runtime", "2s"];
    let axes = [
        "settings",
        "--bus",
        "virtio-blk,ide",
        "--accelerator",
        "kvm",
    ];
    lab_run(&dir, &[&axes[..], &few].concat());
    let (run, cells) = load(&dir);
    // The report describes the KVM host, not this machine.
    let environment = &run.environment;
    assert!(environment.stretched, "{environment:?}");
    assert_eq!(environment.accelerator, "kvm");
    assert!(environment.host.cpu.contains("TCG"), "{environment:?}");
    let measure = |bus: &str, name: &str| {
        let mut cells = cells.iter();
        let cell = cells.find(|cell| cell.planned.settings["bus"] == bus);
        let cell = cell.unwrap();
        cell.measure(name)
            .unwrap_or_else(|| panic!("no {name}: {cell:?}"))
            .value
    };
    // A read by IDE writes many registers, each of which QEMU emulates; virtio has one doorbell.
    // Timers and the like add exits to both, dozens to each read on a slow host, so the test
    // compares the difference.
    let (virtio, ide) = (measure("virtio-blk", "exits"), measure("ide", "exits"));
    assert!(virtio >= 1.0 && ide >= virtio + 10.0, "{virtio} and {ide}");
    // A resumed run also uses the KVM host.
    assert_eq!(Runner::resume(&dir).unwrap().left().count(), 0);
    assert!(run.experiment.unwrap().kvm_host);
}

#[test]
fn samples_tell_the_guest_from_kvm_and_qemu() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("run");
    lab_run(&dir, &["profile", "--size", "16M", "--runtime", "3s"]);
    let (_, cells) = load(&dir);
    let cell = &cells[0];
    let percent = |name: &str| cell.measure(&format!("profile.host.{name}")).unwrap().value;
    for component in ["guest", "kvm", "qemu", "server"] {
        assert!(percent(component) > 1.0, "{component}: {cell:?}");
    }
    let host = Folded::load(&dir, &cell.planned, Side::Host)
        .unwrap()
        .unwrap();
    let has = |command: &str, frame: &str| {
        let mut stacks = host.stacks();
        let is = |(stack, _): (Vec<&str>, u64)| {
            stack[0].starts_with(command) && stack[1..].iter().any(|one| one.ends_with(frame))
        };
        stacks.any(is)
    };
    assert!(has("qemu: ", "[guest]"), "{:#?}", host.lines());
    assert!(has("qemu: CPU 0/KVM", "[kvm.ko]"), "{:#?}", host.lines());
}
