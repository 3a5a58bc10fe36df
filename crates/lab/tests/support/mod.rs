//! Experiments, run as the command line does.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::path::Path;

use fathom_lab::experiment::runner::Runner;
use fathom_lab::experiment::{Context, Order, find};
use fathom_run::{Cell, Experiment, Run};

/// Runs all cells with these settings into the new directory `dir`.
pub fn run_in(
    dir: &Path,
    context: &Context,
    experiment: &str,
    settings: &[(&str, &str)],
) -> (Experiment, Vec<Cell>) {
    let mut order = Order::new(find(experiment).unwrap());
    for (name, text) in settings {
        order.set(name, &[(*text).to_owned()]).unwrap();
    }
    let runner = Runner::new(&order, dir).unwrap();
    runner.run(context, None, &mut |_| {}).unwrap();
    let plan = Run::load(dir).unwrap().experiment.unwrap();
    let cells = plan.load_cells(dir).unwrap();
    assert_eq!(cells.len(), plan.cells.len());
    (plan, cells)
}

/// The same in a directory that is removed.
pub fn run(experiment: &str, settings: &[(&str, &str)]) -> Vec<Cell> {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("run");
    run_in(&dir, &Context::default(), experiment, settings).1
}

pub fn value(cell: &Cell, name: &str) -> f64 {
    let measure = cell.measure(name);
    measure
        .unwrap_or_else(|| panic!("no {name}: {cell:?}"))
        .value
}
