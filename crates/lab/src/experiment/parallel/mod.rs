//! Many small machines at once, as a service runs them that inspects disk images (Richard W.M.
//! Jones, "Multiple libguestfs appliances in parallel", parts 3 and 4).

mod disks;
mod figures;
mod image;
mod inspect;
mod merging;
mod session;
mod together;

use std::path::Path;
use std::time::Duration;

use fathom_run::Cell as Ended;

use super::{
    Context, Design, Experiment, Kind, Need, Parameter, Session, Settings, Values, shared,
};
use crate::error::{Error, Result};
use crate::host::Accelerator;
use crate::machine::{Disk, Machine};
use crate::words::words;
use disks::Disks;

pub struct Parallel;

const MOST: u64 = 1000;

const PARAMETERS: &[Parameter] = &[
    Parameter::new(
        "appliances",
        "Number of machines that are up at the same time",
        shared::count(MOST),
        "1,2,4,8",
    ),
    Parameter::new(
        "step",
        "Number of machines to add until a cell fails; 0: only --appliances",
        Kind::Count {
            least: 0,
            most: MOST,
        },
        "0",
    ),
    Parameter::new(
        "max-memory",
        "Maximum memory of all machines [default: 80% of the available memory]",
        Kind::Size {
            least: 1 << 20,
            most: 1 << 50,
        },
        "",
    ),
    Parameter::new(
        "memory",
        "Memory of each machine",
        Kind::Size {
            least: 64 << 20,
            most: 1 << 40,
        },
        "256M",
    ),
    Parameter::new(
        "disk",
        "Server of the disks: none, one Fathom server, one per disk, or QEMU itself",
        Kind::of::<Disks>(Disks::FORM),
        "none",
    ),
    Parameter::new(
        "work",
        "Work of each machine before it is up: none, or inspect its disk",
        Kind::of::<Work>(Work::FORM),
        "none",
    ),
    Parameter::new(
        "merge",
        "Whether to merge equal pages and measure again (root; --disk none or qemu)",
        Kind::Switch,
        "on",
    ),
    Parameter::new(
        "accelerator",
        "Accelerator of the guests [default: the fastest here]",
        Kind::of::<Accelerator>(Accelerator::FORM),
        "",
    ),
];

words! {
    /// Work of an appliance.
    pub enum Work {
        None = "none",
        /// Inspects its disk, like virt-df and more.
        Inspect = "inspect",
    }
}

/// A measure that a cell has only if all appliances came up and closed.
const RATE: &str = "rate";

impl Experiment for Parallel {
    fn name(&self) -> &'static str {
        "parallel"
    }

    fn about(&self) -> &'static str {
        "Many small machines at once: their number, their start-up time, their memory"
    }

    fn description(&self) -> &'static str {
        "A number of small machines (appliances: a kernel and a small initramfs, one CPU) \
         start together. When all are up, all close. With --work inspect each appliance \
         inspects its disk before it counts as up, as virt-df does, and more: it finds the \
         file systems, mounts each to read it, reads how full it is, and counts the \
         packages in the package database. All appliances share one disk image, which has \
         files of this machine. The experiment verifies what each finds.\n\n\
         `up` is the time from the first start until all are up. `closed` also includes \
         closing them, without the time to measure memory. `per-appliance` is `closed` \
         divided by the number of appliances, and `rate` is its inverse. `efficiency` is \
         `closed` of a single appliance, multiplied by the number of appliances and divided \
         by `closed`, and by the number of CPUs that they can use (at most one each). An \
         efficiency of 1 means that each came up as fast as alone on a CPU of its own. The \
         single appliance is measured once, after a launch that fills the page cache.\n\n\
         `memory.each` is the proportional set size of QEMU and the disks' servers per \
         appliance, when all are up. `memory.merged.each` is the same after the kernel has \
         merged equal pages (KSM, whose settings are restored afterwards). Memory that is \
         shared with a vhost-user server is not merged. `memory.shared` counts the pages of \
         one QEMU that other processes also map.\n\n\
         A failure is the result of its cell: the report shows it in a line, and the run \
         continues. --step begins with one value of --appliances, and adds the step until a \
         cell fails. The evidence covers the time until all are up. The report shows the \
         knee of the curve of `rate`, and what limits it."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn design(&self, values: &Values) -> Result<Design> {
        let of = |name: &str| values.get(name).map_or(&[][..], Vec::as_slice);
        match (of("appliances"), of("step")) {
            ([_], [_]) => Ok(Design::Full),
            (_, [none]) if none == "0" => Ok(Design::Full),
            _ => Err(Error::Protocol(
                "--step: needs one value, and one value of --appliances, which is its start".into(),
            )),
        }
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        let cell = Cell::new(settings)?;
        let refuse = |why: &str| Err(Error::Protocol(why.into()));
        if !cell.memory.is_multiple_of(MIB) {
            return refuse("--memory: not a whole number of MiB");
        }
        if cell.work == Work::Inspect && cell.disks == Disks::None {
            return refuse("--work inspect needs a disk: --disk fathom, fathom-each or qemu");
        }
        if cell.disks != Disks::None && !Path::new(image::STATUS).exists() {
            let status = image::STATUS;
            return refuse(&format!(
                "the disk contains files of a Debian system, and this machine has no {status}"
            ));
        }
        Ok(())
    }

    fn needs(&self, settings: &Settings) -> Result<Vec<Need>> {
        let cell = Cell::new(settings)?;
        let mut needs = Need::GUEST.to_vec();
        if cell.accelerator == Some(Accelerator::Kvm) {
            needs.push(Need::Kvm);
        }
        if cell.disks != Disks::None {
            needs.extend(["mke2fs", "mkfs.fat"].map(Need::Program));
            needs.extend(MODULES.map(Need::Module));
        }
        Ok(needs)
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        const AROUND: Duration = Duration::from_secs(5);
        const EMULATED: u32 = 4;
        let Ok(cell) = Cell::new(settings) else {
            return AROUND;
        };
        let each = match cell.accelerator() {
            Accelerator::Kvm => 1,
            Accelerator::Tcg => EMULATED,
        };
        let rounds = cell.appliances.div_ceil(figures::cpus());
        AROUND + Duration::from_secs(u64::from(each) * rounds as u64)
    }

    fn after(&self, cell: &Ended) -> Option<Settings> {
        let settings = Settings(cell.planned.settings.clone());
        let (count, step) = (settings.count("appliances"), settings.count("step"));
        let (count, step): (u64, u64) = (count.ok()??, step.ok()??);
        let next = count + step;
        let goes_on = step > 0 && next <= MOST && cell.measure(RATE).is_some();
        goes_on.then(|| settings.with("appliances", next))
    }

    fn begin(&self, context: &Context) -> Box<dyn Session> {
        Box::new(session::Launching::new(context.fathom.clone()))
    }
}

const MIB: u64 = 1 << 20;
/// Modules for mounting the disk's file systems.
const MODULES: [&str; 3] = ["vfat", "nls_cp437", "nls_ascii"];

#[derive(Clone)]
struct Cell {
    appliances: usize,
    max_memory: Option<u64>,
    memory: u64,
    disks: Disks,
    work: Work,
    merge: bool,
    accelerator: Option<Accelerator>,
}

impl Cell {
    fn new(settings: &Settings) -> Result<Cell> {
        let accelerator = match settings.text("accelerator") {
            "" => None,
            _ => Some(settings.word("accelerator")?),
        };
        Ok(Cell {
            appliances: Settings::needed("appliances", settings.count("appliances")?)?,
            max_memory: settings.size("max-memory")?,
            memory: Settings::needed("memory", settings.size("memory")?)?,
            disks: settings.word("disk")?,
            work: settings.word("work")?,
            merge: settings.is_on("merge"),
            accelerator,
        })
    }

    fn accelerator(&self) -> Accelerator {
        self.accelerator.unwrap_or_else(Accelerator::detect)
    }

    /// Returns the machine of one of `of` appliances.
    fn machine(&self, disk: Option<Disk>, of: usize) -> Machine {
        /// Additional time for each appliance, because all may share few CPUs.
        const EACH: Duration = Duration::from_secs(10);
        const ALONE: Duration = Duration::from_secs(180);
        let modules = disk.iter().flat_map(|_| MODULES);
        Machine {
            memory_mib: u32::try_from(self.memory / MIB).unwrap_or(u32::MAX),
            mergeable: !self.disks.share_memory(),
            modules: modules.map(str::to_owned).collect(),
            disks: disk.into_iter().collect(),
            tools: false,
            accelerator: self.accelerator,
            patience: ALONE + EACH * u32::try_from(of).unwrap_or(u32::MAX),
            ..Machine::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::Order;
    use fathom_run::{Better, Measure, Planned, Unit};

    #[test]
    fn what_does_not_go_together_is_said() {
        let settings = Settings::defaults(PARAMETERS);
        Parallel.check(&settings).unwrap();
        let refused = |settings: Settings| Parallel.check(&settings).unwrap_err().to_string();
        let inspect = settings.clone().with("work", "inspect");
        assert!(refused(inspect.clone()).contains("needs a disk"));
        Parallel.check(&inspect.with("disk", "fathom")).unwrap();
        let odd = settings.with("memory", (64u64 << 20) + 1);
        assert!(refused(odd).contains("whole number of MiB"));
        let mut order = Order::new(&Parallel);
        order.set("step", &["10".into()]).unwrap();
        let error = order.plan().err().unwrap().to_string();
        assert!(error.contains("one value of --appliances"), "{error}");
        order.set("appliances", &["10".into()]).unwrap();
        order.plan().unwrap();
    }

    #[test]
    fn only_memory_that_no_server_sees_can_be_merged() {
        let machine = |disk: &str| {
            let settings = Settings::defaults(PARAMETERS).with("disk", disk);
            Cell::new(&settings).unwrap().machine(None, 1)
        };
        assert!(machine("none").mergeable && machine("qemu").mergeable);
        assert!(!machine("fathom").mergeable && !machine("fathom-each").mergeable);
    }

    #[test]
    fn steps_go_on_until_something_fails() {
        let cell = |step: u64, measure: &str| Ended {
            planned: Planned {
                settings: { Settings::defaults(PARAMETERS) }
                    .with("appliances", 20)
                    .with("step", step)
                    .0,
                ..Planned::default()
            },
            measures: vec![Measure::new(measure, Unit::Count, 1.0, Better::Higher)],
            ..Ended::default()
        };
        let next = Parallel.after(&cell(10, RATE)).unwrap();
        assert_eq!(next.text("appliances"), "30");
        assert_eq!(next.text("step"), "10");
        assert_eq!(Parallel.after(&cell(10, "failed")), None);
        assert_eq!(Parallel.after(&cell(0, RATE)), None);
        assert_eq!(Parallel.after(&cell(981, RATE)), None);
    }
}
