//! Disks of containers and virtual machines compared with the disk of the machine itself: the disk
//! part of a blog post that compares them (Brendan Gregg, "Virtualization Performance: Zones, KVM,
//! Xen").

mod cell;
mod disk;

use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_run::Beside;

use super::place::Place;
use super::shared::{self, Cpus};
use super::{Context, Experiment, Kind, Need, Parameter, Session, Settings, Yield};
use crate::bed::instance;
use crate::error::Result;
use crate::host::{self, Accelerator};
use crate::server;
use crate::words::words;
use cell::{Op, Test};

pub use cell::Cell;
pub use disk::Disk;

pub struct Technologies;

const TECHNOLOGY: &str = "technology";

pub const PARAMETERS: &[Parameter] = &[
    Parameter::new(
        TECHNOLOGY,
        "Technologies to compare [default: those that run here]",
        Kind::of::<Technology>(Technology::FORM),
        "",
    ),
    Parameter::new(
        "test",
        "Tests: 128 KiB in order, 4 KiB at random",
        Kind::of::<Test>(Test::FORM),
        "throughput,iops",
    ),
    Parameter::new(
        "op",
        "Operations of fio",
        Kind::of::<Op>(Op::FORM),
        "read,write",
    ),
    Parameter {
        default: "1,4",
        ..shared::THREADS
    },
    shared::DEPTH,
    Parameter {
        default: "5s",
        ..shared::RUNTIME
    },
    Parameter::new(
        "place",
        "Directory for the disk's file, or a block device",
        Kind::of::<Place>("DIRECTORY, /dev/DEVICE"),
        "/var/tmp",
    ),
    shared::image_size("1G"),
    Parameter::new(
        "memory",
        "Memory of a machine, or limit of a container",
        Kind::Size {
            least: 256 << 20,
            most: 1 << 40,
        },
        "1G",
    ),
    Parameter::new(
        "cpus",
        "CPUs of a machine, or limit of a container",
        Kind::of::<Cpus>(Cpus::FORM),
        "1",
    ),
    shared::aio("io_uring"),
    shared::SERVE,
    Parameter::new(
        "overwrite",
        "Allow overwriting the data on a device",
        Kind::Switch,
        "off",
    ),
];

words! {
    /// The environment in which fio runs, and how it accesses the disk.
    pub enum Technology {
        /// This machine, using the file itself.
        Bare = "bare",
        /// A container, using the file itself, bind-mounted.
        Container = "container",
        /// A container, using a block device: for a file, a loop device over it.
        ContainerDevice = "container-device",
        /// A virtual machine with KVM, using QEMU's virtio-blk.
        Kvm = "kvm",
        /// A virtual machine with KVM, using Fathom's vhost-user-blk.
        KvmFathom = "kvm-fathom",
        /// A virtual machine emulated by QEMU, using QEMU's virtio-blk.
        Tcg = "tcg",
        /// A virtual machine emulated by QEMU, using Fathom's vhost-user-blk.
        TcgFathom = "tcg-fathom",
        /// User-mode Linux, using its ubd.
        Uml = "uml",
    }
}

impl Technology {
    pub fn kind(self) -> instance::Kind {
        use Technology::{Bare, Container, ContainerDevice, Kvm, KvmFathom, Tcg, TcgFathom, Uml};
        match self {
            Bare => instance::Kind::Bare,
            Container | ContainerDevice => instance::Kind::Container,
            Kvm | KvmFathom => instance::Kind::Kvm,
            Tcg | TcgFathom => instance::Kind::Tcg,
            Uml => instance::Kind::Uml,
        }
    }

    /// Returns the technologies that run on this machine, with KVM rather than emulation.
    pub fn here() -> Vec<String> {
        use Technology::{Bare, Container, Kvm, KvmFathom, Tcg, TcgFathom, Uml};
        let machines = match Accelerator::detect() {
            Accelerator::Kvm => [Kvm, KvmFathom],
            Accelerator::Tcg => [Tcg, TcgFathom],
        };
        let has_uml = host::program(instance::UML).is_ok() && instance::check_cpu().is_ok();
        let all = [Bare, Container].into_iter().chain(machines);
        let all = all.chain(has_uml.then_some(Uml));
        all.map(|one| one.name().to_owned()).collect()
    }

    /// Returns the server of a virtual machine's disk.
    pub fn server(self) -> server::Kind {
        match self {
            Technology::KvmFathom | Technology::TcgFathom => server::Kind::Fathom,
            _ => server::Kind::Qemu,
        }
    }
}

impl Experiment for Technologies {
    fn name(&self) -> &'static str {
        "technologies"
    }

    fn about(&self) -> &'static str {
        "Disk throughput and IOPS on this machine, in containers, in virtual machines"
    }

    fn description(&self) -> &'static str {
        "fio runs the same load in each technology, on the same storage: `throughput` is \
         128 KiB in order, each thread in a part of its own, and `iops` is 4 KiB at random, \
         both with O_DIRECT.\n\n\
         The disk is one file, which is written once for the run. `bare` and `container` \
         use the file itself; the container has it bind-mounted. `container-device` uses a \
         loop device over the file, with direct I/O. `kvm` and `tcg` use virtio-blk in an \
         I/O thread of QEMU, and `kvm-fathom` and `tcg-fathom` use Fathom's vhost-user-blk, \
         all without the page cache. `uml` uses its ubd, whose writes are durable \
         immediately. ubd cannot bypass this machine's page cache, and reads data from \
         there the second time. `cached` is the share of fio's reads that the device did \
         not deliver. If that share is large, the report warns. If --place is a block \
         device, all technologies use the device itself.\n\n\
         --memory and --cpus are the resources of a machine, and the limits of containers. \
         `bare` has no limits, and user-mode Linux always has one CPU. The CPUs of a \
         virtual machine are its vCPUs; QEMU's other threads are not limited.\n\n\
         The report shows the ratio of each technology to `bare`. `vs bare` is the ratio to \
         the same work on the host right after the cell, without a loop device. `cpu` is \
         the time of this machine's CPUs per request, of all processes of the technology, \
         including the start of fio. The time of the kernel's own threads (such as those of \
         a loop device) is only in `cpu.host`."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn beside(&self) -> Option<Beside> {
        Some(Beside::of(
            TECHNOLOGY,
            &[
                ("iops", "IOPS"),
                ("throughput", "MB/s"),
                ("latency.p99", "p99 ns"),
                ("cpu", "us CPU"),
            ],
        ))
    }

    fn defaults(&self, parameter: &Parameter) -> Vec<String> {
        match parameter.name {
            TECHNOLOGY => Technology::here(),
            _ => parameter.defaults(),
        }
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        Cell::new(settings)?.check()
    }

    fn needs(&self, settings: &Settings) -> Result<Vec<Need>> {
        let mut needs = shared::instance_needs(Cell::new(settings)?.technology.kind());
        needs.extend([Need::Program("fio"), Need::FioEngine("libaio")]);
        Ok(needs)
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        const AROUND: Duration = Duration::from_secs(2);
        const MACHINE: Duration = Duration::from_secs(15);
        Cell::new(settings).map_or(MACHINE, |cell| {
            let around = match cell.technology.kind() {
                instance::Kind::Bare | instance::Kind::Container => AROUND,
                _ => MACHINE,
            };
            around + cell.job.runtime.mul_f64(1.2)
        })
    }

    fn begin(&self, context: &Context) -> Box<dyn Session> {
        Box::new(Measuring {
            fathom: context.fathom.clone(),
            disk: None,
        })
    }
}

struct Measuring {
    fathom: PathBuf,
    /// The disk of the previous cell; kept while cells need the same one.
    disk: Option<Disk>,
}

impl Session for Measuring {
    fn cell(
        &mut self,
        settings: &Settings,
        _folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        let cell = Cell::new(settings)?;
        let kept = self.disk.take().filter(|disk| disk.is_of(&cell));
        let disk = match kept {
            Some(disk) => disk,
            None => Disk::make(&cell, progress)?,
        };
        let disk = self.disk.insert(disk);
        cell.run(&self.fathom, &disk.path, progress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_go_together_is_said() {
        let settings = Settings::defaults(PARAMETERS).with("size", "1M");
        Technologies.check(&settings).unwrap();
        for (values, words) in [
            (
                &[("technology", "tcg"), ("cpus", "0.5")][..],
                "1 to 64 whole CPUs",
            ),
            (&[("memory", "268435457")], "whole number of MiB"),
            (
                &[("technology", "tcg"), ("serve", "--poll=off")],
                "not with technology tcg",
            ),
            (&[("place", "nbd://localhost")], "no NBD export"),
            (&[("threads", "1024")], "larger --size"),
        ] {
            let set = |settings: Settings, (name, value): &(&str, &str)| settings.with(name, value);
            let refused = values.iter().fold(settings.clone(), set);
            let error = Technologies.check(&refused).unwrap_err().to_string();
            assert!(error.contains(words), "{values:?}: {error}");
        }
    }

    #[test]
    fn only_what_a_technology_uses_is_needed() {
        let needs = |technology: &str| {
            let settings = Settings::defaults(PARAMETERS).with("technology", technology);
            Technologies.needs(&settings).unwrap()
        };
        assert!(!needs("bare").contains(&Need::Kernel));
        assert!(needs("container").contains(&Need::Program("crun")));
        assert!(needs("kvm-fathom").contains(&Need::Kvm) && !needs("tcg").contains(&Need::Kvm));
        assert!(needs("uml").contains(&Need::UserModeLinux));
    }
}
