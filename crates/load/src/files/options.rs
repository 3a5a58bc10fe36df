//! What the mail server is to do. Names follow FFSB and fio.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::mail::{MAX_SIZE, MIN_SIZE, Weights};
use crate::error::{Error, Result};

/// The unit of sizes and of the pattern that `verify` writes.
pub const SECTOR: u32 = 512;
/// Directories at most: each stays open.
pub const MAX_DIRS: u16 = 500;
/// Files at most, before the load: they are kept in memory, 16 bytes each.
pub const MAX_FILES: u32 = 1_000_000;
/// Threads at most.
pub const MAX_THREADS: u16 = 256;
/// A block at most, in bytes.
pub const MAX_BS: u32 = 1 << 20;
/// The fewest files and the smallest largest file that a scale makes.
const SCALED_FILES: u32 = 100;
const SCALED_SIZE: u32 = 64 << 10;

/// How much of a run is to be done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    #[default]
    All,
    /// Making the files. They stay.
    Files,
    /// The load, on files that a run of [`Part::Files`] with the same other options has made.
    Load,
}

/// A run of the mail server.
#[derive(Clone, Debug)]
pub struct Options {
    /// An existing directory. Everything happens in a new one below it; of [`Part::Load`], it is
    /// that new one.
    pub dir: PathBuf,
    pub part: Part,
    /// Each with one operation in flight.
    pub threads: u16,
    /// That are made before the load; under load there are never more than twice as many.
    pub files: u32,
    /// That the files lie in; each belongs to one thread, so that there cannot be fewer than threads.
    pub dirs: u16,
    /// Of a file, in bytes: larger ones are this large, and appends end here. With O_DIRECT, sizes
    /// are rounded up to what the file system can transfer.
    pub max_size: u32,
    /// Bytes of one transfer, and of an append.
    pub bs: u32,
    pub weights: Weights,
    /// Time of the load without the last sync; `None`: until `number_ios`.
    pub runtime: Option<Duration>,
    /// Operations of each thread at most.
    pub number_ios: Option<u64>,
    /// One fsync after so many creates and appends of a thread, before the file is closed; 0: none.
    pub fsync: u32,
    /// O_DIRECT.
    pub direct: bool,
    /// Write what tells where it belongs, check every read, and in the end all files.
    pub verify: bool,
    /// Leave the files where they are, whatever happens.
    pub keep: bool,
    pub seed: u64,
    /// Pin thread i to the i-th of these CPUs, round robin; empty: not pinned.
    pub cpus: Vec<usize>,
    /// Set by anybody: ends the run early, with what was measured until then.
    pub stop: Arc<AtomicBool>,
}

impl Options {
    /// The talk's mail server in `dir`, with one thread, for 10 seconds.
    pub fn new(dir: impl Into<PathBuf>) -> Options {
        Options {
            dir: dir.into(),
            part: Part::All,
            threads: 1,
            files: 100_000,
            dirs: 100,
            max_size: MAX_SIZE,
            bs: 8 << 10,
            weights: Weights::default(),
            runtime: Some(Duration::from_secs(10)),
            number_ios: None,
            fsync: 0,
            direct: true,
            verify: false,
            keep: false,
            seed: 1,
            cpus: Vec::new(),
            stop: Arc::default(),
        }
    }

    /// Shrinks the number of files and the size of the largest to `scale` of what they are, but not
    /// below 100 files and 64 KiB: at 0.1 there are 10,000 files up to 102 KiB, 240 MB of them.
    ///
    /// # Errors
    /// When `scale` is not above 0 and at most 1.
    pub fn scaled(self, scale: f64) -> Result<Options> {
        if !(scale > 0.0 && scale <= 1.0) {
            return refuse("--scale must be above 0, and at most 1");
        }
        let size = (f64::from(self.max_size) * scale) as u32 / SECTOR * SECTOR;
        Ok(Options {
            files: ((f64::from(self.files) * scale) as u32).max(SCALED_FILES.min(self.files)),
            max_size: size.max(SCALED_SIZE.min(self.max_size)),
            ..self
        })
    }

    /// Refuses what cannot work, before anything is touched.
    ///
    /// # Errors
    /// With the option that is wrong, by its name on the command line.
    pub fn validate(&self) -> Result<()> {
        within("--threads", self.threads.into(), 1, MAX_THREADS.into())?;
        within("--files", self.files.into(), 1, MAX_FILES.into())?;
        within("--dirs", self.dirs.into(), 1, MAX_DIRS.into())?;
        within("--bs", self.bs.into(), SECTOR.into(), MAX_BS.into())?;
        let (min, max) = (MIN_SIZE.into(), MAX_SIZE.into());
        within("the largest file", self.max_size.into(), min, max)?;
        if !self.bs.is_multiple_of(SECTOR) || !self.max_size.is_multiple_of(SECTOR) {
            return refuse("--bs and sizes of files must be multiples of 512");
        }
        if self.dirs < self.threads {
            return refuse(format!(
                "{} threads need a directory each, --dirs is {}",
                self.threads, self.dirs
            ));
        }
        if self.files < self.threads.into() {
            return refuse(format!(
                "{} threads need a file each, --files is {}",
                self.threads, self.files
            ));
        }
        if self.weights.sum() == 0 {
            return refuse("all weights are 0");
        }
        if self.number_ios == Some(0) || self.runtime == Some(Duration::ZERO) {
            return refuse("--number-ios and --runtime must not be 0");
        }
        if self.runtime.is_none() && self.number_ios.is_none() {
            return refuse("give --runtime or --number-ios");
        }
        Ok(())
    }
}

fn within(what: &str, value: u64, min: u64, max: u64) -> Result<()> {
    match (min..=max).contains(&value) {
        true => Ok(()),
        false => refuse(format!("{what} must be from {min} to {max}")),
    }
}

fn refuse<T>(text: impl Into<String>) -> Result<T> {
    Err(Error::Options(text.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        let good = || Options::new("/nowhere");
        good().validate().unwrap();
        type Spoil = fn(&mut Options);
        let cases: [(&str, Spoil); 11] = [
            ("--threads", |o| o.threads = 0),
            ("--threads", |o| o.threads = 1000),
            ("--files", |o| o.files = 0),
            ("--dirs", |o| o.dirs = 501),
            ("--dirs", |o| (o.threads, o.dirs) = (3, 2)),
            ("--files", |o| (o.threads, o.files) = (3, 2)),
            ("--bs", |o| o.bs = 0),
            ("--bs", |o| o.bs = 1000),
            ("weights", |o| o.weights = Weights([0; 5])),
            ("--runtime", |o| o.runtime = None),
            ("--number-ios", |o| o.number_ios = Some(0)),
        ];
        for (name, spoil) in cases {
            let mut options = good();
            spoil(&mut options);
            let error = options.validate().unwrap_err().to_string();
            assert!(error.contains(name), "{error} names no {name}");
        }
    }

    #[test]
    fn a_scale_shrinks_down_to_a_limit() {
        let scaled = |scale| {
            let options = Options::new("/nowhere").scaled(scale).unwrap();
            options.validate().unwrap();
            (options.files, options.max_size)
        };
        assert_eq!(scaled(1.0), (100_000, 1 << 20));
        assert_eq!(scaled(0.25), (25_000, 256 << 10));
        assert_eq!(scaled(0.1), (10_000, 104_448));
        assert_eq!(scaled(1e-9), (100, 64 << 10));
        for bad in [0.0, -1.0, 1.1, f64::NAN, f64::INFINITY] {
            assert!(Options::new("/nowhere").scaled(bad).is_err(), "{bad}");
        }
    }
}
