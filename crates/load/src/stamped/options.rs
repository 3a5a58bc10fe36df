//! What the benchmark is asked to do.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::options::{Engine, Load, MAX_QUEUE_SIZE, Rw, SECTOR};

const MAX_DEPTH: u32 = MAX_QUEUE_SIZE as u32;
/// One operation's buffer.
const MAX_BLOCK: u64 = 64 << 20;
/// All buffers together.
const MAX_BUFFERS: u64 = 1 << 30;
/// Stamps of this many operations fit into 64 MiB: a guest has little memory.
const DEFAULT_ROOM: u64 = 2 << 20;
const MAX_ROOM: u64 = 64 << 20;

/// When the benchmark ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// After this many operations.
    Operations(u64),
    /// After this time, or when there is no more room for stamps ([`Options::room`]).
    Time(Duration),
}

/// A benchmark. [`Options::new`] is the wiki's: 4 KiB reads in sequence, one at a time, past the
/// page cache, with `read()`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// A file or a block device.
    pub path: PathBuf,
    /// What is done.
    pub rw: Rw,
    /// Bytes an operation.
    pub block_size: u64,
    /// Operations in flight.
    pub iodepth: u32,
    /// How, above depth 1; None: io_uring, or Linux AIO where the kernel refuses that.
    pub engine: Option<Engine>,
    /// `pread`/`pwrite` instead of `read`/`write` at depth 1. Random access always uses them.
    pub positional: bool,
    /// Past the page cache (O_DIRECT).
    pub direct: bool,
    /// When it ends.
    pub limit: Limit,
    /// Bytes into the file where it starts.
    pub offset: u64,
    /// Bytes from there that it stays within; None: up to the end. Sequential access starts again
    /// at `offset` when it has come to the end.
    pub length: Option<u64>,
    /// A delay in alternate operations (the second, the fourth, ...), after the operation's first
    /// stamp and before its call.
    pub inject: Option<Duration>,
    /// Start of the random offsets; the same seed gives the same offsets.
    pub seed: u64,
    /// Operations whose stamps find room when the limit is a time; None: 2 Mi (64 MiB).
    pub room: Option<u64>,
}

impl Options {
    /// The wiki's benchmark on this file, 10,000 operations.
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

    /// Sets when it ends.
    #[must_use]
    pub fn with_limit(mut self, limit: Limit) -> Options {
        self.limit = limit;
        self
    }

    /// Sets the pattern.
    #[must_use]
    pub fn with_rw(mut self, rw: Rw) -> Options {
        self.rw = rw;
        self
    }

    /// Sets the operations in flight.
    #[must_use]
    pub fn with_iodepth(mut self, iodepth: u32) -> Options {
        self.iodepth = iodepth;
        self
    }

    /// The system call of depth 1.
    pub(super) fn is_positional(&self) -> bool {
        self.positional || self.rw.is_random()
    }

    /// Operations whose stamps are kept.
    pub(super) fn room(&self) -> u64 {
        match self.limit {
            Limit::Operations(count) => count,
            Limit::Time(_) => self.room.unwrap_or(DEFAULT_ROOM),
        }
    }

    /// Refuses what cannot be done whatever the file is.
    ///
    /// # Errors
    /// What it is, in one line.
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

    /// The same as a load on `blocks`; whoever runs it watches over time and errors.
    pub(super) fn load(&self) -> Load {
        Load {
            rw: self.rw,
            // Checked: at most 64 MiB, and 1024 in flight.
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
