//! Options of a load with timestamps.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::options::{Engine, Load, MAX_QUEUE_SIZE, Rw, SECTOR};

const MAX_DEPTH: u32 = MAX_QUEUE_SIZE as u32;
/// Maximum size of a block in bytes.
const MAX_BLOCK: u64 = 64 << 20;
/// Maximum total size of all buffers in bytes.
const MAX_BUFFERS: u64 = 1 << 30;
/// Default number of records, which need only 64 MiB, because a guest may have little memory.
const DEFAULT_ROOM: u64 = 2 << 20;
const MAX_ROOM: u64 = 64 << 20;

/// Limit after which the load ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Number of operations.
    Operations(u64),
    /// Time. The load ends earlier if the space for records is used up ([`Options::room`]).
    Time(Duration),
}

/// Options of the load. [`Options::new`] gives the benchmark of the wiki: sequential 4 KiB reads
/// with `read()`, one at a time, with direct I/O.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Path of a file or a block device.
    pub path: PathBuf,
    /// Access pattern: reads or writes, sequential or random.
    pub rw: Rw,
    /// Size of an operation in bytes.
    pub block_size: u64,
    /// Number of operations in flight.
    pub iodepth: u32,
    /// I/O interface for more than one operation in flight. `None`: io_uring, or Linux AIO if the
    /// kernel refuses io_uring.
    pub engine: Option<Engine>,
    /// Use `pread` and `pwrite` instead of `read` and `write` with one operation in flight. Random
    /// access always uses them.
    pub positional: bool,
    /// Bypass the page cache (O_DIRECT).
    pub direct: bool,
    /// Limit after which the load ends.
    pub limit: Limit,
    /// Offset of the used range in the file, in bytes.
    pub offset: u64,
    /// Length of the used range in bytes. `None`: up to the end. Sequential access starts again at
    /// `offset` after the end of the range.
    pub length: Option<u64>,
    /// Delay to inject in every second operation, between its first timestamp and its system call.
    pub inject: Option<Duration>,
    /// Seed of the random offsets. The same seed gives the same offsets.
    pub seed: u64,
    /// Maximum number of records if the limit is a time. `None`: 2 Mi records (64 MiB).
    pub room: Option<u64>,
}

impl Options {
    /// Returns the options of the wiki's benchmark on this file, with 10,000 operations.
    pub fn new(path: impl Into<PathBuf>) -> Options {
        Options {
            path: path.into(),
            rw: Rw::Read,
            block_size: 4096,
            iodepth: 1,
            engine: None,
            positional: false,
            direct: true,
            limit: Limit::Operations(10_000),
            offset: 0,
            length: None,
            inject: None,
            seed: 0,
            room: None,
        }
    }

    /// Sets the limit.
    #[must_use]
    pub fn with_limit(mut self, limit: Limit) -> Options {
        self.limit = limit;
        self
    }

    /// Sets the access pattern.
    #[must_use]
    pub fn with_rw(mut self, rw: Rw) -> Options {
        self.rw = rw;
        self
    }

    /// Sets the number of operations in flight.
    #[must_use]
    pub fn with_iodepth(mut self, iodepth: u32) -> Options {
        self.iodepth = iodepth;
        self
    }

    /// Returns whether the load uses `pread` and `pwrite` with one operation in flight.
    pub(super) fn is_positional(&self) -> bool {
        self.positional || self.rw.is_random()
    }

    /// Returns the maximum number of records.
    pub(super) fn room(&self) -> u64 {
        match self.limit {
            Limit::Operations(count) => count,
            Limit::Time(_) => self.room.unwrap_or(DEFAULT_ROOM),
        }
    }

    /// Rejects options that are invalid for any file.
    ///
    /// # Errors
    /// [`Error::Options`], with the reason in one line.
    pub fn check(&self) -> Result<()> {
        if !matches!(self.rw, Rw::Read | Rw::Write | Rw::RandRead | Rw::RandWrite) {
            return self.bad(format!(
                "{} is not one of read, write, randread, randwrite",
                self.rw
            ));
        }
        let sized = |n: u64| n.is_multiple_of(SECTOR.into());
        if self.block_size == 0 || self.block_size > MAX_BLOCK {
            let size = self.block_size;
            return self.bad(format!("a block size of {size} is not within 1 and 64M"));
        }
        if self.direct && !(sized(self.block_size) && sized(self.offset)) {
            return self.bad(
                "direct I/O wants a block size and an offset that are multiples of 512".into(),
            );
        }
        if self.iodepth == 0 || self.iodepth > MAX_DEPTH {
            return self.bad(format!("an iodepth is 1 to {MAX_DEPTH}"));
        }
        if u64::from(self.iodepth) * self.block_size > MAX_BUFFERS {
            return self.bad("iodepth times block size is more than 1G of buffers".into());
        }
        if self.iodepth > 1 && self.engine == Some(Engine::Psync) {
            return self.bad("psync has one operation in flight".into());
        }
        if self.iodepth > 1 && self.engine == Some(Engine::Aio) && !self.direct {
            return self
                .bad("Linux AIO without direct I/O waits in each call: use io_uring".into());
        }
        let room = self.room();
        if room == 0 || room > MAX_ROOM {
            return self.bad(format!(
                "{room} operations in one run; 1 to {MAX_ROOM} have room for their stamps"
            ));
        }
        if self.limit == Limit::Time(Duration::ZERO) {
            return self.bad("a run of no time at all".into());
        }
        Ok(())
    }

    /// Returns the equivalent options of a [`Load`]. The caller must enforce the time limit and
    /// handle errors.
    pub(super) fn load(&self) -> Load {
        Load {
            rw: self.rw,
            // `check` has ensured that these are at most 64 MiB and 1024.
            bs: self.block_size as u32,
            iodepth: self.iodepth as u16,
            runtime: None,
            ramp: Duration::ZERO,
            offset: self.offset,
            number_ios: Some(self.room()),
            seed: self.seed,
            continue_on_error: true,
            ..Load::default()
        }
    }

    pub(super) fn bad<T>(&self, reason: String) -> Result<T> {
        Err(Error::Options(format!("{}: {reason}", self.path.display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(change: impl FnOnce(&mut Options)) -> String {
        let mut options = Options::new("/dev/null");
        change(&mut options);
        options.check().unwrap_err().to_string()
    }

    #[test]
    fn what_cannot_be_done_is_said() {
        Options::new("/dev/null").check().unwrap();
        assert!(refusal(|o| o.block_size = 0).contains("block size"));
        assert!(refusal(|o| o.block_size = 1000).contains("multiples of 512"));
        assert!(refusal(|o| o.rw = Rw::Trim).contains("trim is not one of"));
        assert!(refusal(|o| o.offset = 7).contains("multiples of 512"));
        assert!(refusal(|o| o.iodepth = 0).contains("1 to 1024"));
        assert!(refusal(|o| (o.iodepth, o.block_size) = (1024, 2 << 20)).contains("1G"));
        assert!(refusal(|o| o.limit = Limit::Operations(0)).contains("0 operations"));
        assert!(refusal(|o| o.limit = Limit::Time(Duration::ZERO)).contains("no time"));
        let buffered_aio = |o: &mut Options| {
            (o.direct, o.engine, o.iodepth) = (false, Some(Engine::Aio), 2);
        };
        assert!(refusal(buffered_aio).contains("use io_uring"));
    }
}
