//! The same small user space in a container, in a virtual machine and in user-mode Linux: the tests
//! of a blog post about backends of libguestfs (Richard W.M. Jones, "Performance of User-Mode Linux
//! as a libguestfs backend").

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
        "Beds (environments) to compare [default: those that run here]",
        Kind::of::<instance::Kind>(instance::Kind::FORM),
        "",
    ),
    Parameter::new(
        "test",
        "Tests to time",
        Kind::of::<Test>(Test::FORM),
        Test::FORM_AS_DEFAULT,
    ),
    Parameter::new(
        "size",
        "Amount of data to send or write, in whole MiB",
        Kind::Size {
            least: 1 << 20,
            most: 1 << 40,
        },
        "8M",
    ),
    Parameter::new(
        "calls",
        "Number of system calls of the test `syscalls`",
        Kind::Count {
            least: 2,
            most: 1 << 32,
        },
        "200000",
    ),
    Parameter::new(
        "cache",
        "Whether writes use this machine's page cache (writeback) or bypass it (none)",
        Kind::of::<instance::Cache>(instance::Cache::FORM),
        "writeback",
    ),
    Parameter::new(
        "memory",
        "Memory of a machine, or limit of a container",
        Kind::Size {
            least: 32 << 20,
            most: 1 << 40,
        },
        "",
    ),
    Parameter::new(
        "cpus",
        "Limit of a container's CPU time, in CPUs",
        Kind::of::<Cpus>(Cpus::FORM),
        "",
    ),
];

impl Experiment for Backends {
    fn name(&self) -> &'static str {
        "backends"
    }

    fn about(&self) -> &'static str {
        "Start-up, system calls and uploads in containers, virtual machines, user-mode Linux"
    }

    fn description(&self) -> &'static str {
        "The same small user space (busybox and an agent that runs scripts) runs in each \
         bed, with an ext2 file system on a disk. `start-up` is the time until the agent \
         answers. `syscalls` runs `dd bs=1` from /dev/zero to /dev/null, which makes almost \
         only system calls. `upload` sends data from the host into a file on the disk, and \
         ends with fsync. `upload-no-write` sends the data, and discards it in the bed. \
         `write-no-upload` makes the data in the bed, and writes it with fsync.\n\n\
         Data enters a virtual machine by virtio-serial, a container by a socket, and \
         user-mode Linux by a file over hostfs. (The serial line of user-mode Linux \
         sometimes stops for good.) The disk is virtio-blk of QEMU's main loop, a loop \
         device, or `ubd`. `libguestfs` is its own appliance, if it is installed, with its \
         own transport.\n\n\
         `time` is measured on the host. `cpu` is the time of the host's CPUs that the \
         bed's processes took, in ticks of 10 ms: if a test takes only a few ticks, use a \
         larger --size or more --calls. The work of the host's kernel for a container's \
         loop device is only in `host.busy`.\n\n\
         `unwritten` is the data that only the host's page cache had when fsync had ended \
         in the bed (by cachestat, Linux 6.5). The amount should be close to zero: a bed that \
         ignores flushes looks fast and loses data. The report names such a bed.\n\n\
         --kvm-host runs everything one level deeper, in an emulated KVM host."
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

/// Each cell has a new bed, so that no cell is affected by an earlier one.
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
