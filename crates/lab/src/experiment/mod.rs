//! Experiments: each has a question, parameters, and a way to measure.
//!
//! Each experiment has a folder and a line in [`ALL`], from which help, checks and plans are made.
//!
//! An [`Order`] is an experiment with values of its parameters. The order determines a plan of
//! cells: one cell per round for each point of the experiment's [`Design`]. [`runner`] runs the
//! cells one by one into a run directory.
//!
//! # Cells
//!
//! - A cell is saved when it ends, so that an interrupted run can be resumed.
//! - An experiment may add points that depend on the results of earlier cells
//!   ([`Experiment::after`]). An additional cell can test a suspected limiter; that cell is a trial
//!   and not a point (`confirm`).
//! - A cell records evidence, never a verdict. The report derives the limiter, so that better rules
//!   can judge an old run. Measures have units, so that a report does not need the experiment.
//! - A bed may be kept for later cells (`bed::Pool`). Each cell must then begin in the same state.

mod attributes;
mod backends;
mod bonnie;
mod boot;
mod confirm;
mod ffsb;
mod levels;
mod memory;
pub mod nested;
mod network;
mod next;
mod order;
mod parallel;
mod parameter;
mod path;
mod place;
pub mod probe;
mod profile;
pub mod runner;
mod seqread;
mod settings;
mod shared;
mod sharing;
mod storages;
mod technologies;
pub mod wiki;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_run::evidence::{Bare, Evidence};
use fathom_run::{Beside, Cell, Environment, Measure, Series, Sheet};
use serde::{Deserialize, Serialize};

use crate::bed::Seen;
use crate::error::{Error, Result};
use crate::evidence;
use crate::host::Accelerator;

pub use order::{Order, Values};
pub use parameter::{Kind, Parameter, Settings};

/// An experiment: a question, and how its cells are run.
pub trait Experiment: Sync {
    /// The name: one word.
    fn name(&self) -> &'static str;

    /// Summary: one line, without a full stop.
    fn about(&self) -> &'static str;

    /// The question, how it is measured, and how to read the results: paragraphs of text.
    fn description(&self) -> &'static str;

    /// Returns the parameters, with the kinds of their values and their defaults.
    fn parameters(&self) -> &'static [Parameter];

    /// Returns a parameter's default values. An experiment may choose them by the machine.
    fn defaults(&self, parameter: &Parameter) -> Vec<String> {
        parameter.defaults()
    }

    /// Number of rounds unless the user sets it.
    fn rounds(&self) -> u32 {
        1
    }

    /// A table with points side by side, if that is clearer than a row for each point.
    fn beside(&self) -> Option<Beside> {
        None
    }

    /// A table with measures in rows, if that is clearer than a row for each point.
    fn sheet(&self) -> Option<Sheet> {
        None
    }

    /// Returns which combinations of values are run.
    ///
    /// # Errors
    /// One line, if the values do not determine a design.
    fn design(&self, _values: &Values) -> Result<Design> {
        Ok(Design::Full)
    }

    /// Checks a cell's settings before any cell is run.
    ///
    /// # Errors
    /// One line that names the values that do not go together or do not work on this machine.
    fn check(&self, settings: &Settings) -> Result<()>;

    /// Returns the requirements of a cell, which are checked before any cell is run.
    ///
    /// # Errors
    /// If the settings are not valid for this experiment.
    fn needs(&self, settings: &Settings) -> Result<Vec<Need>>;

    /// Whether cells run in an emulated KVM host if this machine has no KVM.
    ///
    /// True for experiments that have nothing to measure without KVM.
    fn goes_to_kvm_host(&self) -> bool {
        false
    }

    /// Returns the estimated time of a cell.
    fn estimate(&self, settings: &Settings) -> Duration;

    /// Returns the point to run after a cell, if the experiment chooses points by earlier results.
    fn after(&self, _cell: &Cell) -> Option<Settings> {
        None
    }

    /// Starts a session, which runs cells.
    fn begin(&self, context: &Context) -> Box<dyn Session>;
}

/// Determines which combinations of values become points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Design {
    /// All combinations.
    Full,
    /// The base, with the first value of each parameter, and each point that differs in one value.
    OneFactor,
}

/// Runs cells one after the other. Resources of a cell may be kept for the next one.
pub trait Session {
    /// Called before each cell with the number of its round.
    ///
    /// Figures that cells share, such as those of the host itself, are measured anew in each round:
    /// the machine may have changed.
    fn begin_round(&mut self, _round: u32) {}

    /// Runs a cell. `folder` exists already; files written to it stay in the run directory.
    ///
    /// # Errors
    /// Any failure of images, servers and guests, with their last output.
    fn cell(
        &mut self,
        settings: &Settings,
        folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield>;
}

/// The environment that all cells share.
#[derive(Clone, Debug, Default)]
pub struct Context {
    /// Path of this program, which serves disks and also runs in guests.
    pub fathom: PathBuf,
}

/// Results of a cell.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Yield {
    /// Measured values, in the order in which reports show them.
    pub measures: Vec<Measure>,
    /// Measures over time; empty if the experiment has none.
    pub series: Vec<Series>,
    /// Evidence for the cell's limiter; `None` if none was collected.
    pub evidence: Option<Evidence>,
    /// For each parameter, the name of the cell's value in a sentence.
    pub words: BTreeMap<String, String>,
    /// The machines on which the cell ran, if the cell reports them.
    pub environment: Option<Environment>,
    /// Problems that did not end the cell, one line each.
    pub problems: Vec<String>,
}

impl From<Seen> for Yield {
    /// Converts observations, and adds the measures derived from them.
    fn from(seen: Seen) -> Yield {
        let mut measures = seen.measures;
        measures.extend(evidence::measures(&seen.evidence));
        Yield {
            measures,
            series: seen.series,
            evidence: Some(seen.evidence),
            ..Yield::default()
        }
    }
}

impl Yield {
    /// Adds the result of the same work on the bare device.
    pub fn compare(&mut self, bare: Bare) {
        let evidence = self.evidence.get_or_insert_default();
        evidence.bare = Some(bare);
    }
}

/// A requirement of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A CPU on which user-mode Linux can boot.
    UserModeLinux,
    /// A kernel with loop devices.
    LoopDevices,
    /// A program installed on this machine.
    Program(&'static str),
    /// QEMU of at least this version (major, minor).
    Qemu(u32, u32),
    /// A kernel for guests.
    Kernel,
    /// An I/O engine of fio that not every build includes.
    FioEngine(&'static str),
    /// A module of the guests' kernel; the module may be built in.
    Module(&'static str),
    /// Hardware virtualisation.
    Kvm,
    /// Root privileges; the text says what needs them.
    Root(&'static str),
    /// The kernel's own back-end for network cards of guests (vhost-net).
    VhostNet,
    /// Free huge pages of 2 MiB: this number of them.
    HugePages(u64),
}

/// All experiments.
pub const ALL: &[&dyn Experiment] = &[
    &seqread::Seqread,
    &wiki::Wiki,
    &ffsb::Ffsb,
    &settings::Factors,
    &storages::Storages,
    &bonnie::Bonnie,
    &profile::Profiling,
    &boot::Booting,
    &backends::Backends,
    &parallel::Parallel,
    &levels::Levels,
    &network::Network,
    &technologies::Technologies,
    &attributes::Attributes,
    &sharing::Sharing,
    &path::Paths,
];

/// Finds an experiment by its name.
pub fn find(name: &str) -> Option<&'static dyn Experiment> {
    ALL.iter().find(|one| one.name() == name).copied()
}

impl Need {
    /// Requirements of every guest. QEMU 6.0 emulates SVM well enough for KVM.
    pub const GUEST: [Need; 3] = [Need::Qemu(6, 0), Need::Kernel, Need::Program("busybox")];

    /// Whether the requirement depends on the machine itself, not on installed programs.
    fn is_of_machine(self) -> bool {
        matches!(
            self,
            Need::Kvm
                | Need::Root(_)
                | Need::HugePages(_)
                | Need::UserModeLinux
                | Need::LoopDevices
                | Need::VhostNet
        )
    }

    /// Checks the requirement.
    ///
    /// # Errors
    /// If the requirement is not met; the error says how to meet it.
    pub fn check(self) -> Result<()> {
        match self {
            Need::UserModeLinux => crate::bed::instance::check_cpu(),
            Need::LoopDevices if Path::new("/dev/loop-control").exists() => Ok(()),
            Need::LoopDevices => Err(Error::Protocol(
                "this machine has no loop devices; load their module (modprobe loop)".into(),
            )),
            Need::Program(name) => crate::host::program(name).map(drop),
            Need::Qemu(major, minor) => crate::host::need_qemu((major, minor)),
            Need::Kernel => crate::kernel::Kernel::find().map(drop),
            Need::FioEngine(name) => fio_engine(name),
            Need::Module(name) => crate::kernel::Kernel::find()?.need_module(name),
            Need::Kvm if Accelerator::detect() == Accelerator::Kvm => Ok(()),
            Need::Kvm => Err(Error::Protocol(
                "this machine has no hardware virtualisation (no /dev/kvm, or no vmx or svm); \
                 --kvm-host runs the experiment in an emulated machine with KVM"
                    .into(),
            )),
            Need::Root(_) if rustix::process::geteuid().is_root() => Ok(()),
            Need::Root(what) => Err(Error::Protocol(format!("{what} needs root's rights"))),
            Need::VhostNet if Path::new("/dev/vhost-net").exists() => Ok(()),
            Need::VhostNet => Err(Error::Missing {
                what: "/dev/vhost-net".into(),
                hint: "`modprobe vhost_net`, on a kernel that has it; --net tap does without",
            }),
            Need::HugePages(count) => crate::host::need_huge_pages(count),
        }
    }
}

fn fio_engine(name: &str) -> Result<()> {
    let engines = crate::host::run("fio", &["--enghelp"])?;
    match engines.lines().any(|line| line.trim() == name) {
        true => Ok(()),
        false => Err(Error::Missing {
            what: format!("fio's engine {name}"),
            hint: "install a fio that was built with it, such as Debian's",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names are used unchanged in help, completions and run directories.
    #[test]
    fn every_experiment_is_described_and_runs_with_its_defaults() {
        for one in ALL {
            let plan = Order::new(*one).plan().unwrap();
            let points: usize = plan.parameters.values().map(Vec::len).product();
            assert_eq!(plan.cells.len(), points, "{}", one.name());
            assert!(find(one.name()).is_some());
            assert!(!one.about().ends_with('.') && !one.about().is_empty());
            assert!(one.description().len() > 100);
            let mut names: Vec<_> = one.parameters().iter().map(|p| p.name).collect();
            names.sort_unstable();
            assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
            for parameter in one.parameters() {
                let defaults = parameter.defaults();
                let values = parameter.values(&defaults).unwrap();
                assert_eq!(values, defaults, "{}", parameter.name);
                assert!(!parameter.about.ends_with('.'), "{}", parameter.name);
            }
            let settings = Settings::defaults(one.parameters());
            one.needs(&settings).unwrap();
            assert!(one.estimate(&settings) > Duration::ZERO);
        }
    }
}
