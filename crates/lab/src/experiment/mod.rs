//! Experiments: what is asked, of whom, and how it is measured. Each is a folder, with one line in
//! [`ALL`], from which help, checks and plans come.
//!
//! An [`Order`] is an experiment with values of its parameters. It makes a plan of cells, one for
//! each point of the experiment's [`Design`] and each round, which [`runner`] runs one by one into a run
//! directory.
//!
//! # Cells
//!
//! - A cell is on disk as soon as it has ended, so that an interrupted run can be resumed.
//! - An experiment may add points that depend on the results of earlier cells
//!   ([`Experiment::after`]). A suspected limiter can be tested by one more cell, which is a trial
//!   and not a point (`confirm`).
//! - A cell records evidence, never a verdict. The report derives the limiter, so that better rules
//!   can judge an old run. Measures state their units, so that a report needs no experiment.
//! - A bed may stay for later cells (`bed::Pool`). Each cell must then begin in the same state.

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

/// A thing to find out.
pub trait Experiment: Sync {
    /// One word.
    fn name(&self) -> &'static str;

    /// One line, without a full stop.
    fn about(&self) -> &'static str;

    /// What it asks, how it is measured, how to read what comes out: paragraphs of text.
    fn description(&self) -> &'static str;

    fn parameters(&self) -> &'static [Parameter];

    /// A parameter's values if nobody says any, where the machine decides.
    fn defaults(&self, parameter: &Parameter) -> Vec<String> {
        parameter.defaults()
    }

    /// How many rounds are run if nobody says.
    fn rounds(&self) -> u32 {
        1
    }

    /// How its points are set side by side, if that tells more than a row for each.
    fn beside(&self) -> Option<Beside> {
        None
    }

    /// How its measures are set below each other, if that tells more than a row for each point.
    fn sheet(&self) -> Option<Sheet> {
        None
    }

    /// Which combinations of values are run.
    ///
    /// # Errors
    /// One line, when the values ask for no one design.
    fn design(&self, _values: &Values) -> Result<Design> {
        Ok(Design::Full)
    }

    /// What can be said of a cell before anything is run.
    ///
    /// # Errors
    /// One line that says which values do not go together, or do not work on this machine.
    fn check(&self, settings: &Settings) -> Result<()>;

    /// What must be there for a cell; each is looked for before anything is run.
    ///
    /// # Errors
    /// When the settings are none of this experiment's.
    fn needs(&self, settings: &Settings) -> Result<Vec<Need>>;

    /// Whether its cells go to an emulated KVM host where this machine has no KVM, because without
    /// they have nothing to measure.
    fn goes_to_kvm_host(&self) -> bool {
        false
    }

    /// How long a cell will take, roughly.
    fn estimate(&self, settings: &Settings) -> Duration;

    /// The point that comes after a cell which has ended, where the experiment goes on by what came
    /// of it.
    fn after(&self, _cell: &Cell) -> Option<Settings> {
        None
    }

    /// Begins to run cells.
    fn begin(&self, context: &Context) -> Box<dyn Session>;
}

/// Which combinations of values become points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Design {
    /// All of them.
    Full,
    /// The base, which has the first value of every parameter, and what differs from it in one.
    OneFactor,
}

/// Cells being run, one after the other; what one needs may stay for the next.
pub trait Session {
    /// Runs a cell. Its folder is there; what is put into it beside the yield stays in the run
    /// directory.
    ///
    /// # Errors
    /// Everything that can go wrong with images, servers and guests, with their last words.
    fn cell(
        &mut self,
        settings: &Settings,
        folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield>;
}

/// What all cells are run with.
#[derive(Clone, Debug, Default)]
pub struct Context {
    /// This program: it serves disks, and runs in guests.
    pub fathom: PathBuf,
}

/// What a cell has yielded.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Yield {
    pub measures: Vec<Measure>,
    pub series: Vec<Series>,
    pub evidence: Option<Evidence>,
    /// By parameters: what the cell's value is called in a sentence.
    pub words: BTreeMap<String, String>,
    /// The machines on which it ran, if that is worth telling.
    pub environment: Option<Environment>,
    /// What went wrong without ending the cell, a line each.
    pub problems: Vec<String>,
}

impl From<Seen> for Yield {
    /// What was seen, and the measures that follow from it.
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
    /// Adds what the same work came to on the bare device.
    pub fn compare(&mut self, bare: Bare) {
        let evidence = self.evidence.get_or_insert_default();
        evidence.bare = Some(bare);
    }
}

/// Something that a cell cannot do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A CPU on which user-mode Linux gets through its boot.
    UserModeLinux,
    /// A kernel that makes block devices of files.
    LoopDevices,
    /// A program of this machine.
    Program(&'static str),
    /// QEMU, at least that new.
    Qemu(u32, u32),
    /// A kernel for guests.
    Kernel,
    /// An I/O engine of fio's that not every build has.
    FioEngine(&'static str),
    /// A module of that kernel, which need not be a file.
    Module(&'static str),
    /// Hardware virtualisation.
    Kvm,
    /// Root's rights, for what is named.
    Root(&'static str),
    /// The kernel's own backend of guests' network cards.
    VhostNet,
    /// Memory in huge pages of 2 MiB that nobody uses: so many of them.
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

/// An experiment by its name.
pub fn find(name: &str) -> Option<&'static dyn Experiment> {
    ALL.iter().find(|one| one.name() == name).copied()
}

impl Need {
    /// What every guest takes. QEMU 6.0 emulates SVM well enough for KVM.
    pub const GUEST: [Need; 3] = [Need::Qemu(6, 0), Need::Kernel, Need::Program("busybox")];

    /// Whether a machine has it or not, whatever is installed there.
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

    /// Looks for it.
    ///
    /// # Errors
    /// When it is not there, with the way to get it.
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

    /// Help, completions and run directories take the names as they are.
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
