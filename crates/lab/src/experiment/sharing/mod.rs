//! A tree of files in a guest, accessed by 9p, by virtiofs, or on a disk with a file system of the
//! guest: the cost of data and of names for each way.

mod cell;
mod load;
mod way;

use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_run::Beside;

use super::{Context, Experiment, Kind, Need, Parameter, Session, Settings, Yield, shared};
use crate::bed::instance::Cache;
use crate::error::Result;
use crate::kernel::Kernel;
use crate::server::VIRTIOFSD;
use cell::{Cell, HostCache};
use load::Test;
use way::{Reach, Way};

pub struct Sharing;

const WAY: &str = "way";

const PARAMETERS: &[Parameter] = &[
    Parameter::new(
        WAY,
        "Ways to access the files [default: all usual ones that the guest's kernel supports]",
        Kind::of::<Way>(Way::FORM),
        "",
    ),
    Parameter::new(
        "test",
        "Tests on the files",
        Kind::of::<Test>(Test::FORM),
        Test::FORM_AS_DEFAULT,
    ),
    Parameter::new(
        "size",
        "Size of the file to read and write",
        Kind::Size {
            least: 1 << 20,
            most: 1 << 40,
        },
        "256M",
    ),
    Parameter::new(
        "runtime",
        "Maximum time of the random tests",
        Kind::Time {
            least: Duration::from_millis(100),
            most: Duration::from_secs(24 * 3600),
        },
        "5s",
    ),
    Parameter::new(
        "files",
        "Number of small files to create, stat, rename and delete",
        shared::count(10_000_000),
        "10000",
    ),
    Parameter::new(
        "direct",
        "Whether data bypasses the guest's page cache (O_DIRECT)",
        Kind::Switch,
        "off",
    ),
    Parameter::new(
        "host-cache",
        "State of this machine's page cache when a test begins",
        Kind::of::<HostCache>(HostCache::FORM),
        "warm",
    ),
    Parameter::new(
        "cache",
        "Whether disks use this machine's page cache (writeback) or bypass it (none)",
        Kind::of::<Cache>(Cache::FORM),
        "writeback",
    ),
    shared::aio("io_uring"),
    shared::FILE_SYSTEM,
    Parameter::new(
        "msize",
        "Maximum size of a 9p message",
        Kind::Size {
            least: 4 << 10,
            most: 16 << 20,
        },
        "500k", // what virtio has room for in Linux 6.1
    ),
    shared::vcpus("1"),
];

/// Columns for each way.
const SHOWN: &[(&str, &str)] = &[
    ("throughput", "MB/s"),
    ("iops", "per second"),
    ("qemu.cpu-per-gb", "QEMU s/GB"),
    ("server.cpu-per-gb", "server s/GB"),
    ("qemu.cpu-per-request", "QEMU us each"),
    ("server.cpu-per-request", "server us each"),
];

impl Experiment for Sharing {
    fn name(&self) -> &'static str {
        "sharing"
    }

    fn about(&self) -> &'static str {
        "Files in a guest: by 9p, by virtiofs, and on a disk with a file system"
    }

    fn description(&self) -> &'static str {
        "A guest works on the files of a directory. With `9p` and `virtiofs` the directory \
         is one of the host, which QEMU or virtiofsd serves. With `virtio-blk` (QEMU's, in \
         an I/O thread) and `vhost-user-blk` (Fathom's) it is on a file system of the \
         guest. `bare` is the same work in a directory of the host, without a guest. Unlike \
         a disk, a share is visible to both sides at the same time; the experiment shows \
         the cost of that.\n\n\
         `write` and `read` stream one file in 1 MiB. `random-write` and `random-read` \
         access its blocks of 4 KiB in random order, each once, for at most --runtime. fio \
         makes these requests one at a time. `create`, `stat`, `rename` and `delete` make \
         one call for each of --files small files of 4 KiB.\n\n\
         The guest's caches are empty when a test begins. The host's caches contain what \
         making the files left there (--host-cache warm), or are empty. Writes of data end \
         with fsync. `unwritten` is the data that only the host's page cache had after \
         fsync (by cachestat, Linux 6.5). Names are not flushed: on a disk they may still \
         be in the guest's memory; on a share the host has them.\n\n\
         `qemu.cpu-*` and `server.cpu-*` are the host's CPU time of the two processes, per \
         streamed gigabyte, or per request or call. The guest's own work counts as QEMU's. \
         Without a server process, QEMU serves the files.\n\n\
         All ways use the same kernel. Debian's cloud kernel has no 9p. Debian's ordinary \
         kernel (linux-image-amd64) has it; name that kernel in FATHOM_KERNEL. Without \
         hardware virtualisation the guest is emulated: its figures compare only with those \
         of other emulated guests."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn beside(&self) -> Option<Beside> {
        Some(Beside::of(WAY, SHOWN))
    }

    fn defaults(&self, parameter: &Parameter) -> Vec<String> {
        if parameter.name != WAY {
            return parameter.defaults();
        }
        let kernel = Kernel::find();
        let has = |name: &&'static str| {
            let found = kernel.as_ref().map(|kernel| kernel.need_module(name));
            matches!(found, Ok(Ok(())))
        };
        let has_9p = Way::NineP.modules().iter().all(has);
        let ways = [
            Way::VirtioBlk,
            Way::VhostUserBlk,
            Way::Virtiofs,
            Way::NineP,
            Way::Bare,
        ];
        let ways = ways.iter().filter(|way| **way != Way::NineP || has_9p);
        ways.map(|way| way.name().to_owned()).collect()
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        Cell::new(settings)?.check()
    }

    fn needs(&self, settings: &Settings) -> Result<Vec<Need>> {
        let cell = Cell::new(settings)?;
        let mut needs = vec![Need::Program("busybox"), Need::Program("fio")];
        if cell.drops_host_cache() {
            needs.push(Need::Root("emptying this machine's page cache"));
        }
        match cell.way.reach() {
            Reach::Host => return Ok(needs),
            Reach::Disk(_) => needs.push(Need::Program(cell.fs.maker())),
            Reach::Virtiofs(_) => needs.push(Need::Program(VIRTIOFSD)),
            Reach::NineP(_) => {}
        }
        if !cell.way.is_disk() {
            needs.push(Need::Root("a directory whose files keep their owners"));
        }
        needs.extend(Need::GUEST);
        needs.extend(cell.way.modules().iter().map(|name| Need::Module(name)));
        if cell.way.is_disk() {
            needs.extend(cell.fs.module().map(Need::Module));
        }
        Ok(needs)
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        const AROUND: Duration = Duration::from_secs(8);
        const SPEED: u64 = 150 << 20;
        const CALLS: u64 = 3000;
        Cell::new(settings).map_or(AROUND, |cell| {
            let load = &cell.load;
            let work = match load.test {
                test if test.is_streaming() => 2 * load.size / SPEED,
                test if test.is_of_data() => load.size / SPEED + load.runtime.as_secs(),
                _ => 2 * load.files / CALLS,
            };
            AROUND + Duration::from_secs(work)
        })
    }

    fn begin(&self, context: &Context) -> Box<dyn Session> {
        Box::new(Running {
            fathom: context.fathom.clone(),
        })
    }
}

/// Each cell has a new guest, so that no cell is affected by an earlier one.
struct Running {
    fathom: PathBuf,
}

impl Session for Running {
    fn cell(
        &mut self,
        settings: &Settings,
        _folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        Cell::new(settings)?.run(&self.fathom, progress)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Order;
    use super::*;

    #[test]
    fn what_does_not_go_together_is_said() {
        let settings = Settings::defaults(PARAMETERS).with("cache", "none");
        Sharing
            .check(&settings.clone().with(WAY, "virtio-blk"))
            .unwrap();
        for way in ["9p", "virtiofs-always"] {
            let error = Sharing.check(&settings.clone().with(WAY, way));
            let error = error.unwrap_err().to_string();
            assert!(error.contains(&format!("not with --way {way}")), "{error}");
        }
    }

    #[test]
    fn only_what_a_way_uses_is_needed() {
        let needs = |way: &str| {
            let settings = Settings::defaults(PARAMETERS).with(WAY, way);
            Sharing.needs(&settings).unwrap()
        };
        assert!(!needs("bare").contains(&Need::Kernel));
        for way in ["virtiofs", "virtiofs-never"] {
            let needs = needs(way);
            assert!(needs.contains(&Need::Program("virtiofsd")));
            assert!(needs.contains(&Need::Module("virtiofs")));
        }
        let nine_p = needs("9p");
        assert!(nine_p.contains(&Need::Module("9pnet_virtio")));
        assert!(!nine_p.contains(&Need::Program("virtiofsd")));
        assert!(needs("virtio-blk").contains(&Need::Program("mke2fs")));
    }

    /// A kernel without 9p must not prevent the other measurements.
    #[test]
    fn by_default_only_ways_are_tried_that_the_kernel_has() {
        let plan = Order::new(&Sharing).plan().unwrap();
        let ways = &plan.parameters[WAY];
        let has_9p = Kernel::find().unwrap().need_module("9pnet_virtio").is_ok();
        assert_eq!(ways.contains(&"9p".to_owned()), has_9p, "{ways:?}");
        assert_eq!(ways.first().map(String::as_str), Some("virtio-blk"));
        assert_eq!(ways.last().map(String::as_str), Some("bare"));
    }
}
