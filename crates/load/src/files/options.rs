//! Options of the mail server. Names follow FFSB and fio.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::mail::{MAX_SIZE, MIN_SIZE, Weights};
use crate::error::{Error, Result};

/// Unit of sizes and of the verified pattern, in bytes.
pub const SECTOR: u32 = 512;
/// Maximum number of directories, each of which stays open.
pub const MAX_DIRS: u16 = 500;
/// Maximum number of files before the load. Each needs 16 bytes of memory.
pub const MAX_FILES: u32 = 1_000_000;
/// Maximum number of threads.
pub const MAX_THREADS: u16 = 256;
/// Maximum size of a block in bytes.
pub const MAX_BS: u32 = 1 << 20;
/// Lower limits for the number of files and for the size of the largest file, in bytes, after
/// scaling.
const SCALED_FILES: u32 = 100;
const SCALED_SIZE: u32 = 64 << 10;

/// The parts of a run to execute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// Create the files, run the load, and remove the files unless [`Options::keep`] is set.
    #[default]
    All,
    /// Create the files, and keep them.
    Files,
    /// Run the load on the files that an earlier run of [`Part::Files`] with otherwise the same
    /// options has created.
    Load,
}

/// Options of a run of the mail server.
#[derive(Clone, Debug)]
pub struct Options {
    /// An existing directory. The run creates a new directory below it. For [`Part::Load`], this is
    /// the directory that the earlier run created.
    pub dir: PathBuf,
    /// Parts of the run to execute.
    pub part: Part,
    /// Number of threads, each with one operation in flight.
    pub threads: u16,
    /// Number of files created before the load. The load never has more than twice as many.
    pub files: u32,
    /// Number of directories. Each belongs to one thread, so there must be at least as many as
    /// threads.
    pub dirs: u16,
    /// Maximum size of a file in bytes. Larger files are cut to this size, and appends stop at it.
    /// With O_DIRECT, sizes are rounded up to a multiple that the file system can transfer.
    pub max_size: u32,
    /// Size of a transfer and of an append, in bytes.
    pub bs: u32,
    /// Relative frequencies of the kinds of operations.
    pub weights: Weights,
    /// Duration of the load without the final sync. `None`: until `number_ios` is reached.
    pub runtime: Option<Duration>,
    /// Maximum number of operations per thread.
    pub number_ios: Option<u64>,
    /// Number of creates and appends of a thread after which it calls fsync before closing the
    /// file. 0: no fsync.
    pub fsync: u32,
    /// Use O_DIRECT.
    pub direct: bool,
    /// Write verifiable contents, check every read, and check all files at the end.
    pub verify: bool,
    /// Keep the files, even after an error.
    pub keep: bool,
    /// Seed of sizes, operations and contents. Equal options with an equal seed give the same load.
    pub seed: u64,
    /// CPUs for the threads: thread i is pinned to the i-th CPU, round robin. Empty: not pinned.
    pub cpus: Vec<usize>,
    /// Set by any thread to end the run early. The report covers the time until then.
    pub stop: Arc<AtomicBool>,
}

impl Options {
    /// Returns the options of the talk's mail server in `dir`, with one thread, for 10 seconds.
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

    /// Scales the number of files and the maximum size by `scale`, but not below 100 files and 64
    /// KiB. A scale of 0.1 gives 10,000 files of up to 102 KiB, in total 240 MB.
    ///
    /// # Errors
    /// If `scale` is not above 0 and at most 1.
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

    /// Rejects invalid options before any file is accessed.
    ///
    /// # Errors
    /// [`Error::Options`], which names the invalid option as on the command line.
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
