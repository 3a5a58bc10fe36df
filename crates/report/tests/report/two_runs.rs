//! Tests which points of two runs of an experiment are the same.

use super::cells::{saved, whole_run};
use crate::support::experiment::{settings, whole};
use fathom_report::cells::{Comparison, terminal};
use fathom_report::render::terminal::Style;

#[test]
fn points_of_two_runs_are_the_same_by_what_varies() {
    let (_dir, a) = whole_run(2);
    let dir = tempfile::tempdir().unwrap();
    let mut run = whole(dir.path(), 2);
    let experiment = run.experiment.as_mut().unwrap();
    // B has only Fathom, which is one of A's points for each number of threads.
    experiment
        .parameters
        .get_mut("server")
        .unwrap()
        .retain(|name| name == "fathom");
    experiment
        .cells
        .retain(|cell| cell.settings["server"] == "fathom");
    let b = saved(&run, dir.path());
    assert_eq!(b.axes, ["threads"]);
    let pair = Comparison::of(("a".into(), a.clone()), ("b".into(), b)).unwrap();
    let places: Vec<_> = pair
        .points
        .iter()
        .map(|point| point.settings.clone())
        .collect();
    assert_eq!(
        places,
        ["1", "8"].map(|threads| settings(&[("server", "fathom"), ("threads", threads)]))
    );
    for point in &pair.points {
        assert_eq!(point.measures["iops"].ratio.as_ref().unwrap().median, 1.0);
    }
    // A parameter that only B has, and that varies in B, makes different points.
    let experiment = run.experiment.as_mut().unwrap();
    for (i, planned) in experiment.cells.iter_mut().enumerate() {
        let bus = ["ide", "virtio"][i / 2];
        planned.settings.insert("bus".into(), bus.into());
    }
    let b = saved(&run, dir.path());
    let pair = Comparison::of(("a".into(), a), ("b".into(), b)).unwrap();
    assert_eq!(pair.points, []);
    let text = terminal::compare(&pair, Style::default());
    assert!(
        text.contains("No points.") && text.contains("6 points of A without"),
        "{text}"
    );
}
