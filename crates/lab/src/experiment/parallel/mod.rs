//! Many small machines at once, as a service runs them that looks into disk images (Richard W.M.
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
        "Machines that are up at the same time",
        shared::count(MOST),
        "1,2,4,8",
    ),
    Parameter::new(
        "step",
        "Go on with so many more each time, until something fails; 0: only --appliances",
        Kind::Count {
            least: 0,
            most: MOST,
        },
        "0",
    ),
    Parameter::new(
        "max-memory",
        "Start no more than fit in it, by what one takes; empty: 80% of what is available",
        Kind::Size {
            least: 1 << 20,
            most: 1 << 50,
        },
        "",
    ),
    Parameter::new(
        "memory",
        "Each machine's",
        Kind::Size {
            least: 64 << 20,
            most: 1 << 40,
        },
        "256M",
    ),
    Parameter::new(
        "disk",
        "Who serves the disks: nobody, one Fathom server, one each, or QEMU itself",
        Kind::of::<Disks>(Disks::FORM),
        "none",
    ),
    Parameter::new(
        "work",
        "What each does before it is up: nothing, or inspect its disk",
        Kind::of::<Work>(Work::FORM),
        "none",
    ),
    Parameter::new(
        "merge",
        "Let the kernel merge equal pages, and measure again (root; --disk none or qemu)",
        Kind::Switch,
        "on",
    ),
    Parameter::new(
        "accelerator",
        "How QEMU runs the guests; empty: the best that this machine has",
        Kind::of::<Accelerator>(Accelerator::FORM),
        "",
    ),
];

words! {
    /// What an appliance does.
    pub enum Work {
        None = "none",
        /// What virt-df does, and more.
        Inspect = "inspect",
    }
}

/// The measure that a cell has in which all came up and closed.
const RATE: &str = "rate";

impl Experiment for Parallel {
    fn name(&self) -> &'static str {
        "parallel"
    }

    fn about(&self) -> &'static str {
        "Many small machines at once: how many fit, how fast they start, what each takes"
    }

    fn description(&self) -> &'static str {
        "So many machines (appliances: a kernel and a small initramfs, one CPU) start at once; when \
         all are up, all close. No one closes before the last is up, so that all are there at the \
         same time. With --work inspect each does on its disk what virt-df does, and more, before it \
         counts as up: it looks for file systems, mounts each to read it, asks how full it is, and \
         reads the package database. The disk is one image for all, made of this machine's own \
         files; what each finds is checked.\n\n`up` is from the first start until all are up, `closed` \
         the same with what closing takes (measuring memory in between does not count), \
         `per-appliance` is `closed` by their number, and `rate` its inverse. `efficiency` is what \
         one alone takes, times their number, by `closed` times the CPUs that so many can use (no more \
         than they are): 1 is as if each had come up alone on a CPU of its own. One alone is measured \
         when it is first needed, after another that gets all into the page cache.\n\n`memory.each` is \
         the proportional set size of QEMU and the disks' servers by the number of appliances, with \
         all of them up, `memory.merged.each` the same when the kernel has merged equal pages (KSM, \
         which is put back afterwards). Memory that a vhost-user server shares is not merged. \
         `memory.shared` is of a QEMU's pages those that others map, too.\n\nWhat fails is the result \
         of its cell, told in a line, and the run goes on. --step goes on from one value of \
         --appliances until then. Evidence is from the first start until all are up. In the report the \
         curve of `rate` has its knee, with what limits it."
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
                "--step is one number, and goes on from one number of --appliances".into(),
            )),
        }
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        let cell = Cell::new(settings)?;
        let refuse = |why: &str| Err(Error::Protocol(why.into()));
        if !cell.memory.is_multiple_of(MIB) {
            return refuse("--memory must be of whole MiB");
        }
        if cell.work == Work::Inspect && cell.disks == Disks::None {
            return refuse("--work inspect needs a disk: --disk fathom, fathom-each or qemu");
        }
        if cell.disks != Disks::None && !Path::new(image::STATUS).exists() {
            let status = image::STATUS;
            return refuse(&format!(
                "the disk is made of a Debian's files, and this machine has no {status}"
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
/// To mount what is on the disk.
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

    /// One of so many.
    fn machine(&self, disk: Option<Disk>, of: usize) -> Machine {
        /// With all of them on few CPUs.
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
        assert!(refused(odd).contains("whole MiB"));
        let mut order = Order::new(&Parallel);
        order.set("step", &["10".into()]).unwrap();
        let error = order.plan().err().unwrap().to_string();
        assert!(error.contains("from one number"), "{error}");
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
