//! The lab against QEMU's own servers: when this fails, the lab is at fault and not Fathom.

use std::path::Path;

use fathom_lab::experiment::runner::Runner;
use fathom_lab::experiment::{Context, Order, find};
use fathom_run::{Cell, Run};

fn order() -> Order {
    let mut order = Order::new(find("seqread").unwrap());
    let mut set = |name: &str, text: &str| order.set(name, &[text.to_owned()]).unwrap();
    set("disk", "qsd,qemu-mapped");
    set("size", "16M");
    set("runtime", "2s");
    order
}

fn cells(dir: &Path) -> Vec<Cell> {
    let plan = Run::load(dir).unwrap().experiment.unwrap();
    plan.load_cells(dir).unwrap()
}

/// Two cells, the second of which is run when an interrupted run is continued.
#[test]
fn guests_read_disks_of_qemus_and_an_interrupted_run_goes_on() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("run");
    let context = Context::default();
    let mut steps = Vec::new();
    let mut progress = |step: &str| steps.push(step.to_owned());
    Runner::new(&order(), &dir)
        .unwrap()
        .run(&context, None, &mut progress)
        .unwrap();
    let whole = cells(&dir);
    assert_eq!(whole.len(), 2);
    for cell in &whole {
        let measure = |name| {
            cell.measure(name)
                .unwrap_or_else(|| panic!("no {name}: {cell:?}"))
        };
        let (iops, mean) = (measure("iops").value, measure("latency.mean").value);
        assert!(measure("iops").samples > 0 && iops > 0.0, "{cell:?}");
        // Requests do not overlap, and the time between two requests is not part of their latency.
        let together = iops * mean / 1e9;
        assert!((0.5..=1.0).contains(&together), "{together}: {cell:?}");
    }
    assert!(
        steps
            .iter()
            .any(|step| step.starts_with("cell 2 of 2, disk=")),
        "{steps:?}"
    );
    assert!(
        steps.iter().any(|step| step.contains("booting")),
        "{steps:?}"
    );

    // As if it had been interrupted in its second cell.
    let second = &whole[1].planned;
    std::fs::remove_file(second.folder(&dir).join("cell.json")).unwrap();
    std::fs::write(second.folder(&dir).join("half"), "left").unwrap();
    assert_eq!(cells(&dir).len(), 1);
    let runner = Runner::resume(&dir).unwrap();
    assert_eq!(
        runner.left().map(|(cell, _, _)| cell).collect::<Vec<_>>(),
        [second]
    );
    runner.run(&context, None, &mut |_| {}).unwrap();
    let again = cells(&dir);
    let planned = |cells: &[Cell]| {
        cells
            .iter()
            .map(|cell| cell.planned.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(planned(&again), planned(&whole));
    assert_eq!(again[0], whole[0], "it was not run again");
    assert!(!second.folder(&dir).join("half").exists());
    assert_eq!(Runner::resume(&dir).unwrap().left().count(), 0);
}
