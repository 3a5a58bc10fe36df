//! An order: an experiment with values of its parameters, and the cells planned from them.

use std::collections::BTreeMap;

use fathom_run as run;
use fathom_units::unknown_name;
use run::Planned;

use super::{Design, Experiment, Settings};
use crate::error::{Error, Result};

/// The values of every parameter, in canonical spelling.
pub type Values = BTreeMap<String, Vec<String>>;

/// An experiment with its parameters' values.
#[derive(Clone)]
pub struct Order {
    /// Experiment to run.
    pub experiment: &'static dyn Experiment,
    values: Values,
    /// Number of times each point is run.
    pub rounds: u32,
    /// Seed of the order of the cells.
    pub seed: u64,
}

/// Maximum number of cells of a plan. More would take too long, and too much memory.
const MOST_CELLS: usize = 10_000;

impl Order {
    /// Creates an order with all defaults and one round.
    pub fn new(experiment: &'static dyn Experiment) -> Order {
        let parameters = experiment.parameters().iter();
        Order {
            experiment,
            values: parameters
                .map(|one| (one.name.to_owned(), experiment.defaults(one)))
                .collect(),
            rounds: 1,
            seed: 0,
        }
    }

    /// Sets a parameter's values; several values make it an axis.
    ///
    /// # Errors
    /// If the parameter does not exist or does not accept a value.
    pub fn set(&mut self, name: &str, texts: &[String]) -> Result<()> {
        let parameters = self.experiment.parameters();
        let Some(parameter) = parameters.iter().find(|one| one.name == name) else {
            let names: Vec<&str> = parameters.iter().map(|one| one.name).collect();
            let what = format!("parameter of experiment '{}':", self.experiment.name());
            let list = "'fathom lab list' lists all";
            return Err(Error::Protocol(unknown_name(&what, name, &names, list)));
        };
        let values = parameter.values(texts)?;
        self.values.insert(name.to_owned(), values);
        Ok(())
    }

    /// Plans the cells, in the order in which they are to be run.
    ///
    /// The cells are ordered round by round. Each round shuffles the points, so that a drift of the
    /// machine does not look like a difference between points.
    ///
    /// # Errors
    /// If values do not go together, or make too many cells.
    pub fn plan(&self) -> Result<run::Experiment> {
        let points = self.points()?;
        for point in &points {
            self.experiment.check(point)?;
        }
        let width = points.len().to_string().len();
        let mut cells = Vec::new();
        for (round, order) in (1..=self.rounds).zip(orders(self.seed, points.len())) {
            cells.extend(order.into_iter().map(|point| Planned {
                id: format!("{:0width$}-{round}", point + 1),
                round,
                settings: points[point].0.clone(),
            }));
        }
        Ok(run::Experiment {
            name: self.experiment.name().to_owned(),
            parameters: self.values.clone(),
            rounds: self.rounds,
            seed: self.seed,
            beside: self.experiment.beside(),
            sheet: self.experiment.sheet(),
            cells,
            ..run::Experiment::default()
        })
    }

    /// Returns the points of the experiment's design.
    fn points(&self) -> Result<Vec<Settings>> {
        let design = self.experiment.design(&self.values)?;
        let counts = self.values.values().map(Vec::len);
        let points = match design {
            Design::Full => counts.fold(1, usize::saturating_mul),
            Design::OneFactor => 1 + counts.map(|count| count.saturating_sub(1)).sum::<usize>(),
        };
        check_size(points, self.rounds)?;
        Ok(match design {
            Design::Full => self.combinations(),
            Design::OneFactor => self.one_by_one(),
        })
    }

    /// Returns every combination of values; the last parameter changes fastest.
    fn combinations(&self) -> Vec<Settings> {
        let mut points = vec![Settings::default()];
        for parameter in self.experiment.parameters() {
            let values = &self.values[parameter.name];
            let with = |point: &Settings| {
                let point = point.clone();
                let each = values.iter();
                each.map(move |value| point.clone().with(parameter.name, value))
                    .collect::<Vec<_>>()
            };
            points = points.iter().flat_map(with).collect();
        }
        points
    }

    /// Returns the point with the first value of each parameter, and the points that differ from it
    /// in the value of one parameter.
    fn one_by_one(&self) -> Vec<Settings> {
        let base = self.values.iter();
        let base = base.filter_map(|(name, values)| Some((name.clone(), values.first()?.clone())));
        let base = Settings(base.collect());
        let mut points = vec![base.clone()];
        for parameter in self.experiment.parameters() {
            let others = self.values[parameter.name].iter().skip(1);
            points.extend(others.map(|value| base.clone().with(parameter.name, value)));
        }
        points
    }
}

/// Checks the number of a plan's cells.
///
/// # Errors
/// If there are too many cells, or none.
pub(super) fn check_size(points: usize, rounds: u32) -> Result<()> {
    let cells = points.saturating_mul(rounds as usize);
    if cells == 0 || cells > MOST_CELLS {
        return Err(Error::Protocol(format!(
            "{points} points in {rounds} rounds make {cells} cells; 1 to {MOST_CELLS} can be run"
        )));
    }
    Ok(())
}

/// Returns the order of the points in each round, without end.
pub(super) fn orders(seed: u64, points: usize) -> impl Iterator<Item = Vec<usize>> {
    let mut random = SplitMix(seed);
    std::iter::repeat_with(move || {
        let mut order: Vec<usize> = (0..points).collect();
        random.shuffle(&mut order);
        order
    })
}

/// SplitMix64 (Steele, Lea and Flood): the order of cells is the same on every machine.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Shuffles with the algorithm of Fisher and Yates.
    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = (self.next() % (last as u64 + 1)) as usize;
            items.swap(last, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::find;
    use super::*;

    fn order(rounds: u32, seed: u64) -> Order {
        let mut order = Order::new(find("seqread").unwrap());
        let texts = |texts: &[&str]| texts.iter().map(|&t| t.to_owned()).collect::<Vec<_>>();
        order.set("disk", &texts(&["fathom", "qsd"])).unwrap();
        order.set("size", &texts(&["16M", "32M", "64M"])).unwrap();
        (order.rounds, order.seed) = (rounds, seed);
        order
    }

    #[test]
    fn every_point_is_in_every_round_once() {
        let plan = order(4, 7).plan().unwrap();
        assert_eq!(plan.cells.len(), 24);
        for (round, cells) in (1..).zip(plan.cells.chunks(6)) {
            let mut points: Vec<_> = cells.iter().map(|cell| &cell.settings).collect();
            points.sort();
            points.dedup();
            assert_eq!(points.len(), 6);
            assert!(cells.iter().all(|cell| cell.round == round));
        }
    }

    #[test]
    fn the_order_is_the_seeds_and_differs_between_rounds() {
        let ids = |seed| -> Vec<String> {
            let cells = order(4, seed).plan().unwrap().cells;
            cells.into_iter().map(|cell| cell.id).collect()
        };
        assert_eq!(ids(7), ids(7));
        assert_ne!(ids(7), ids(8));
        let ids = ids(7);
        let points = |round: &[String]| -> Vec<String> {
            round.iter().map(|id| id[..1].to_owned()).collect()
        };
        let rounds: Vec<_> = ids.chunks(6).map(points).collect();
        assert!(rounds.iter().any(|round| *round != rounds[0]), "{rounds:?}");
    }

    #[test]
    fn one_factor_at_a_time_is_the_base_and_each_other_value_alone() {
        let mut order = Order::new(find("settings").unwrap());
        let texts = |texts: &[&str]| texts.iter().map(|&t| t.to_owned()).collect::<Vec<_>>();
        order
            .set("cache", &texts(&["none", "writethrough"]))
            .unwrap();
        order
            .set("bus", &texts(&["virtio-blk", "ide", "nvme", "virtio-scsi"]))
            .unwrap();
        (order.rounds, order.seed) = (2, 7);
        let plan = order.plan().unwrap();
        assert_eq!(plan.cells.len(), 2 * (1 + 1 + 3));
        let of = |round: usize| {
            let cells = plan.cells[round * 5..][..5].iter();
            let mut pairs: Vec<_> = cells
                .map(|cell| {
                    (
                        cell.settings["cache"].as_str(),
                        cell.settings["bus"].as_str(),
                    )
                })
                .collect();
            pairs.sort_unstable();
            pairs
        };
        let wanted = [
            ("none", "ide"),
            ("none", "nvme"),
            ("none", "virtio-blk"),
            ("none", "virtio-scsi"),
            ("writethrough", "virtio-blk"),
        ];
        assert_eq!((of(0), of(1)), (wanted.to_vec(), wanted.to_vec()));
        // A cell's id names its point in every round.
        let ids = |round: usize| {
            let cells = plan.cells[round * 5..][..5].iter();
            let mut ids: Vec<_> = cells
                .map(|cell| (cell.id[..1].to_owned(), cell.settings.clone()))
                .collect();
            ids.sort();
            ids
        };
        assert_eq!(ids(0), ids(1));
        order.set("full", &texts(&["on"])).unwrap();
        assert_eq!(order.plan().unwrap().cells.len(), 2 * 2 * 4);
        order.set("full", &texts(&["on", "off"])).unwrap();
        let error = order.plan().err().unwrap().to_string();
        assert!(error.contains("--full is on or off"), "{error}");
    }

    #[test]
    fn what_cannot_be_planned_is_said() {
        let mut order = order(1, 0);
        let error = order.set("color", &["red".into()]).unwrap_err().to_string();
        assert!(error.contains("unknown parameter of experiment"), "{error}");
        order.rounds = 5000;
        let error = order.plan().err().unwrap().to_string();
        assert!(
            error.contains("6 points in 5000 rounds make 30000 cells"),
            "{error}"
        );
    }
}
