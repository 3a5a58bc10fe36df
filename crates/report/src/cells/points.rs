//! Groups an experiment's cells into points, and sorts the points.

use std::collections::BTreeMap;

use fathom_run::{Experiment, Planned};

/// Maximum number of parameters of an experiment; memory grows with points times parameters.
const MOST_PARAMETERS: usize = 64;

/// Settings by parameter.
pub type Settings = BTreeMap<String, String>;

/// An experiment's points: groups of cells that differ only in their round.
pub(super) struct Points<'a> {
    /// The parameters that vary.
    pub(super) axes: Vec<&'a str>,
    /// The parameters that do not vary.
    pub(super) fixed: BTreeMap<&'a str, &'a str>,
    /// The cells of each point. The first point has the first values of all parameters, if the
    /// experiment planned it.
    pub(super) cells: Vec<Vec<&'a Planned>>,
}

/// A point's values, in the order of axes.
type Place<'a> = Vec<Option<&'a str>>;

impl<'a> Points<'a> {
    /// Groups the cells. The error says why the experiment is not usable.
    pub(super) fn of(experiment: &'a Experiment) -> Result<Points<'a>, String> {
        let varying = varying(experiment);
        if varying.len() > MOST_PARAMETERS {
            let count = varying.len();
            return Err(format!(
                "{count} parameters; {MOST_PARAMETERS} are the most"
            ));
        }
        let axes = varying.iter().filter(|(_, varies)| **varies);
        let axes: Vec<&str> = axes.map(|(name, _)| *name).collect();
        let mut places: BTreeMap<Place, Vec<&Planned>> = BTreeMap::new();
        for cell in &experiment.cells {
            let value = |name: &&str| cell.settings.get(*name).map(String::as_str);
            let place = axes.iter().map(value).collect();
            places.entry(place).or_default().push(cell);
        }
        let ranks: Vec<BTreeMap<&str, usize>> = axes
            .iter()
            .map(|name| {
                let values = experiment.parameters.get(*name).into_iter().flatten();
                values.map(String::as_str).zip(0..).collect()
            })
            .collect();
        let rank = |place: &Place| -> Vec<Option<usize>> {
            let pairs = place.iter().zip(&ranks);
            let ranks = pairs.map(|(value, ranks)| Some(*ranks.get((*value)?)?));
            ranks.collect()
        };
        // Values that the parameters do not list come last.
        let mut sorted: Vec<_> = places.into_iter().collect();
        sorted.sort_by_cached_key(|(place, _)| {
            let last = |rank: Option<usize>| rank.unwrap_or(usize::MAX);
            rank(place).into_iter().map(last).collect::<Vec<usize>>()
        });
        Ok(Points {
            fixed: fixed(experiment, &varying),
            cells: sorted.into_iter().map(|(_, cells)| cells).collect(),
            axes,
        })
    }
}

/// Returns all parameters, and whether each varies: in its listed values, or among the cells.
fn varying(experiment: &Experiment) -> BTreeMap<&str, bool> {
    let parameters = experiment.parameters.iter();
    let mut varying: BTreeMap<&str, bool> = parameters
        .map(|(name, values)| (name.as_str(), values.len() > 1))
        .collect();
    let mut seen: BTreeMap<&str, (&str, usize)> = BTreeMap::new();
    for cell in &experiment.cells {
        for (name, value) in &cell.settings {
            let (first, cells) = seen.entry(name.as_str()).or_insert((value, 0));
            *cells += 1;
            *varying.entry(name.as_str()).or_default() |= *first != value.as_str();
        }
    }
    for (name, (_, cells)) in seen {
        *varying.entry(name).or_default() |= cells < experiment.cells.len();
    }
    varying
}

fn fixed<'a>(
    experiment: &'a Experiment,
    varying: &BTreeMap<&'a str, bool>,
) -> BTreeMap<&'a str, &'a str> {
    let first = experiment.cells.first();
    let value = |name: &str| {
        let set = first.and_then(|cell| cell.settings.get(name));
        let listed = || experiment.parameters.get(name)?.first();
        set.or_else(listed).map(String::as_str)
    };
    let fixed = varying.iter().filter(|(_, varies)| !**varies);
    fixed
        .filter_map(|(name, _)| Some((*name, value(name)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(id: &str, round: u32, settings: &[(&str, &str)]) -> Planned {
        let owned = settings.iter();
        let owned = owned.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Planned {
            id: id.into(),
            round,
            settings: owned.collect(),
        }
    }

    fn experiment(parameters: &[(&str, &[&str])], cells: Vec<Planned>) -> Experiment {
        let owned = |values: &[&str]| values.iter().map(|&value| value.to_owned()).collect();
        let parameters = parameters.iter();
        Experiment {
            parameters: parameters
                .map(|(name, values)| ((*name).to_owned(), owned(values)))
                .collect(),
            cells,
            ..Experiment::default()
        }
    }

    #[test]
    fn points_are_in_the_order_of_the_parameters_values() {
        let server = ["qemu", "fathom"];
        let mut cells = Vec::new();
        for (i, (depth, round)) in [("32", 2), ("1", 1), ("32", 1), ("1", 2)]
            .iter()
            .enumerate()
        {
            for server in server {
                let settings = [("server", server), ("depth", depth), ("rw", "read")];
                cells.push(cell(&format!("{i}{server}"), *round, &settings));
            }
        }
        let experiment = experiment(
            &[
                ("server", &server),
                ("depth", &["1", "32"]),
                ("rw", &["read"]),
            ],
            cells,
        );
        let points = Points::of(&experiment).unwrap();
        assert_eq!(points.axes, ["depth", "server"]);
        assert_eq!(points.fixed, BTreeMap::from([("rw", "read")]));
        let ids = points.cells.iter();
        let ids: Vec<Vec<&str>> = ids
            .map(|cells| cells.iter().map(|cell| cell.id.as_str()).collect())
            .collect();
        assert_eq!(
            ids,
            [
                ["1qemu", "3qemu"],
                ["1fathom", "3fathom"],
                ["0qemu", "2qemu"],
                ["0fathom", "2fathom"]
            ]
        );
    }

    #[test]
    fn unlisted_differences_of_cells_become_an_axis() {
        let cells = vec![
            cell("a", 1, &[("x", "9"), ("only", "here")]),
            cell("b", 1, &[("x", "1")]),
            cell("c", 1, &[("x", "2")]),
        ];
        let experiment = experiment(&[("x", &["2"]), ("none", &[])], cells);
        let points = Points::of(&experiment).unwrap();
        assert_eq!(points.axes, ["only", "x"]);
        assert_eq!(points.fixed, BTreeMap::new());
        let ids: Vec<&str> = points
            .cells
            .iter()
            .map(|cells| cells[0].id.as_str())
            .collect();
        assert_eq!(ids, ["c", "b", "a"]);
        let none = Points::of(&Experiment::default()).map(|points| points.cells.len());
        assert_eq!(none, Ok(0));
    }

    #[test]
    fn parameters_without_end_are_refused() {
        let many = (0..65).map(|i| (i.to_string(), vec!["a".to_owned(), "b".to_owned()]));
        let experiment = Experiment {
            parameters: many.collect(),
            ..Experiment::default()
        };
        let refused = Points::of(&experiment).map(|points| points.cells.len());
        assert_eq!(refused, Err("65 parameters; 64 are the most".to_owned()));
    }
}
