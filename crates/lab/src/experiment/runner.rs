//! Runs the cells of a plan into a run directory. Each cell is saved as soon as it has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fathom_run as run;
use fathom_units::{Utc, short_duration};
use run::{Cell, Planned, Run, RunKind, now};

use super::nested::Nested;
use super::{Context, Experiment, Need, Order, Session, Settings, confirm, find, next};
use crate::environment;
use crate::error::{Context as _, Error, Result};
use crate::host::Accelerator;
use crate::scratch;

/// The next step when all planned cells have run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Another round of all points, with the reason.
    AnotherRound(String),
    /// The end of the run, with the reason.
    End(String),
}

/// Decides by the run directory, when all planned cells have run.
pub type Until<'a> = dyn FnMut(&Path) -> Result<Decision> + 'a;

/// A run that can be started or resumed.
pub struct Runner {
    experiment: &'static dyn Experiment,
    dir: PathBuf,
    run: Run,
    /// Cells that have not run yet, in order.
    left: Vec<Planned>,
}

impl std::fmt::Debug for Runner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runner")
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

impl Runner {
    /// Plans a run into a directory that must not exist yet. Writes nothing.
    ///
    /// # Errors
    /// If values do not go together, or the directory exists.
    pub fn new(order: &Order, dir: &Path) -> Result<Runner> {
        if dir.exists() {
            return Err(Error::Unusable {
                path: dir.to_owned(),
                reason:
                    "exists already; choose another --output, or continue the run with --continue"
                        .into(),
            });
        }
        let plan = order.plan()?;
        Ok(Runner {
            experiment: order.experiment,
            dir: dir.to_owned(),
            left: plan.cells.clone(),
            run: new_run(order.experiment, plan),
        })
    }

    /// Loads an interrupted run, to continue it.
    ///
    /// # Errors
    /// If the directory is not such a run, is damaged, or was planned by another version of the
    /// experiment.
    pub fn resume(dir: &Path) -> Result<Runner> {
        let mut run = Run::load(dir)?;
        let not = |reason: String| Error::Unusable {
            path: dir.to_owned(),
            reason,
        };
        let Some(plan) = &mut run.experiment else {
            return Err(not("only runs of `fathom lab run` can be continued".into()));
        };
        let experiment = find(&plan.name).ok_or_else(|| {
            not(format!(
                "this version of Fathom has no experiment '{}'",
                plan.name
            ))
        })?;
        let mut left = Vec::new();
        for planned in plan.cells.clone() {
            check(experiment, &planned).map_err(|error| not(error.to_string()))?;
            match Cell::load(dir, &planned)? {
                Some(ended) => left.extend(next::plan(experiment, plan, &ended)),
                None => left.push(planned),
            }
        }
        Ok(Runner {
            experiment,
            dir: dir.to_owned(),
            run,
            left,
        })
    }

    /// Also tests the limiter that each cell's evidence suggests: right after the cell, or, for
    /// cells that have run already, before the first new cell.
    pub fn confirm(&mut self) {
        if let Some(plan) = &mut self.run.experiment {
            plan.confirm = true;
        }
    }

    /// Plans more rounds of all points, up to `rounds` in total.
    ///
    /// # Errors
    /// If the run has as many rounds already, or gets too many cells.
    pub fn raise_rounds(&mut self, rounds: u32) -> Result<()> {
        let Some(plan) = &mut self.run.experiment else {
            return Ok(());
        };
        if rounds <= plan.rounds {
            return Err(Error::Protocol(format!(
                "--rounds {rounds}: the run has {} already; name a greater total",
                plan.rounds
            )));
        }
        while plan.rounds < rounds {
            self.left.extend(next::round(plan)?);
        }
        Ok(())
    }

    fn confirms(&self) -> bool {
        self.plan().is_some_and(|plan| plan.confirm)
    }

    /// Runs all cells in an emulated KVM host.
    ///
    /// # Errors
    /// If some cells have run outside it: their results would not be comparable.
    pub fn use_kvm_host(&mut self) -> Result<()> {
        let is_there = self.runs_in_kvm_host();
        let Some(plan) = &mut self.run.experiment else {
            return Ok(());
        };
        if !is_there && self.left.len() < plan.cells.len() {
            let what = "the cells so far were run without --kvm-host, and the others also are";
            return Err(Error::Protocol(what.into()));
        }
        plan.kvm_host = true;
        Ok(())
    }

    fn runs_in_kvm_host(&self) -> bool {
        let has_to =
            || self.experiment.goes_to_kvm_host() && Accelerator::detect() != Accelerator::Kvm;
        self.plan().is_some_and(|plan| plan.kvm_host) || has_to()
    }

    fn plan(&self) -> Option<&run::Experiment> {
        self.run.experiment.as_ref()
    }

    /// The experiment's name.
    pub fn name(&self) -> &'static str {
        self.experiment.name()
    }

    /// Returns the cells that have not run yet, each with its varying values and estimated time.
    pub fn left(&self) -> impl Iterator<Item = (&Planned, String, Duration)> {
        self.left.iter().map(|planned| {
            let settings = Settings(planned.settings.clone());
            let time = self.experiment.estimate(&settings);
            (planned, self.label(planned), time)
        })
    }

    /// Returns the requirements of these cells, without duplicates.
    fn needs(&self, cells: &[Planned]) -> Result<Vec<Need>> {
        let mut needs = Vec::new();
        for planned in cells {
            for need in self.experiment.needs(&Settings(planned.settings.clone()))? {
                if !needs.contains(&need) {
                    needs.push(need);
                }
            }
        }
        Ok(needs)
    }

    /// Checks the requirements of all cells that have not run yet.
    ///
    /// # Errors
    /// One error that names everything that is missing.
    pub fn check_needs(&self) -> Result<()> {
        self.check_needs_of(&self.left)
    }

    fn check_needs_of(&self, cells: &[Planned]) -> Result<()> {
        let in_kvm_host = self.runs_in_kvm_host();
        let mut missing: Vec<Error> = Vec::new();
        for need in self.needs(cells)? {
            if in_kvm_host && need.is_of_machine() {
                continue; // the KVM host has it
            }
            if let Err(error) = need.check()
                && missing
                    .iter()
                    .all(|known| known.to_string() != error.to_string())
            {
                missing.push(error);
            }
        }
        match missing.len() {
            0 => Ok(()),
            1 => Err(missing.remove(0)),
            _ => {
                let lines: Vec<String> = missing.iter().map(Error::to_string).collect();
                Err(Error::Protocol(lines.join("; ")))
            }
        }
    }

    /// Runs the remaining cells, then further rounds while `until` wants another one. Calls
    /// `progress` at each step.
    ///
    /// # Errors
    /// The error of the first cell that fails; the cells before it are saved in the run directory.
    pub fn run(
        mut self,
        context: &Context,
        mut until: Option<&mut Until>,
        progress: &mut dyn FnMut(&str),
    ) -> Result<()> {
        match (&until, self.plan()) {
            // A further round runs all points, also those that have no cell left.
            (Some(_), Some(plan)) => self.check_needs_of(&plan.cells)?,
            _ => self.check_needs()?,
        }
        scratch::sweep();
        let what = || format!("cannot create {}", self.dir.display());
        fs::create_dir_all(&self.dir).context(what)?;
        // Cells that are left for later also run there, even on a machine that has KVM.
        let in_kvm_host = self.runs_in_kvm_host();
        if let Some(plan) = &mut self.run.experiment {
            plan.kvm_host = in_kvm_host;
        }
        self.run.save(&self.dir)?;
        let mut session = self.begin(context)?;
        self.try_ended(&mut *session, progress)?;
        let mut pace = Pace::default();
        if self.left.len() > 1 {
            let count = self.left.len();
            let seed = self.run.experiment.as_ref().map_or(0, |plan| plan.seed);
            progress(&format!("{count} cells to run, their order by seed {seed}"));
        }
        let mut index = 0;
        loop {
            self.run_cells(&mut *session, &mut index, &mut pace, progress)?;
            let Some(until) = &mut until else {
                return Ok(());
            };
            if !self.goes_on(until, progress)? {
                return Ok(());
            }
        }
    }

    /// Plans another round if `until` wants one, else records why the run ends.
    fn goes_on(&mut self, until: &mut Until, progress: &mut dyn FnMut(&str)) -> Result<bool> {
        let Some(plan) = &mut self.run.experiment else {
            return Ok(false);
        };
        let goes_on = match until(&self.dir)? {
            Decision::AnotherRound(why) => {
                self.left.extend(next::round(plan)?);
                progress(&format!("round {} follows: {why}", plan.rounds));
                true
            }
            Decision::End(why) => {
                let end = if plan.rounds == 1 { "" } else { "s" };
                let why = format!("after {} round{end}: {why}", plan.rounds);
                progress(&format!("the run ends {why}"));
                plan.ended = Some(why);
                false
            }
        };
        self.run.save(&self.dir)?;
        Ok(goes_on)
    }

    /// Runs the planned cells from `index` on.
    fn run_cells(
        &mut self,
        session: &mut dyn Session,
        index: &mut usize,
        pace: &mut Pace,
        progress: &mut dyn FnMut(&str),
    ) -> Result<()> {
        while let Some(planned) = self.left.get(*index).cloned() {
            let count = self.left.len();
            let rest = self.left[*index..].iter();
            let rest = rest.map(|one| self.experiment.estimate(&Settings(one.settings.clone())));
            let about = pace.left(rest.sum());
            let mut head = format!("cell {} of {count}", *index + 1);
            for words in [self.label(&planned), self.round(&planned), about] {
                if !words.is_empty() {
                    head = format!("{head}, {words}");
                }
            }
            let settings = Settings(planned.settings.clone());
            let expected = self.experiment.estimate(&settings);
            let begin = Instant::now();
            let cell = Begun {
                planned,
                started: now(),
            };
            let progress = &mut |step: &str| {
                progress(&match count {
                    1 => step.to_owned(),
                    _ => format!("{head}: {step}"),
                });
            };
            let cell = self.one(session, cell, progress)?;
            self.try_limiter(session, &cell, progress)?;
            pace.add(expected, begin.elapsed());
            *index += 1;
            self.plan_next(*index, &cell)?;
        }
        Ok(())
    }

    /// Plans the cell that follows from `cell`, if any, and inserts it at `index`.
    fn plan_next(&mut self, index: usize, cell: &Cell) -> Result<()> {
        let plan = self.run.experiment.as_mut();
        if let Some(next) = plan.and_then(|plan| next::plan(self.experiment, plan, cell)) {
            self.left.insert(index, next);
            self.run.save(&self.dir)?;
        }
        Ok(())
    }

    fn begin(&self, context: &Context) -> Result<Box<dyn Session>> {
        if !self.runs_in_kvm_host() {
            return Ok(self.experiment.begin(context));
        }
        // The trials of cells that have run already may still be missing.
        let cells = self.plan().map_or(&[][..], |plan| &plan.cells);
        let needs = self.needs(cells)?;
        Ok(Box::new(Nested::new(self.experiment, context, needs)))
    }

    /// Runs the missing trials of cells that have run already.
    fn try_ended(
        &mut self,
        session: &mut dyn Session,
        progress: &mut dyn FnMut(&str),
    ) -> Result<()> {
        let cells = match &self.run.experiment {
            Some(plan) if plan.confirm => plan.cells.clone(),
            _ => return Ok(()),
        };
        let left: BTreeSet<String> = self.left.iter().map(|one| one.id.clone()).collect();
        for planned in cells.iter().filter(|one| !left.contains(&one.id)) {
            if let Some(cell) = Cell::load(&self.dir, planned)? {
                self.try_limiter(session, &cell, progress)?;
            }
        }
        Ok(())
    }

    /// Runs the trial of the limiter that the cell's evidence suggests, unless that trial has run.
    fn try_limiter(
        &mut self,
        session: &mut dyn Session,
        cell: &Cell,
        progress: &mut dyn FnMut(&str),
    ) -> Result<()> {
        let trial = confirm::trial(self.experiment, cell).filter(|_| self.confirms());
        let (Some(trial), Some(plan)) = (trial, &mut self.run.experiment) else {
            return Ok(());
        };
        match plan
            .trials
            .iter()
            .find(|one| one.planned.id == trial.planned.id)
        {
            // The rules may have changed since; a trial that has run is kept.
            Some(known) if Cell::load(&self.dir, &known.planned)?.is_some() => return Ok(()),
            Some(_) => plan.trials.retain(|one| one.planned.id != trial.planned.id),
            None => {}
        }
        let what = confirm::changed(&trial, cell);
        let what = format!("is it {}? {what}", trial.limiter);
        let _lifted = match confirm::lift(&trial, cell) {
            Ok(lifted) => lifted,
            Err(error) => {
                progress(&format!("{what}: not tried: {error}"));
                return Ok(());
            }
        };
        plan.trials.push(trial.clone());
        self.run.save(&self.dir)?;
        let planned = trial.planned;
        let begun = Begun {
            planned,
            started: now(),
        };
        let mut progress = |step: &str| progress(&format!("{what}: {step}"));
        self.one(session, begun, &mut progress).map(drop)
    }

    fn one(
        &mut self,
        session: &mut dyn Session,
        begun: Begun,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Cell> {
        let begin = Instant::now();
        let Begun { planned, started } = begun;
        let folder = planned.folder(&self.dir);
        // An interrupted cell may have left files.
        if folder.exists() {
            fs::remove_dir_all(&folder).context(|| format!("cannot empty {}", folder.display()))?;
        }
        fs::create_dir_all(&folder).context(|| format!("cannot create {}", folder.display()))?;
        let settings = Settings(planned.settings.clone());
        session.begin_round(planned.round);
        let yielded = session.cell(&settings, &folder, progress)?;
        let cell = Cell {
            planned,
            started,
            seconds: begin.elapsed().as_secs_f64(),
            words: yielded.words,
            measures: yielded.measures,
            series: yielded.series,
            evidence: yielded.evidence,
            problems: yielded.problems,
        };
        if let Some(environment) = yielded.environment
            && self.run.environment != environment
        {
            self.run.environment = environment;
            self.run.save(&self.dir)?;
        }
        cell.save(&self.dir)?;
        Ok(cell)
    }

    /// Returns the varying values of a cell: `disk=qemu, iodepth=32`.
    fn label(&self, planned: &Planned) -> String {
        let axes = self.run.experiment.iter().flat_map(|plan| &plan.parameters);
        let axes = axes.filter(|(_, values)| values.len() > 1);
        let texts = axes.map(|(name, _)| {
            let value = planned.settings.get(name).map_or("", String::as_str);
            format!("{name}={value}")
        });
        texts.collect::<Vec<_>>().join(", ")
    }

    fn round(&self, planned: &Planned) -> String {
        match self.run.experiment.as_ref().map_or(1, |plan| plan.rounds) {
            0 | 1 => String::new(),
            rounds => format!("round {} of {rounds}", planned.round),
        }
    }
}

struct Begun {
    planned: Planned,
    started: u64,
}

/// Compares the time that cells have taken with their estimates.
#[derive(Default)]
struct Pace {
    expected: Duration,
    taken: Duration,
}

impl Pace {
    fn add(&mut self, expected: Duration, taken: Duration) {
        self.expected += expected;
        self.taken += taken;
    }

    /// Returns the remaining time as text: `about 5m left`.
    fn left(&self, expected: Duration) -> String {
        let ratio = match self.expected.is_zero() {
            true => 1.0,
            false => self.taken.as_secs_f64() / self.expected.as_secs_f64(),
        };
        format!("about {} left", rough(expected.mul_f64(ratio)))
    }
}

/// Formats a time, rounded to the precision of an estimate.
pub fn rough(time: Duration) -> String {
    let seconds = time.as_secs().max(1);
    let step = match seconds {
        0..60 => 5,
        60..3600 => 60,
        _ => 600,
    };
    short_duration(Duration::from_secs(seconds.div_ceil(step) * step))
}

/// Checks a cell of a plan that was read from a file, which may have any contents.
fn check(experiment: &dyn Experiment, planned: &Planned) -> Result<()> {
    let parameters = experiment.parameters();
    let names: BTreeMap<_, _> = parameters.iter().map(|one| (one.name, one)).collect();
    if planned.settings.len() != names.len() {
        let what = "the plan is of another version of this experiment";
        return Err(Error::Protocol(what.into()));
    }
    for (name, value) in &planned.settings {
        let Some(parameter) = names.get(name.as_str()) else {
            return Err(Error::Protocol(format!("there is no parameter '{name}'")));
        };
        parameter.value(value)?;
    }
    experiment.check(&Settings(planned.settings.clone()))
}

fn new_run(experiment: &dyn Experiment, plan: run::Experiment) -> Run {
    let title = format!("{}: {}", experiment.name(), experiment.about());
    Run {
        experiment: Some(plan),
        environment: environment::with_guests(),
        ..Run::new(RunKind::Experiment, title)
    }
}

/// Returns the default name of a run directory: `fathom-wiki-20261121-044538.run` (UTC).
pub fn default_output(experiment: &dyn Experiment) -> PathBuf {
    let begun = Utc::from_seconds(now()).to_string();
    let begun = begun.replace(['-', ':'], "").replace(' ', "-");
    PathBuf::from(format!("fathom-{}-{begun}.run", experiment.name()))
}

#[cfg(test)]
mod tests;
