//! An experiment's cells: what is to be run, and what each has yielded. A cell is on disk as soon
//! as it has ended, so that a run that was interrupted can go on.

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

/// Of run directories.
pub(crate) const CELLS: &str = "cells";
const FILE: &str = "cell.json";
/// Of a cell.json.
const MAX_BYTES: u64 = 64 << 20;
/// Of one run.
const MAX_CELLS: usize = 100_000;

/// What was asked for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Experiment {
    pub name: String,
    /// Every parameter with its values; one with more than one is an axis.
    pub parameters: BTreeMap<String, Vec<String>>,
    /// How often each point is run.
    pub rounds: u32,
    /// Of the cells' order.
    pub seed: u64,
    /// How its points are set side by side, if that tells more than a row for each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<Beside>,
    /// How its measures are set below each other, if that tells more than a row for each point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sheet: Option<Sheet>,
    /// In the order in which they are run.
    pub cells: Vec<Planned>,
    /// All cells run in a KVM host that is emulated.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub kvm_host: bool,
    /// Suspected limiters are to be tried.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub confirm: bool,
    /// The trials so far; no points of the experiment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trials: Vec<Trial>,
}

/// A cell that was planned when another had ended: the same, with one thing changed of which the
/// other's limiter says what that does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    #[serde(flatten)]
    pub planned: Planned,
    /// The other cell's id.
    pub of: String,
    /// Its suspected limiter: the rule's name.
    pub limiter: String,
    pub expects: Expects,
}

/// What a trial shows if the suspicion is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Expects {
    /// More work is done.
    More,
    /// No more work is done, although more is asked for.
    NoMore,
}

/// Points that differ in one parameter alone, in one row.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Beside {
    /// That parameter.
    pub parameter: String,
    /// Of each point, in this order.
    pub shown: Vec<Shown>,
}

impl Beside {
    /// By a parameter, these measures under these headings.
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

/// A column of such a row.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Shown {
    /// Its name; one that ends in `*` is all measures that begin so and go on with a number, in one
    /// column.
    pub measure: String,
    /// With the unit that the measure has.
    pub heading: String,
}

/// Measures in rows, and a parameter's values in columns.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sheet {
    /// That parameter.
    pub parameter: String,
    pub rows: Vec<SheetRow>,
}

/// A row: figures, or words.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SheetRow {
    pub heading: String,
    /// `None`: nothing is measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measure: Option<String>,
    /// By the parameter's values, where nothing is measured.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub said: BTreeMap<String, String>,
}

/// A cell to run: one point of the experiment, in one round.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Planned {
    /// Its folder's name.
    pub id: String,
    /// From 1.
    pub round: u32,
    /// Every parameter's value.
    pub settings: BTreeMap<String, String>,
}

/// A cell that was run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    #[serde(flatten)]
    pub planned: Planned,
    /// Seconds since 1970.
    pub started: u64,
    /// That it took, with everything around the measured window.
    pub seconds: f64,
    /// By parameters: what the cell's value is called in a sentence of what it makes of a figure,
    /// such as `NFS (/mnt)`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub words: BTreeMap<String, String>,
    #[serde(default)]
    pub measures: Vec<Measure>,
    #[serde(default)]
    pub series: Vec<Series>,
    pub evidence: Option<Evidence>,
    /// What went wrong without ending it, a line each.
    #[serde(default)]
    pub problems: Vec<String>,
}

/// What differs from other settings: `iodepth=2`, with commas between.
pub fn changed(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> String {
    let changed = after.iter();
    let changed = changed.filter(|(name, value)| before.get(*name) != Some(*value));
    let texts = changed.map(|(name, value)| format!("{name}={value}"));
    texts.collect::<Vec<_>>().join(", ")
}

impl Planned {
    /// The cell's folder; an experiment may leave files of its own there.
    pub fn folder(&self, run: &Path) -> PathBuf {
        run.join(CELLS).join(&self.id)
    }

    /// Whether the experiment has left a run directory of its own in the cell's folder.
    pub fn holds_run(&self, run: &Path) -> bool {
        let file = open_within(run, &[CELLS, &self.id], RUN, MAX_RUN);
        file.is_ok()
    }

    /// Reads what is left in the cell's folder as JSON; `None` if it is not there.
    ///
    /// # Errors
    /// When it is damaged or larger than `most` bytes, or is not a file of that directory.
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
    /// Writes `cells/ID/cell.json`, and what it needs of folders. It is there as a whole or not at
    /// all, also after a crash of the machine.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save(&self, run: &Path) -> Result<()> {
        let folder = self.planned.folder(run);
        fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
        crate::open::replace(&folder.join(FILE), self)
    }

    /// Reads a planned cell; `None` if it has not been run to its end.
    ///
    /// # Errors
    /// When it is damaged, or is not a file of that directory.
    pub fn load(run: &Path, planned: &Planned) -> Result<Option<Cell>> {
        match planned.read::<Cell>(run, FILE, MAX_BYTES)? {
            Some(cell) if cell.planned != *planned => {
                let problem = "it is not the cell that the run's plan has here";
                Err(Error::unusable(&planned.folder(run).join(FILE), problem))
            }
            read => Ok(read),
        }
    }

    /// A measure, by its name.
    pub fn measure(&self, name: &str) -> Option<&Measure> {
        self.measures.iter().find(|measure| measure.name == name)
    }
}

impl Experiment {
    /// Plans one more cell, for what is run without a plan: settings that are there already get
    /// another round.
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

    /// The cells that have been run, in the plan's order.
    ///
    /// # Errors
    /// Like [`Cell::load`].
    pub fn load_cells(&self, run: &Path) -> Result<Vec<Cell>> {
        let cells = self.cells.iter().map(|planned| Cell::load(run, planned));
        cells.filter_map(Result::transpose).collect()
    }

    /// Names become paths: they must not lead anywhere else.
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
        // A folder without its cell.json is a cell that was interrupted.
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
