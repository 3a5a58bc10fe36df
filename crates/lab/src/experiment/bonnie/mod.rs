//! bonnie++ in a guest, with several servers of its disk: the test of QEMU's first data plane
//! (Eiichi Tsukata, "qemu virtio-blk data plane").

mod csv;
mod image;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_run::evidence::{Bare, Load};

use super::{Context, Experiment, Kind, Need, Parameter, Session, Settings, Yield, shared};
use crate::bed::{DISK, GuestBed, HostBed, Job};
use crate::error::{Error, Result};
use crate::machine::{Aio, FileSystem, Machine};
use crate::scratch::Scratch;
use crate::server::{self, Spec};
use crate::work::Worked;
use image::Image;

pub struct Bonnie;

const PARAMETERS: &[Parameter] = &[
    Parameter::new(
        "disk",
        "Servers to compare with the first",
        Kind::of::<server::Kind>(server::OWN_FORM),
        "qemu-main,qemu,fathom",
    ),
    shared::aio("native"),
    shared::FILE_SYSTEM,
    Parameter::new(
        "size",
        "Size of the data (-s); must exceed --memory",
        Kind::Size {
            least: 1 << 20,
            most: 1 << 40,
        },
        "2G",
    ),
    Parameter::new(
        "memory",
        "Memory of the guest",
        Kind::Size {
            least: 128 << 20,
            most: 1 << 40,
        },
        "1G",
    ),
    Parameter::new(
        "vcpus",
        "Number of CPUs of the guest",
        Kind::Count {
            least: 1,
            most: 256,
        },
        "2",
    ),
    Parameter::new(
        "files",
        "Number of small files, in units of 1024 (-n); 0: none",
        Kind::Count {
            least: 0,
            most: 1024,
        },
        "16",
    ),
    Parameter::new(
        "concurrency",
        "Number of concurrent copies of each test (-c)",
        Kind::Count { least: 1, most: 64 },
        "1",
    ),
    Parameter::new(
        "direct",
        "Whether blocks use O_DIRECT (-D)",
        Kind::Switch,
        "off",
    ),
    Parameter::new(
        "chars",
        "Whether to test single bytes, not with --direct",
        Kind::Switch,
        "on",
    ),
];

impl Experiment for Bonnie {
    fn name(&self) -> &'static str {
        "bonnie"
    }

    fn about(&self) -> &'static str {
        "bonnie++ in the guest: QEMU's data plane off and on, and Fathom"
    }

    fn description(&self) -> &'static str {
        "bonnie++ writes, rewrites and reads a large file, seeks in it, and creates, reads \
         and deletes many small files, on a new file system of the guest's disk. \
         `qemu-main` is QEMU with the data plane off, and `qemu` is QEMU with the data \
         plane on (an I/O thread).\n\n\
         The report has bonnie++'s own table for each configuration: K/sec and operations \
         per second, the CPU time of the guest's process (%CP), the longest operation \
         (latency), and the ratio to the first configuration. Phases that were too fast to \
         measure have no figures. `put-block.throughput` and similar measures are the same \
         figures in MB/s.\n\n\
         Without --direct, bonnie++ uses the guest's page cache. Therefore --size must \
         exceed --memory."
    }

    fn parameters(&self) -> &'static [Parameter] {
        PARAMETERS
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        let cell = Cell::new(settings)?;
        let refuse = |why: String| Err(Error::Protocol(why));
        if !cell.direct && cell.size <= cell.memory {
            return refuse(format!(
                "--size {}: not more than the guest's memory ({}); choose a larger size, or --direct",
                settings.text("size"),
                settings.text("memory")
            ));
        }
        if !cell.size.is_multiple_of(MIB) || !cell.memory.is_multiple_of(MIB) {
            return refuse("--size, --memory: not a whole number of MiB".into());
        }
        if let server::Kind::Socket(_) = cell.disk {
            return refuse(format!(
                "--disk {}: its image would be overwritten",
                cell.disk
            ));
        }
        cell.disk.check(&cell.spec())
    }

    fn needs(&self, settings: &Settings) -> Result<Vec<Need>> {
        let cell = Cell::new(settings)?;
        let programs = [Need::Program("bonnie++"), Need::Program(cell.fs.maker())];
        Ok([&Need::GUEST[..], &programs].concat())
    }

    fn estimate(&self, settings: &Settings) -> Duration {
        const AROUND: Duration = Duration::from_secs(40);
        /// Speed of five passes over the data, including the one that writes the image.
        const BYTES_PER_SECOND: u64 = 100_000_000;
        /// Speed of six tests.
        const FILES_PER_SECOND: u64 = 5_000;
        let Ok(cell) = Cell::new(settings) else {
            return AROUND;
        };
        let data = cell.size.saturating_mul(u64::from(cell.concurrency)) / BYTES_PER_SECOND * 5;
        let files = cell.file_count() * 6 / FILES_PER_SECOND;
        AROUND + Duration::from_secs(data + files)
    }

    fn begin(&self, context: &Context) -> Box<dyn Session> {
        Box::new(Trying {
            fathom: context.fathom.clone(),
            image: None,
            round: 0,
            bare: BTreeMap::new(),
        })
    }
}

const MIB: u64 = 1 << 20;

struct Cell {
    disk: server::Kind,
    aio: Aio,
    fs: FileSystem,
    size: u64,
    memory: u64,
    vcpus: u16,
    files: u64,
    concurrency: u32,
    direct: bool,
    chars: bool,
}

impl Cell {
    fn new(settings: &Settings) -> Result<Cell> {
        Ok(Cell {
            disk: settings.word("disk")?,
            aio: settings.word("aio")?,
            fs: settings.word("fs")?,
            size: Settings::needed("size", settings.size("size")?)?,
            memory: Settings::needed("memory", settings.size("memory")?)?,
            vcpus: Settings::needed("vcpus", settings.count("vcpus")?)?,
            files: Settings::needed("files", settings.count("files")?)?,
            concurrency: Settings::needed("concurrency", settings.count("concurrency")?)?,
            direct: settings.is_on("direct"),
            // bonnie++ would use O_DIRECT for single bytes, too, which fails.
            chars: settings.is_on("chars") && !settings.is_on("direct"),
        })
    }

    /// The disk, without its image.
    fn spec(&self) -> Spec<'static> {
        Spec {
            name: DISK,
            aio: self.aio,
            queues: self.vcpus.min(MOST_QUEUES),
            ..Spec::default()
        }
    }

    /// Returns the number of files of all copies.
    fn file_count(&self) -> u64 {
        self.files * 1024 * u64::from(self.concurrency)
    }

    /// Returns the size of the image, with room for the data and the files of all copies.
    ///
    /// A file needs an inode; mke2fs creates one inode for each 16 KiB.
    fn image_bytes(&self) -> u64 {
        const INODE: u64 = 16 << 10;
        let data = self.size.saturating_mul(self.concurrency.into());
        let net = data.saturating_add(self.file_count() * INODE);
        // Minimum space used by the file system itself.
        let own = match self.fs {
            FileSystem::Ext4 | FileSystem::Ext3 | FileSystem::Ext2 => 64 * MIB,
            FileSystem::Xfs | FileSystem::Btrfs => 512 * MIB,
        };
        let gross = net.saturating_add(net / 8).saturating_add(own);
        gross.next_multiple_of(MIB)
    }

    fn machine(&self) -> Machine {
        Machine {
            cpus: self.vcpus.into(),
            memory_mib: u32::try_from(self.memory / MIB).unwrap_or(u32::MAX),
            modules: self.fs.module().map(String::from).into_iter().collect(),
            ..Machine::default()
        }
    }

    /// Returns the guest's shell script, which prints bonnie++'s line of results.
    fn script(&self, device: &str) -> String {
        format!(
            "mount -t {} {device} /mnt\n\
             {} >/tmp/bonnie.csv 2>/tmp/bonnie.log || {{ cat /tmp/bonnie.log; exit 1; }}\n\
             umount /mnt\n\
             cat /tmp/bonnie.csv",
            self.fs,
            self.command("/mnt")
        )
    }

    fn command(&self, dir: &str) -> String {
        let mib = self.size / MIB;
        let direct = if self.direct { " -D" } else { "" };
        let fast = if self.chars { "" } else { " -f" };
        // -r 0: bonnie++'s own check of the size ignores O_DIRECT. The user is a number, because
        // the guest has no list of users.
        format!(
            "bonnie++ -q -u 0:0 -m guest -d {dir} -r 0 -s {mib} -n {} -c {}{direct}{fast}",
            self.files, self.concurrency
        )
    }

    fn timeout(&self) -> Duration {
        /// Time of the tests that write and read single bytes.
        const AROUND: Duration = Duration::from_secs(3600);
        const SLOWEST: u64 = 512 << 10;
        const FILES_PER_SECOND: u64 = 50;
        let data = self.size.saturating_mul(self.concurrency.into()) * 4 / SLOWEST;
        AROUND + Duration::from_secs(data + self.file_count() * 6 / FILES_PER_SECOND)
    }
}

/// Maximum number of queues of a disk.
const MOST_QUEUES: u16 = 64;

struct Trying {
    fathom: PathBuf,
    /// The image of the previous cell.
    image: Option<Image>,
    round: u32,
    /// Results of the host itself in this round, by command.
    bare: BTreeMap<String, Bare>,
}

impl Session for Trying {
    fn begin_round(&mut self, round: u32) {
        if std::mem::replace(&mut self.round, round) != round {
            self.bare.clear();
        }
    }

    fn cell(
        &mut self,
        settings: &Settings,
        folder: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Yield> {
        let cell = Cell::new(settings)?;
        let image = self.image(&cell, progress)?;
        let sockets = Scratch::small()?;
        let spec = Spec {
            fathom: &self.fathom,
            dir: sockets.path(),
            image: &image,
            ..cell.spec()
        };
        let bed = GuestBed::boot(cell.machine(), &cell.disk, &spec, progress)?;
        let mut bed = bed.with_dir(sockets);
        progress("running bonnie++ in the guest");
        let seen = bed.measure(&Job {
            script: &cell.script(&bed.device),
            timeout: cell.timeout(),
            parse: &|text| {
                Ok(Worked {
                    measures: csv::measures(text)?,
                    // The number of its requests is not known.
                    load: Load {
                        threads: cell.concurrency,
                        depth: 1,
                        ..Load::default()
                    },
                })
            },
        })?;
        progress("powering the guest off");
        bed.end_into(folder)?;
        let mut found = Yield::from(seen);
        if let Some(bare) = self.bare(&cell, progress)? {
            found.compare(bare);
        }
        Ok(found)
    }
}

impl Trying {
    /// Returns the result in a directory of this machine, measured once in a round for all servers.
    ///
    /// `None` without O_DIRECT, because the host's page cache has another size than the guest's.
    /// `None` without root privileges, which bonnie++ needs to run as user 0.
    fn bare(&mut self, cell: &Cell, progress: &mut dyn FnMut(&str)) -> Result<Option<Bare>> {
        if !cell.direct || !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        let command = cell.command(".");
        if let Some(known) = self.bare.get(&command) {
            return Ok(Some(known.clone()));
        }
        progress("running bonnie++ on the host itself");
        let text = HostBed::new()?.check(&command, cell.timeout())?;
        let measures = csv::measures(&text)?;
        let written = measures.iter().find(|one| one.name == csv::WRITTEN);
        let bare = written.map(|one| Bare {
            bytes_per_second: one.value * 1e6,
            ..Bare::default()
        });
        self.bare.extend(bare.clone().map(|bare| (command, bare)));
        Ok(bare)
    }

    /// Returns the path of an image with a new file system.
    fn image(&mut self, cell: &Cell, progress: &mut dyn FnMut(&str)) -> Result<PathBuf> {
        let bytes = cell.image_bytes();
        let image = match self.image.take().filter(|image| image.bytes() == bytes) {
            Some(image) => image,
            None => {
                progress(&format!("writing an image of {} MiB", bytes / MIB));
                Image::make(bytes)?
            }
        };
        let image = self.image.insert(image);
        progress(&format!("making a file system ({})", cell.fs));
        image.format(cell.fs)?;
        Ok(image.path())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(settings: &Settings) -> String {
        Bonnie.check(settings).unwrap_err().to_string()
    }

    #[test]
    fn what_would_measure_the_page_cache_is_refused() {
        let settings = Settings::defaults(PARAMETERS);
        Bonnie.check(&settings).unwrap();
        let small = settings.clone().with("size", "1G");
        assert!(refused(&small).contains("not more than the guest's memory (1G)"));
        Bonnie.check(&small.with("direct", "on")).unwrap();
        let odd = settings.clone().with("size", (2u64 << 30) + 512);
        assert!(refused(&odd).contains("whole number of MiB"));
        let socket = settings.with("disk", "socket:/s");
        assert!(refused(&socket).contains("overwritten"));
    }

    #[test]
    fn bonnie_is_called_as_asked() {
        let settings = Settings::defaults(PARAMETERS);
        let script = Cell::new(&settings).unwrap().script("/dev/vdb");
        assert!(
            script.starts_with("mount -t ext4 /dev/vdb /mnt\n"),
            "{script}"
        );
        assert!(script.contains(" -s 2048 -n 16 -c 1 >"), "{script}");
        let settings = settings
            .with("direct", "on")
            .with("concurrency", 3)
            .with("fs", "xfs");
        let cell = Cell::new(&settings).unwrap();
        let script = cell.script("/dev/vdb");
        assert!(script.contains(" -c 3 -D -f >"), "{script}");
        assert_eq!(cell.machine().modules, ["xfs"]);
    }

    #[test]
    fn the_image_has_room_for_all_copies() {
        let settings = Settings::defaults(PARAMETERS);
        let bytes = |settings: &Settings| Cell::new(settings).unwrap().image_bytes();
        let one = bytes(&settings);
        assert!(one > (2 << 30) + (16 << 24), "{one}");
        assert!(bytes(&settings.clone().with("concurrency", 4)) > 3 * one);
        assert!(bytes(&settings.with("size", "1T").with("concurrency", 64)) > 1 << 45);
    }
}
