//! A cell: one test in one bed.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use fathom_run::evidence::{Evidence, Load};
use fathom_run::{Better, Measure, Unit};
use fathom_units::short_size;

use super::super::shared::Cpus;
use super::super::{Settings, Yield};
use crate::bed::Seen;
use crate::bed::instance::{Cache, Instance, Kind, Spec};
use crate::error::{Context, Result};
use crate::evidence::{Sampler, Watch, device_below};
use crate::scratch::Scratch;
use crate::words::words;
use crate::{disk_image, host, page_cache, process_tree};

const SHORT: Duration = Duration::from_secs(60);
/// Minimum time in seconds of a window whose evidence is kept.
const SHORTEST: f64 = 1.0;
/// Minimum speed expected of a bed, in bytes and in system calls per second.
const SLOWEST: u64 = 64 << 10;
const SLOWEST_CALLS: u64 = 1000;
/// Free space on the disk in addition to the data: the data divided by `ROOM_PART`, but at least
/// `ROOM` bytes.
const ROOM: u64 = 16 << 20;
const ROOM_PART: u64 = 4;
/// The data divided by this is the maximum that may be unwritten after fsync, because a file system
/// writes data of its own at any time. With more unwritten data, the bed does not flush.
const UNFLUSHED_PART: u64 = 16;

words! {
    /// The test that is timed.
    pub enum Test {
        /// Start of the bed until the agent's first reply.
        StartUp = "start-up",
        /// A program that makes almost only system calls.
        Syscalls = "syscalls",
        /// Data from the host, written to a file.
        Upload = "upload",
        /// Data from the host, discarded.
        UploadNoWrite = "upload-no-write",
        /// Data made in the bed, written to a file.
        WriteNoUpload = "write-no-upload",
    }
}

impl Test {
    /// All tests, separated by commas.
    pub const FORM_AS_DEFAULT: &str = "start-up,syscalls,upload,upload-no-write,write-no-upload";

    fn writes(self) -> bool {
        matches!(self, Test::Upload | Test::WriteNoUpload)
    }
}

pub struct Cell {
    pub kind: Kind,
    pub test: Test,
    pub mib: u64,
    calls: u64,
    cache: Cache,
    memory: Option<u64>,
    cpus: Option<Cpus>,
}

/// Time and CPU time of a test, in seconds.
struct Took {
    seconds: f64,
    cpu: f64,
}

impl Cell {
    pub fn new(settings: &Settings) -> Result<Cell> {
        let given = |name: &str| !settings.text(name).is_empty();
        Ok(Cell {
            kind: match given("bed") {
                true => settings.word("bed")?,
                false => Kind::machine(),
            },
            test: settings.word("test")?,
            mib: Settings::needed("size", settings.size("size")?)?.div_ceil(1 << 20),
            calls: Settings::needed("calls", settings.count("calls")?)?,
            cache: settings.word("cache")?,
            memory: settings.size("memory")?,
            cpus: given("cpus").then(|| settings.word("cpus")).transpose()?,
        })
    }

    pub fn spec<'a>(&self, image: &'a Path) -> Spec<'a> {
        Spec {
            cache: self.cache,
            memory: self.memory,
            cpus: self.cpus.map(|Cpus(cpus)| cpus),
            ..Spec::new(image)
        }
    }

    fn bytes(&self) -> u64 {
        self.mib << 20
    }

    /// Runs the test in a new bed with a new disk.
    pub fn run(&self, progress: &mut dyn FnMut(&str)) -> Result<Yield> {
        self.kind.prepare()?;
        let dir = Scratch::on_disk()?;
        let image = dir.path().join("disk.img");
        make_disk(&image, self.bytes() + (self.bytes() / ROOM_PART).max(ROOM))?;
        let (seen, unwritten) = match self.test {
            Test::StartUp => (self.start_up(&image, progress)?, None),
            _ => self.within(&image, progress)?,
        };
        let mut found = Yield::from(seen);
        // The evidence is dropped if the bed did not exist when the window began, or has few
        // samples.
        let is_short = |one: &Evidence| one.load.seconds < SHORTEST;
        if self.test == Test::StartUp || found.evidence.as_ref().is_some_and(is_short) {
            found.evidence = None;
        }
        if let Some(bytes) = unwritten {
            let value = bytes as f64;
            let measure = Measure::new("unwritten", Unit::Bytes, value, Better::Lower);
            found.measures.push(measure);
            found.problems.extend(self.unflushed(bytes));
        }
        Ok(found)
    }

    fn start_up(&self, image: &Path, progress: &mut dyn FnMut(&str)) -> Result<Seen> {
        progress(&format!("starting {}", self.kind));
        let sampler = Sampler::start(Watch {
            device: device_below(image).unwrap_or_default(),
            ..Watch::default()
        })?;
        let begin = Instant::now();
        let mut bed = Instance::start(self.kind, &self.spec(image))?;
        bed.check("true", SHORT)?;
        let took = Took {
            seconds: begin.elapsed().as_secs_f64(),
            cpu: process_tree::cpu_seconds(bed.pid()),
        };
        let seen = self.seen(sampler, &took);
        bed.end()?;
        Ok(seen)
    }

    /// Runs a test in a bed that has started. Also returns the number of bytes that were not
    /// written when fsync had ended, if known.
    fn within(&self, image: &Path, progress: &mut dyn FnMut(&str)) -> Result<(Seen, Option<u64>)> {
        progress(&format!("starting {}", self.kind));
        let mut bed = Instance::start(self.kind, &self.spec(image))?;
        let mount = format!("mount {} /mnt", bed.disk());
        if self.test.writes() {
            bed.check(&mount, SHORT)?;
        }
        progress(&format!("{} in {}", self.test, self.kind));
        let mut watch = bed.watch();
        if !self.test.writes() {
            watch.device = None; // its requests come from other programs
        }
        let sampler = Sampler::start(watch)?;
        let (begin, before) = (Instant::now(), process_tree::cpu_seconds(bed.pid()));
        bed.watched(sampler.newcomers(), |bed| self.work(bed))?;
        let took = Took {
            seconds: begin.elapsed().as_secs_f64(),
            cpu: process_tree::cpu_seconds(bed.pid()) - before,
        };
        let mut unwritten = None;
        if self.test.writes() {
            unwritten = page_cache::unwritten(image)?;
        }
        let seen = self.seen(sampler, &took);
        if self.test.writes() {
            bed.check("umount /mnt", SHORT + self.patience())?;
        }
        bed.end()?;
        Ok((seen, unwritten))
    }

    fn work(&self, bed: &mut Instance) -> Result<()> {
        let limit = SHORT + self.patience();
        let (mib, blocks) = (self.mib, self.mib * 16);
        let write = format!("dd bs=64k count={blocks} of=/mnt/data conv=fsync 2>&1");
        let done = match self.test {
            Test::StartUp => Ok(String::new()),
            Test::Syscalls => {
                // Each block takes a read and a write.
                let count = self.calls / 2;
                let script = format!("dd if=/dev/zero of=/dev/null bs=1 count={count} 2>&1");
                bed.check(&script, limit)
            }
            Test::Upload => bed.upload(mib, &format!("{write} iflag=fullblock"), limit),
            Test::UploadNoWrite => {
                let script = format!("dd bs=64k count={blocks} of=/dev/null iflag=fullblock 2>&1");
                bed.upload(mib, &script, limit)
            }
            Test::WriteNoUpload => bed.check(&format!("{write} if=/dev/zero"), limit),
        };
        done.map(drop)
    }

    /// Returns the time limit of the test's work.
    fn patience(&self) -> Duration {
        match self.test {
            Test::StartUp => Duration::ZERO,
            Test::Syscalls => Duration::from_secs(self.calls / SLOWEST_CALLS),
            _ => Duration::from_secs(self.bytes() / SLOWEST),
        }
    }

    fn seen(&self, sampler: Sampler, took: &Took) -> Seen {
        let (mut evidence, series) = sampler.stop();
        let (requests, bytes) = match self.test {
            Test::StartUp => (1, 0),
            Test::Syscalls => (self.calls / 2 * 2, 0),
            _ => (self.mib * 16, self.bytes()),
        };
        evidence.load = Load {
            threads: 1,
            depth: 1,
            requests,
            bytes,
            seconds: took.seconds,
            mean_ns: took.seconds * 1e9 / requests as f64,
            ..Load::default()
        };
        let lower = |name: &str, unit, value| Measure::new(name, unit, value, Better::Lower);
        let mut measures = vec![
            lower("time", Unit::Seconds, took.seconds),
            lower("cpu", Unit::Seconds, took.cpu),
        ];
        match self.test {
            Test::StartUp => {}
            Test::Syscalls => {
                let each = lower("call", Unit::Nanoseconds, evidence.load.mean_ns);
                measures.push(each.of(requests));
            }
            _ => {
                let rate = bytes as f64 / took.seconds / 1e6;
                let (name, unit) = ("throughput", Unit::MegabytesPerSecond);
                measures.push(Measure::new(name, unit, rate, Better::Higher));
            }
        }
        Seen {
            measures,
            series,
            evidence,
        }
    }

    /// Returns a warning if a bed has left too much data only in this machine's page cache.
    fn unflushed(&self, unwritten: u64) -> Option<String> {
        if unwritten <= self.bytes() / UNFLUSHED_PART {
            return None;
        }
        Some(format!(
            "{} does not flush: when fsync had ended inside, {} of {} were in this machine's page \
             cache alone, so its time is too good; compare with --cache none",
            self.kind,
            short_size(unwritten),
            short_size(self.bytes()),
        ))
    }
}

/// Creates a disk with an ext2 file system, and flushes it.
fn make_disk(image: &Path, bytes: u64) -> Result<()> {
    disk_image::sparse(image, bytes)?;
    host::run(
        "mke2fs",
        &["-q", "-F", "-t", "ext2", &image.to_string_lossy()],
    )?;
    let file = File::open(image).and_then(|file| file.sync_all());
    file.context(|| format!("cannot flush {}", image.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_ignores_flushes_is_named() {
        let settings = Settings::defaults(super::super::PARAMETERS).with("bed", "uml");
        let cell = Cell::new(&settings).unwrap();
        assert_eq!(cell.unflushed(64 << 10), None);
        let said = cell.unflushed(8 << 20).unwrap();
        assert!(
            said.starts_with("uml does not flush") && said.contains("8M of 8M"),
            "{said}"
        );
    }
}
