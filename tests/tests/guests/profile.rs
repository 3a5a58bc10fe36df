//! Tests that the CPUs of a guest and of its host are sampled, each with its own symbols.

use fathom_lab::experiment::runner::Runner;
use fathom_lab::experiment::{Context, Order, find};
use fathom_run::folded::is_kernel;
use fathom_run::{Cell, Experiment, Folded, Run, Side};
use fathom_tests::fathom;
use tempfile::TempDir;

/// Returns whether a stack of a command with this prefix has a wanted frame.
fn has(folded: &Folded, command: &str, is_wanted: impl Fn(&str, &str) -> bool) -> bool {
    let mut stacks = folded.stacks();
    stacks.any(|(stack, _)| {
        let mut frames = stack[1..]
            .iter()
            .map(|frame| fathom_run::folded::parts(frame));
        stack[0].starts_with(command) && frames.any(|(symbol, object)| is_wanted(symbol, object))
    })
}

/// Runs the experiment for `seconds` seconds. Returns the directory of the run, its plan, and its
/// cell.
fn profiled(seconds: u32) -> (TempDir, Experiment, Cell) {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("run");
    let mut order = Order::new(find("profile").unwrap());
    let runtime = format!("{seconds}s");
    for (name, text) in [("size", "16M"), ("runtime", &*runtime), ("iodepth", "4")] {
        order.set(name, &[text.to_owned()]).unwrap();
    }
    let context = Context { fathom: fathom() };
    let runner = Runner::new(&order, &dir).unwrap();
    runner.run(&context, None, &mut |_| {}).unwrap();
    let plan = Run::load(&dir).unwrap().experiment.unwrap();
    let cell = Cell::load(&dir, &plan.cells[0]).unwrap().unwrap();
    assert_eq!(
        cell.problems, [""; 0],
        "this test samples the CPUs of the host and of a guest"
    );
    (parent, plan, cell)
}

#[test]
fn samples_name_the_guests_kernel_qemu_and_the_server() {
    let in_worker = |host: &Folded| {
        has(host, "server: worker 0", |symbol, _| {
            symbol.contains("fathom_core::")
        })
    };
    // On a busy machine, the worker runs so little that a short run may have no sample of it.
    let mut runs = [3, 12, 48].into_iter();
    let (parent, plan, cell) = loop {
        let (parent, plan, cell) = profiled(runs.next().expect("a sample of the worker"));
        let dir = parent.path().join("run");
        let host = Folded::load(&dir, &plan.cells[0], Side::Host).unwrap();
        if in_worker(&host.unwrap()) {
            break (parent, plan, cell);
        }
    };
    let (dir, planned) = (parent.path().join("run"), &plan.cells[0]);
    let load = |side| Folded::load(&dir, planned, side).unwrap().unwrap();

    let guest = load(Side::Guest);
    let is_block = |symbol: &str, object: &str| {
        is_kernel(object)
            && ["blk_mq_", "virtio", "virtblk", "submit_bio"]
                .iter()
                .any(|name| symbol.starts_with(name))
    };
    assert!(has(&guest, "fio", is_block), "{:#?}", guest.lines());
    // Modules are distinguished from the kernel itself.
    let in_module = |_: &str, object: &str| object.starts_with("virtio") && object.ends_with(".ko");
    assert!(has(&guest, "", in_module), "{:#?}", guest.lines());
    let host = load(Side::Host);
    assert!(
        has(&host, "qemu: CPU 0/", |_, _| true),
        "{:#?}",
        host.lines()
    );

    let percent = |name: &str| cell.measure(&format!("profile.{name}")).unwrap().value;
    let guest: f64 = percent("guest.kernel") + percent("guest.user");
    assert!((guest - 100.0).abs() < 1e-6, "{guest}");
    assert!(
        percent("host.qemu") + percent("host.kvm") + percent("host.guest") > 0.0,
        "{cell:?}"
    );
    assert!(percent("host.server") > 0.0, "{cell:?}");
    // fio also ran on the image itself.
    let bare = cell.evidence.as_ref().and_then(|one| one.bare.as_ref());
    let iops = cell.measure("iops").unwrap().value;
    assert!(bare.unwrap().requests_per_second > iops, "{cell:?}");
}
