//! Cells of an experiment: the plan, and the results of each cell. A cell is on disk as soon as it
//! has ended, so that an interrupted run can be resumed.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::evidence::Evidence;
use crate::measure::{Measure, Series};
use crate::open::{MAX_RUN, RUN, is_name, open_within};

/// Folder of the cells in a run directory.
pub(crate) const CELLS: &str = "cells";
const FILE: &str = "cell.json";
/// Maximum size of a cell.json in bytes.
const MAX_BYTES: u64 = 64 << 20;
/// Maximum number of cells of one run.
const MAX_CELLS: usize = 100_000;

/// The plan of an experiment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Experiment {
    /// Name of the experiment in options, such as `storages`.
    pub name: String,
    /// Every parameter with its values; one with several values is an axis.
    pub parameters: BTreeMap<String, Vec<String>>,
    /// Number of times each point is run.
    pub rounds: u32,
    /// Seed of the order of the cells.
    pub seed: u64,
    /// Table that shows points side by side, if it is clearer than one row per point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<Beside>,
    /// Table that shows measures below each other, if it is clearer than one row per point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sheet: Option<Sheet>,
    /// The cells in the order in which they are run.
    pub cells: Vec<Planned>,
    /// All cells run in an emulated KVM host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub kvm_host: bool,
    /// Suspected limiters are tested by trials.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub confirm: bool,
    /// Why the run has ended, if its number of rounds was chosen by the results.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// The trials so far; they are not points of the experiment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trials: Vec<Trial>,
}

/// A cell that was planned when another cell had ended. The trial repeats the other cell with one
/// change whose effect the suspected limiter predicts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// Trial's own id, round and settings; its fields stand next to the others in JSON.
    #[serde(flatten)]
    pub planned: Planned,
    /// Id of the other cell.
    pub of: String,
    /// Name of the rule that is the other cell's suspected limiter.
    pub limiter: String,
    /// Change of the work done that confirms the suspected limiter.
    pub expects: Expects,
}

/// Effect of a trial if the suspicion is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Expects {
    /// More work is done.
    More,
    /// No more work is done, although more is requested.
    NoMore,
}

/// A table with points that differ only in one parameter side by side in a row.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Beside {
    /// The parameter in which the points differ.
    pub parameter: String,
    /// Measures shown for each point, in this order.
    pub shown: Vec<Shown>,
}

impl Beside {
    /// Creates a table for a parameter from pairs of measure and heading.
    pub fn of(parameter: &str, shown: &[(&str, &str)]) -> Beside {
        let shown = shown.iter().map(|(measure, heading)| Shown {
            measure: (*measure).to_owned(),
            heading: (*heading).to_owned(),
        });
        Beside {
            parameter: parameter.to_owned(),
            shown: shown.collect(),
        }
    }
}

/// A column for each point.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Shown {
    /// Name of the measure. A name that ends in `*` stands for all measures with this prefix and a
    /// number, in one column.
    pub measure: String,
    /// Heading, with the measure's unit.
    pub heading: String,
}

/// A table with measures in rows, and the values of a parameter in columns.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sheet {
    /// The parameter whose values are the columns.
    pub parameter: String,
    /// Rows of the table, from top to bottom.
    pub rows: Vec<SheetRow>,
}

/// A row of a sheet: measured values, or text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SheetRow {
    /// Text of the first column; for a measure, with its unit.
    pub heading: String,
    /// The measure; `None` for a row of text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measure: Option<String>,
    /// Text for each value of the parameter, in a row without a measure.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub said: BTreeMap<String, String>,
}

/// A cell to run: one point of the experiment in one round.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Planned {
    /// Name of the cell's folder.
    pub id: String,
    /// Round, from 1.
    pub round: u32,
    /// Value of every parameter.
    pub settings: BTreeMap<String, String>,
}

/// A cell that has been run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Cell's entry in the plan; its fields stand next to the others in JSON.
    #[serde(flatten)]
    pub planned: Planned,
    /// Start time in seconds since 1970.
    pub started: u64,
    /// Duration in seconds, including everything around the measured window.
    pub seconds: f64,
    /// For each parameter, a description of the cell's value for sentences about its effect, such
    /// as `NFS (/mnt)`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub words: BTreeMap<String, String>,
    /// Measured values, in the order in which the experiment reports them.
    #[serde(default)]
    pub measures: Vec<Measure>,
    /// Measures over time. Empty if the experiment has none.
    #[serde(default)]
    pub series: Vec<Series>,
    /// Evidence for the cell's limiter; `None` if none was collected.
    pub evidence: Option<Evidence>,
    /// Problems that did not end the cell, one line each.
    #[serde(default)]
    pub problems: Vec<String>,
}

/// Lists the settings that differ from `before`: `iodepth=2`, separated by commas.
pub fn changed(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> String {
    let changed = after.iter();
    let changed = changed.filter(|(name, value)| before.get(*name) != Some(*value));
    let texts = changed.map(|(name, value)| format!("{name}={value}"));
    texts.collect::<Vec<_>>().join(", ")
}

impl Planned {
    /// Returns the cell's folder, where an experiment may also leave files of its own.
    pub fn folder(&self, run: &Path) -> PathBuf {
        run.join(CELLS).join(&self.id)
    }

    /// Returns true if the cell's folder contains a run directory of the experiment's own.
    pub fn holds_run(&self, run: &Path) -> bool {
        let file = open_within(run, &[CELLS, &self.id], RUN, MAX_RUN);
        file.is_ok()
    }

    /// Reads a JSON file of the cell's folder; `None` if the file does not exist.
    ///
    /// # Errors
    /// The file is damaged, is larger than `most` bytes, or does not lie in that folder.
    pub(crate) fn read<T: DeserializeOwned>(
        &self,
        run: &Path,
        file: &str,
        most: u64,
    ) -> Result<Option<T>> {
        let path = self.folder(run).join(file);
        let file = match open_within(run, &[CELLS, &self.id], file, most) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io(&path)(error)),
        };
        let text = io::read_to_string(file).map_err(Error::io(&path))?;
        serde_json::from_str(&text)
            .map(Some)
            .map_err(|error| Error::unusable(&path, format!("damaged: {error}")))
    }
}

impl Cell {
    /// Writes `cells/ID/cell.json`, and creates the folders. The file is written completely or not
    /// at all, even if the machine crashes.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, run: &Path) -> Result<()> {
        let folder = self.planned.folder(run);
        fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
        crate::open::replace(&folder.join(FILE), self)
    }

    /// Reads a planned cell; `None` if the cell has not been completed.
    ///
    /// # Errors
    /// The file is damaged, belongs to another plan, or does not lie in that folder.
    pub fn load(run: &Path, planned: &Planned) -> Result<Option<Cell>> {
        match planned.read::<Cell>(run, FILE, MAX_BYTES)? {
            Some(cell) if cell.planned != *planned => {
                let problem = "it is not the cell that the run's plan has here";
                Err(Error::unusable(&planned.folder(run).join(FILE), problem))
            }
            read => Ok(read),
        }
    }

    /// Returns the measure with this name.
    pub fn measure(&self, name: &str) -> Option<&Measure> {
        self.measures.iter().find(|measure| measure.name == name)
    }
}

impl Experiment {
    /// Plans another cell, for runs without a plan. Settings that already exist get another round.
    pub fn add(&mut self, settings: BTreeMap<String, String>) -> &Planned {
        for (name, value) in &settings {
            let values = self.parameters.entry(name.clone()).or_default();
            if !values.contains(value) {
                values.push(value.clone());
            }
        }
        let mut points: Vec<_> = self.cells.iter().map(|cell| &cell.settings).collect();
        points.push(&settings);
        let rounds = points.iter().filter(|&&one| *one == settings).count();
        let mut distinct: Vec<_> = Vec::new();
        for point in points {
            if !distinct.contains(&point) {
                distinct.push(point);
            }
        }
        let point = distinct.iter().position(|&one| *one == settings);
        let (point, round) = (point.unwrap_or_default() + 1, rounds as u32);
        self.rounds = self.rounds.max(round);
        self.cells.push(Planned {
            id: format!("{point}-{round}"),
            round,
            settings,
        });
        &self.cells[self.cells.len() - 1]
    }

    /// Reads the cells that have been completed, in the plan's order.
    ///
    /// # Errors
    /// Like [`Cell::load`].
    pub fn load_cells(&self, run: &Path) -> Result<Vec<Cell>> {
        let cells = self.cells.iter().map(|planned| Cell::load(run, planned));
        cells.filter_map(Result::transpose).collect()
    }

    /// Checks that ids are unique and, since they become paths, that they cannot leave the run
    /// directory.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        let count = self.cells.len().saturating_add(self.trials.len());
        if count > MAX_CELLS {
            return Err(format!("{count} cells; {MAX_CELLS} are the most"));
        }
        let trials = self.trials.iter().map(|trial| &trial.planned);
        let cells = self.cells.iter().chain(trials);
        let mut ids: Vec<&str> = cells.map(|cell| cell.id.as_str()).collect();
        if let Some(id) = ids.iter().find(|id| !is_name(id)) {
            return Err(format!("{id:?} is no name of a cell"));
        }
        ids.sort_unstable();
        match ids.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(format!("two cells have the name {:?}", pair[0])),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{Better, Unit};

    fn planned(id: &str) -> Planned {
        Planned {
            id: id.into(),
            round: 1,
            settings: BTreeMap::from([("disk".into(), "fathom".into())]),
        }
    }

    fn cell(id: &str) -> Cell {
        Cell {
            planned: planned(id),
            started: 1_790_000_000,
            seconds: 2.5,
            measures: vec![Measure::new("iops", Unit::PerSecond, 1e5, Better::Higher).of(7)],
            evidence: Some(Evidence::default()),
            ..Cell::default()
        }
    }

    #[test]
    fn a_cell_is_read_as_it_was_saved_and_is_missing_until_then() {
        let dir = tempfile::tempdir().unwrap();
        let experiment = Experiment {
            cells: vec![planned("0001"), planned("0002")],
            ..Experiment::default()
        };
        assert_eq!(experiment.load_cells(dir.path()).unwrap(), []);
        cell("0002").save(dir.path()).unwrap();
        assert_eq!(experiment.load_cells(dir.path()).unwrap(), [cell("0002")]);
        // A folder without cell.json belongs to a cell that was interrupted.
        fs::create_dir(experiment.cells[0].folder(dir.path())).unwrap();
        assert_eq!(experiment.load_cells(dir.path()).unwrap().len(), 1);
    }

    #[test]
    fn a_cell_of_another_plan_or_from_elsewhere_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        cell("1").save(dir.path()).unwrap();
        let other = Planned {
            round: 2,
            ..planned("1")
        };
        let error = Cell::load(dir.path(), &other).unwrap_err().to_string();
        assert!(error.contains("not the cell"), "{error}");
        let outside = tempfile::tempdir().unwrap();
        cell("1").save(outside.path()).unwrap();
        let inside = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(outside.path().join(CELLS), inside.path().join(CELLS)).unwrap();
        assert!(Cell::load(inside.path(), &planned("1")).is_err());
    }

    #[test]
    fn a_run_within_a_cell_is_one_of_that_directory() {
        let dir = tempfile::tempdir().unwrap();
        let cell = planned("1");
        assert!(!cell.holds_run(dir.path()));
        fs::create_dir_all(cell.folder(dir.path())).unwrap();
        fs::write(cell.folder(dir.path()).join("run.json"), "{}").unwrap();
        assert!(cell.holds_run(dir.path()));
        let other = planned("2");
        std::os::unix::fs::symlink(cell.folder(dir.path()), other.folder(dir.path())).unwrap();
        assert!(!other.holds_run(dir.path()));
    }

    #[test]
    fn what_is_run_without_a_plan_gets_points_and_rounds() {
        let mut experiment = Experiment::default();
        let mut add = |disk: &str| {
            let settings = BTreeMap::from([("disk".to_owned(), disk.to_owned())]);
            experiment.add(settings).id.clone()
        };
        let ids = ["a", "b", "a", "c", "a"].map(&mut add);
        assert_eq!(ids, ["1-1", "2-1", "1-2", "3-1", "1-3"]);
        assert_eq!(experiment.parameters["disk"], ["a", "b", "c"]);
        assert_eq!(experiment.rounds, 3);
        assert_eq!(experiment.check(), Ok(()));
    }

    #[test]
    fn names_that_lead_elsewhere_or_come_twice_are_refused() {
        let with = |ids: &[&str]| Experiment {
            cells: ids.iter().map(|id| planned(id)).collect(),
            ..Experiment::default()
        };
        assert_eq!(with(&["a", "b"]).check(), Ok(()));
        assert!(with(&["a", "../b"]).check().is_err());
        assert!(with(&["a", "b", "a"]).check().is_err());
    }
}
