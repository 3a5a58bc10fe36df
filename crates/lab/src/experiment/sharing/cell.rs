//! A cell: one test with one way.

use std::path::{Path, PathBuf};

use fathom_run::{Better, Measure, Unit};
use fathom_units::short_size;

use super::load::{DATA, Load, Place};
use super::way::{Reach, Way};
use crate::bed::instance::Cache;
use crate::bed::{DISK, GuestBed, HostBed, Job, Protocol, Seen};
use crate::error::{Context, Error, Result};
use crate::experiment::{Settings, Yield};
use crate::machine::{Aio, FileSystem, Machine};
use crate::scratch::Scratch;
use crate::server::Spec;
use crate::shell::quoted;
use crate::words::words;
use crate::{disk_image, page_cache};

words! {
    /// State of this machine's page cache when a test begins.
    pub enum HostCache {
        /// The cache has what creating the files has left there.
        Warm = "warm",
        Dropped = "dropped",
    }
}

pub struct Cell {
    pub way: Way,
    pub load: Load,
    pub fs: FileSystem,
    host_cache: HostCache,
    pub cache: Cache,
    aio: Aio,
    vcpus: u32,
    msize: u64,
}

/// Free space on the disk in addition to its data: the data divided by `ROOM_PART`, but at least
/// `ROOM` bytes.
const ROOM: u64 = 256 << 20;
const ROOM_PART: u64 = 4;
/// Space on a disk for a small file and its metadata.
const SMALL_FILE: u64 = 8 << 10;
const GUEST: Place = Place {
    tree: "/mnt",
    notes: "/tmp",
    fathom: "fathom",
};
/// Empties the guest's caches.
const FORGET: &str = "echo 3 >/proc/sys/vm/drop_caches";
/// The data divided by this is the maximum that may be unwritten after fsync, because file systems
/// write data of their own at any time. With more unwritten data, the way does not flush.
const UNFLUSHED_PART: u64 = 16;

impl Cell {
    pub fn new(settings: &Settings) -> Result<Cell> {
        Ok(Cell {
            way: match settings.text("way") {
                "" => Way::VirtioBlk, // the first by default
                _ => settings.word("way")?,
            },
            load: Load {
                test: settings.word("test")?,
                size: Settings::needed("size", settings.size("size")?)?,
                runtime: Settings::needed("runtime", settings.time("runtime")?)?,
                files: Settings::needed("files", settings.count("files")?)?,
                direct: settings.is_on("direct"),
            },
            fs: settings.word("fs")?,
            host_cache: settings.word("host-cache")?,
            cache: settings.word("cache")?,
            aio: settings.word("aio")?,
            vcpus: Settings::needed("vcpus", settings.count("vcpus")?)?,
            msize: Settings::needed("msize", settings.size("msize")?)?,
        })
    }

    /// Checks the settings before anything is run.
    ///
    /// # Errors
    /// One line that says which values do not go together.
    pub fn check(&self) -> Result<()> {
        match self.way.reach() {
            Reach::Disk(kind) => kind.check(&self.spec()),
            _ if self.cache == Cache::None => Err(Error::Protocol(format!(
                "--cache none: a server of files goes past this machine's page cache only where the \
                 guest asks for it (--direct): not with --way {}",
                self.way
            ))),
            _ => Ok(()),
        }
    }

    pub fn drops_host_cache(&self) -> bool {
        self.host_cache == HostCache::Dropped
    }

    /// The disk, without its image.
    fn spec(&self) -> Spec<'static> {
        Spec {
            name: DISK,
            aio: self.aio,
            cache: self.cache.name(),
            ..Spec::default()
        }
    }

    /// Runs the test on new files, in a new guest.
    pub fn run(&self, fathom: &Path, progress: &mut dyn FnMut(&str)) -> Result<Yield> {
        match self.way.reach() {
            Reach::Host => self.on_host(fathom, progress),
            _ => self.in_guest(fathom, progress),
        }
    }

    fn on_host(&self, fathom: &Path, progress: &mut dyn FnMut(&str)) -> Result<Yield> {
        let host = HostBed::new()?;
        let place = Place {
            tree: "./tree",
            notes: ".",
            fathom: &quoted(&fathom.to_string_lossy()),
        };
        progress(&format!("making files for {}", self.load.test));
        let make = format!("mkdir tree\n{}", self.load.prepare(place));
        host.check(&make, self.load.patience())?;
        self.forget()?;
        progress(&format!("{} on this machine", self.load.test));
        let seen = host.measure(&Job {
            script: &self.load.run(place),
            timeout: self.load.patience(),
            parse: &|text| self.load.parse(text),
        })?;
        let mut yielded = self.yielded(seen, &host.dir().join("tree").join(DATA))?;
        yielded.problems.extend(self.reads_device());
        Ok(yielded)
    }

    /// Returns a warning if the work on this machine reads its device, and other ways may read its
    /// page cache.
    fn reads_device(&self) -> Option<String> {
        let test = self.load.test;
        let reads = test.is_of_data() && !test.is_flushed() && self.load.direct;
        let others = self.cache != Cache::None && !self.drops_host_cache();
        (reads && others).then(|| {
            "bare reads the device (--direct), while the other ways may read this machine's page \
             cache: compare them with --cache none or --host-cache dropped"
                .to_owned()
        })
    }

    fn in_guest(&self, fathom: &Path, progress: &mut dyn FnMut(&str)) -> Result<Yield> {
        let dir = Scratch::on_disk()?;
        let (mut bed, mount, written) = self.boot(fathom, dir.path(), progress)?;
        let patience = self.load.patience();
        progress(&format!("making files for {}", self.load.test));
        let make = format!("{mount}\n{}{FORGET}", self.load.prepare(GUEST));
        bed.guest.check(&make, patience)?;
        self.forget()?;
        progress(&format!("{} by {}", self.load.test, self.way));
        let mut seen = bed.measure(&Job {
            script: &self.load.run(GUEST),
            timeout: patience,
            parse: &|text| self.load.parse(text),
        })?;
        let server = bed.server.as_mut().map(|server| server.process().pid());
        self.add_costs(&mut seen, bed.guest.pid(), server);
        let yielded = self.yielded(seen, &written)?;
        bed.guest.check("umount /mnt", patience)?;
        // The server ends with the guest, or is killed when the bed is dropped.
        bed.guest.power_off()?;
        Ok(yielded)
    }

    /// Boots a guest. Also returns the script that mounts the tree, and the file on this machine
    /// that has the data written by the guest.
    fn boot(
        &self,
        fathom: &Path,
        dir: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<(GuestBed, String, PathBuf)> {
        let mut machine = Machine {
            cpus: self.vcpus,
            ..Machine::default()
        };
        if !self.load.test.is_of_data() {
            machine.programs.push(fathom.to_owned());
        }
        let tree = dir.join("tree");
        let mut share = |protocol: Protocol| {
            std::fs::create_dir(&tree).context(|| format!("cannot create {}", tree.display()))?;
            let bed = GuestBed::share(machine.clone(), protocol, &tree, dir, progress)?;
            Ok((bed, protocol.mount(GUEST.tree), tree.join(DATA)))
        };
        match self.way.reach() {
            Reach::Host => Err(Error::Protocol("there is no guest".into())),
            Reach::Virtiofs(arguments) => share(Protocol::Virtiofs { arguments }),
            Reach::NineP(cache) => {
                let mount = format!("msize={},cache={cache}", self.msize);
                share(Protocol::NineP { mount: &mount })
            }
            Reach::Disk(kind) => {
                let image = dir.join("disk.img");
                let needed = self.load.size + self.load.files * SMALL_FILE;
                disk_image::sparse(&image, needed + (needed / ROOM_PART).max(ROOM))?;
                machine.modules.extend(self.fs.module().map(String::from));
                let spec = Spec {
                    fathom,
                    dir,
                    image: &image,
                    ..self.spec()
                };
                let bed = GuestBed::boot(machine, &kind, &spec, progress)?;
                let (fs, device) = (self.fs, &bed.device);
                let make = fs.make(device, false);
                let mount = format!("{make}\nmount -t {fs} {device} {}", GUEST.tree);
                Ok((bed, mount, image))
            }
        }
    }

    /// Empties this machine's page cache, if the settings ask for it.
    fn forget(&self) -> Result<()> {
        match self.host_cache {
            HostCache::Warm => Ok(()),
            HostCache::Dropped => page_cache::drop_all(),
        }
    }

    /// Adds the CPU time of QEMU and of the server, per request or gigabyte.
    fn add_costs(&self, seen: &mut Seen, qemu: u32, server: Option<u32>) {
        let load = &seen.evidence.load;
        let (name, unit, per) = match self.load.test.is_streaming() {
            true => ("gb", Unit::Seconds, load.bytes as f64 / 1e9),
            false => {
                let per = load.requests as f64 / 1e6;
                ("request", Unit::CpuMicrosecondsPerRequest, per)
            }
        };
        if per <= 0.0 {
            return;
        }
        for (who, pid) in [("qemu", Some(qemu)), ("server", server)] {
            let Some(pid) = pid else { continue };
            let threads = seen.evidence.threads.iter().filter(|one| one.pid == pid);
            let spent: f64 = threads.map(|one| one.cpu).sum();
            let name = format!("{who}.cpu-per-{name}");
            let measure = Measure::new(name, unit, spent / per, Better::Lower);
            seen.measures.push(measure);
        }
    }

    fn yielded(&self, seen: Seen, written: &Path) -> Result<Yield> {
        let mut yielded = Yield::from(seen);
        if !self.load.test.is_flushed() {
            return Ok(yielded);
        }
        if let Some(bytes) = page_cache::unwritten(written)? {
            let value = bytes as f64;
            let measure = Measure::new("unwritten", Unit::Bytes, value, Better::Lower);
            yielded.measures.push(measure);
            let moved = yielded.evidence.as_ref().map_or(0, |one| one.load.bytes);
            yielded.problems.extend(self.unflushed(bytes, moved));
        }
        Ok(yielded)
    }

    /// Returns a warning if a way has left too many bytes only in this machine's page cache.
    fn unflushed(&self, unwritten: u64, moved: u64) -> Option<String> {
        (unwritten > moved / UNFLUSHED_PART).then(|| {
            format!(
                "{} does not flush: when fsync had ended, {} of {} were in this machine's page cache \
                 alone, so its time is too good",
                self.way,
                short_size(unwritten),
                short_size(moved)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::PARAMETERS;
    use super::*;
    use fathom_run::evidence::{Evidence, Load as Worked, ThreadRole, ThreadTime};

    fn cell(changes: &[(&str, &str)]) -> Cell {
        let settings = Settings::defaults(PARAMETERS);
        let set = |settings: Settings, (name, value): &(&str, &str)| settings.with(name, value);
        Cell::new(&changes.iter().fold(settings, set)).unwrap()
    }

    #[test]
    fn each_process_has_its_own_cost() {
        let thread = |pid, cpu| ThreadTime {
            pid,
            tid: pid,
            name: String::new(),
            role: ThreadRole::Io,
            vcpu: None,
            cpu,
            waiting: None,
            polls: false,
            polled: None,
        };
        let costs = |test: &str| {
            let evidence = Evidence {
                threads: vec![thread(7, 1.0), thread(7, 0.5), thread(8, 0.25)],
                load: Worked {
                    requests: 1000,
                    bytes: 500_000_000,
                    ..Worked::default()
                },
                ..Evidence::default()
            };
            let mut seen = Seen {
                evidence,
                ..Seen::default()
            };
            cell(&[("test", test)]).add_costs(&mut seen, 7, Some(8));
            let costs = seen.measures.into_iter().map(|one| (one.name, one.value));
            costs.collect::<Vec<_>>()
        };
        let wanted = [("qemu.cpu-per-gb", 3.0), ("server.cpu-per-gb", 0.5)];
        assert_eq!(
            costs("read"),
            wanted.map(|(name, value)| (name.to_owned(), value))
        );
        let wanted = [
            ("qemu.cpu-per-request", 1500.0),
            ("server.cpu-per-request", 250.0),
        ];
        assert_eq!(
            costs("stat"),
            wanted.map(|(name, value)| (name.to_owned(), value))
        );
    }

    #[test]
    fn bare_reads_beside_the_page_cache_are_named() {
        let said = |changes: &[(&str, &str)]| {
            let all = [&[("way", "bare"), ("test", "read")], changes].concat();
            cell(&all).reads_device()
        };
        let direct = ("direct", "on");
        let warning = said(&[direct]).unwrap();
        assert!(warning.starts_with("bare reads the device"), "{warning}");
        for changes in [
            &[][..],
            &[direct, ("test", "write")],
            &[direct, ("cache", "none")],
            &[direct, ("host-cache", "dropped")],
        ] {
            assert_eq!(said(changes), None, "{changes:?}");
        }
    }

    #[test]
    fn who_ignores_flushes_is_named() {
        let cell = cell(&[("way", "9p")]);
        assert_eq!(cell.unflushed(4096, 1 << 20), None);
        let said = cell.unflushed(1 << 20, 1 << 20).unwrap();
        assert!(
            said.starts_with("9p does not flush") && said.contains("1M of 1M"),
            "{said}"
        );
    }
}
