//! Cells planned after others have ended: an experiment may choose points by earlier results, and a
//! run may need more rounds.

use std::collections::BTreeMap;

use fathom_run as run;
use run::{Cell, Planned};

use super::{Experiment, order};
use crate::error::Result;

/// Plans the cell that follows from an ended one, in the same round. Returns `None` if no cell
/// follows, or if the cell is planned already.
pub fn plan(
    experiment: &dyn Experiment,
    plan: &mut run::Experiment,
    ended: &Cell,
) -> Option<Planned> {
    let round = ended.planned.round;
    let settings = experiment.after(ended)?.0;
    let is_same = |cell: &&Planned| cell.settings == settings;
    if plan
        .cells
        .iter()
        .filter(is_same)
        .any(|cell| cell.round == round)
    {
        return None;
    }
    for (name, value) in &settings {
        let values = plan.parameters.entry(name.clone()).or_default();
        if !values.contains(value) {
            values.push(value.clone());
        }
    }
    let next = Planned {
        id: format!("{}-{round}", point(plan, &settings)),
        round,
        settings,
    };
    plan.cells.push(next.clone());
    Some(next)
}

/// Plans another round of all points, and returns its cells in the order in which they are run: the
/// order that a longer plan of the same seed would have.
///
/// # Errors
/// If the plan gets too many cells.
pub fn round(plan: &mut run::Experiment) -> Result<Vec<Planned>> {
    let mut points = BTreeMap::new();
    for cell in &plan.cells {
        let (number, _) = cell.id.split_once('-').unwrap_or((&cell.id, ""));
        let place = number.parse::<u64>().unwrap_or(u64::MAX);
        points.insert((place, number.to_owned()), cell.settings.clone());
    }
    let round = plan.rounds + 1;
    order::check_size(points.len(), round)?;
    let points: Vec<_> = points.into_iter().collect();
    let order = order::orders(plan.seed, points.len()).nth(plan.rounds as usize);
    let cells = order.into_iter().flatten().map(|place| {
        let ((_, number), settings) = &points[place];
        Planned {
            id: format!("{number}-{round}"),
            round,
            settings: settings.clone(),
        }
    });
    let cells: Vec<Planned> = cells.collect();
    plan.cells.extend(cells.clone());
    plan.rounds = round;
    plan.ended = None;
    Ok(cells)
}

/// Returns a point's number, with which its cells' ids begin. A new point gets the next number.
fn point(plan: &run::Experiment, settings: &BTreeMap<String, String>) -> u64 {
    let number = |cell: &Planned| cell.id.split('-').next()?.parse::<u64>().ok();
    let known = plan.cells.iter().find(|cell| cell.settings == *settings);
    let greatest = plan.cells.iter().filter_map(number).max();
    known.and_then(number).unwrap_or(greatest.unwrap_or(0) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::{Order, find};
    use run::{Better, Measure, Unit};

    /// A cell that has ended without problems.
    fn ended(planned: &Planned) -> Cell {
        Cell {
            planned: planned.clone(),
            measures: vec![Measure::new("rate", Unit::PerSecond, 1.0, Better::Higher)],
            ..Cell::default()
        }
    }

    #[test]
    fn an_added_round_is_that_of_a_longer_plan() {
        let mut order = Order::new(find("seqread").unwrap());
        let sizes = (16..28).map(|size| format!("{size}M"));
        order.set("size", &sizes.collect::<Vec<_>>()).unwrap();
        (order.rounds, order.seed) = (5, 7);
        let longer = order.plan().unwrap();
        order.rounds = 2;
        let mut plan = order.plan().unwrap();
        plan.ended = Some("of two rounds".into());
        for expected in longer.cells[24..].chunks(12) {
            assert_eq!(round(&mut plan).unwrap(), expected);
        }
        assert_eq!(plan, longer);
        plan.rounds = 1_000;
        let error = round(&mut plan).unwrap_err().to_string();
        assert!(error.contains("12 points in 1001 rounds"), "{error}");
    }

    #[test]
    fn next_cell_is_planned_once_per_round() {
        let experiment = find("parallel").unwrap();
        let mut order = Order::new(experiment);
        for (name, value) in [("appliances", "10"), ("step", "5"), ("disk", "none,qemu")] {
            order.set(name, &[value.to_owned()]).unwrap();
        }
        order.rounds = 2;
        let mut known = order.plan().unwrap();
        let first = known.cells.clone();
        let of = |cell: &Planned| (cell.settings["disk"].clone(), cell.round);
        let mut follow = |after: &Planned| plan(experiment, &mut known, &ended(after));
        let next: Vec<Planned> = first.iter().map(|cell| follow(cell).unwrap()).collect();
        for (before, after) in first.iter().zip(&next) {
            assert_eq!(after.settings["appliances"], "15");
            assert_eq!(of(before), of(after));
            assert_eq!(follow(before), None, "it is planned");
        }
        let third = follow(&next[0]).unwrap();
        assert_eq!(known.parameters["appliances"], ["10", "15", "20"]);
        let mut ids: Vec<&str> = known.cells.iter().map(|cell| cell.id.as_str()).collect();
        ids.sort_unstable();
        assert_eq!(
            ids[..8],
            ["1-1", "1-2", "2-1", "2-2", "3-1", "3-2", "4-1", "4-2"]
        );
        assert_eq!((ids.len(), third.id.as_str()), (9, ids[8]));
        assert!(third.id.starts_with("5-"), "{}", third.id);
    }
}
