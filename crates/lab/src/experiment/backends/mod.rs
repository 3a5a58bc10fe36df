//! What the same small user space takes in a container, in a virtual machine and in user-mode Linux:
//! the tests of a post about backends of libguestfs (Richard W.M. Jones, "Performance of User-Mode
//! Linux as a libguestfs backend").

mod cell;

use std::path::Path;
use std::time::Duration;

use fathom_run::Beside;

use super::shared::{self, Cpus};
use super::{Context, Experiment, Kind, Need, Parameter, Session, Settings, Yield};
use crate::bed::instance;
use crate::error::Result;
use crate::host;
use cell::{Cell, Test};

pub struct Backends;

const BED: &str = "bed";

const PARAMETERS: &[Parameter] = &[
    Parameter::new(
        BED,
        "What it runs in; all that run here, of virtual machines the better, if not given",
        Kind::of::<instance::Kind>(instance::Kind::FORM),
        "",
    ),
    Parameter::new(
        "test",
        "What is timed",
        Kind::of::<Test>(Test::FORM),
        Test::FORM_AS_DEFAULT,
    ),
    Parameter::new(
        "size",
        "What is sent or written, in whole MiB",
        Kind::Size {
            least: 1 << 20,
            most: 1 << 40,
        },
        "8M",
    ),
    Parameter::new(
        "calls",
        "System calls of the test `syscalls`",
        Kind::Count {
            least: 2,
            most: 1 << 32,
        },
        "200000",
    ),
    Parameter::new(
        "cache",
        "Writes stay in this machine's page cache until flushed, or reach the device at once",
        Kind::of::<instance::Cache>(instance::Cache::FORM),
        "writeback",
    ),
    Parameter::new(
        "memory",
        "Of a machine, or the container's limit",
        Kind::Size {
            least: 32 << 20,
            most: 1 << 40,
        },
        "",
    ),
    Parameter::new(
        "cpus",
        "The container's limit of CPU time",
        Kind::of::<Cpus>(Cpus::FORM),
        "",
    ),
];

impl Experiment for Backends {
    fn name(&self) -> &'static str {
        "backends"
    }

    fn about(&self) -> &'static str {
        "Starting, system calls and uploads in a container, a virtual machine, user-mode Linux"
    }

    fn description(&self) -> &'static str {
        "The same small user space (busybox and an agent that runs scripts) has a disk with an ext2 \
         file system, in each of the beds. `start-up`: until the agent answers. `syscalls`: \
         `dd bs=1` from /dev/zero to /dev/null, which makes nothing but system calls. `upload`: data \
         is sent from the host into a file of the disk, and fsync ends it. `upload-no-write`: it is \
         sent and thrown away. `write-no-upload`: it is made inside and written, with fsync.\n\nThe \
         way in is virtio-serial, a socket for the container, and for user-mode Linux a file that it \
         reads by hostfs: its serial line, which the post used, may stand still for good. The disk \
         is virtio-blk of QEMU's main loop, a loop device, or `ubd`. `libguestfs` is its own appliance, \
         where it is installed, and its own way in.\n\n`time` is seen from the host; \
         `cpu` is what the bed's processes took of the host's CPUs (what the host's kernel did for a \
         container's loop device is in `host.busy` only), counted in ticks of 10 ms: where a test is \
         over in a few of them, a larger --size or more --calls tell more.\n\n`unwritten` is what was in \
         the host's page cache alone when fsync had ended inside (by cachestat, Linux 6.5). It should be next to \
         nothing: a bed that ignores flushes looks fast and loses data. The report says \
         so.\n\n--kvm-host runs all of it one level deeper: `--bed kvm,tcg` there is the post's \
         `virtualized`."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn beside(&self) -> Option<Beside> {
        Some(Beside::of(BED, &[("time", "time (s)"), ("cpu", "CPU (s)")]))
    }

    fn defaults(&self, parameter: &Parameter) -> Vec<String> {
        if parameter.name != BED {
            return parameter.defaults();
        }
        let uml = instance::check_cpu().is_ok().then_some(instance::Kind::Uml);
        let kinds = [instance::Kind::Container, instance::Kind::machine()];
        let libguestfs = host::program(instance::GUESTFISH).is_ok();
        let libguestfs = libguestfs.then_some(instance::Kind::Libguestfs);
        let kinds = kinds.into_iter().chain(uml).chain(libguestfs);
        kinds.map(|kind| kind.name().to_owned()).collect()
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        let cell = Cell::new(settings)?;
        cell.kind.check(&cell.spec(Path::new("")))
    }

    fn needs(&self, settings: &Settings) -> Result<Vec<Need>> {
        let mut needs = shared::instance_needs(Cell::new(settings)?.kind);
        needs.push(Need::Program("mke2fs"));
        Ok(needs)
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        const START: Duration = Duration::from_secs(3);
        const BYTES_PER_SECOND: u64 = 3_000_000;
        Cell::new(settings).map_or(START, |cell| match cell.test {
            Test::StartUp | Test::Syscalls => START,
            _ => START + Duration::from_secs((cell.mib << 20) / BYTES_PER_SECOND),
        })
    }

    fn begin(&self, _context: &Context) -> Box<dyn Session> {
        Box::new(Trying)
    }
}

/// A cell has a bed of its own: none begins where another one has left something.
struct Trying;

impl Session for Trying {
    fn cell(
        &mut self,
        settings: &Settings,
        _folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        Cell::new(settings)?.run(progress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_go_together_is_said() {
        let settings = Settings::defaults(PARAMETERS);
        Backends.check(&settings).unwrap();
        let refused = settings.clone().with("bed", "tcg").with("cpus", "0.5");
        let error = Backends.check(&refused).unwrap_err().to_string();
        assert!(
            error.contains("only for containers, not for tcg"),
            "{error}"
        );
        let cpus = PARAMETERS.iter().find(|one| one.name == "cpus").unwrap();
        for bad in ["0", "-1", "nan", "many"] {
            let error = cpus.value(bad).unwrap_err().to_string();
            assert!(error.starts_with("--cpus: "), "{error}");
        }
    }

    #[test]
    fn by_default_all_beds_are_tried_that_run_here() {
        let plan = super::super::Order::new(&Backends).plan().unwrap();
        let beds = &plan.parameters["bed"];
        assert_eq!(beds[0], "container");
        assert_eq!(beds[1], instance::Kind::machine().name());
        let has_uml = beds.contains(&"uml".to_owned());
        assert_eq!(has_uml, instance::check_cpu().is_ok());
        assert_eq!(plan.cells.len(), beds.len() * Test::ALL.len());
    }

    #[test]
    fn only_what_a_bed_uses_is_needed() {
        let needs = |bed: &str| {
            let settings = Settings::defaults(PARAMETERS).with("bed", bed);
            Backends.needs(&settings).unwrap()
        };
        assert!(needs("container").contains(&Need::Program("crun")));
        assert!(!needs("container").contains(&Need::Kernel));
        assert!(needs("uml").contains(&Need::UserModeLinux));
        assert!(needs("kvm").contains(&Need::Kvm) && !needs("tcg").contains(&Need::Kvm));
    }
}
