//! What the benchmark is asked to do.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use crate::error::{Error, Result};

/// Direct I/O wants offsets and sizes in units of a device's sector; this is the smallest.
pub(super) const SECTOR: u64 = 512;
/// More than any disk has tags for.
const MAX_DEPTH: u32 = 4096;
/// One operation's buffer.
const MAX_BLOCK: u64 = 64 << 20;
/// All buffers together.
const MAX_BUFFERS: u64 = 1 << 30;
/// Stamps of this many operations fit into 64 MiB: a guest has little memory.
const DEFAULT_ROOM: u64 = 2 << 20;
const MAX_ROOM: u64 = 64 << 20;

/// The pattern, in fio's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rw {
    /// Reads one after another.
    Read,
    /// Writes one after another.
    Write,
    /// Reads anywhere.
    RandRead,
    /// Writes anywhere.
    RandWrite,
}

impl Rw {
    /// All of them.
    pub const ALL: [Rw; 4] = [Rw::Read, Rw::Write, Rw::RandRead, Rw::RandWrite];

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Rw::Read => "read",
            Rw::Write => "write",
            Rw::RandRead => "randread",
            Rw::RandWrite => "randwrite",
        }
    }

    /// Whether it changes the file.
    pub fn is_write(self) -> bool {
        matches!(self, Rw::Write | Rw::RandWrite)
    }

    /// Whether it jumps.
    pub fn is_random(self) -> bool {
        matches!(self, Rw::RandRead | Rw::RandWrite)
    }
}

impl fmt::Display for Rw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Rw {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Rw, String> {
        Rw::ALL
            .into_iter()
            .find(|rw| rw.name() == text)
            .ok_or_else(|| format!("'{text}' is none of read, write, randread, randwrite"))
    }
}

/// How several operations are kept in flight (at depth 1 plain calls are made instead).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// io_uring, or Linux AIO where io_uring is not permitted.
    #[default]
    Auto,
    /// io_uring.
    IoUring,
    /// Linux AIO; needs direct I/O to be asynchronous.
    Aio,
}

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
    /// How, above depth 1.
    pub engine: Engine,
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
            engine: Engine::Auto,
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

    /// What can be said without the file.
    pub(crate) fn check(&self) -> Result<()> {
        let sized = |n: u64| n.is_multiple_of(SECTOR);
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
        if self.iodepth > 1 && self.engine == Engine::Aio && !self.direct {
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

    pub(super) fn bad<T>(&self, reason: String) -> Result<T> {
        Err(bad(&self.path, reason))
    }
}

pub(super) fn bad(path: &Path, reason: String) -> Error {
    Error::Unusable {
        path: path.to_owned(),
        reason,
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
    fn patterns_are_read_as_they_are_named() {
        for rw in Rw::ALL {
            assert_eq!(rw.to_string().parse(), Ok(rw));
        }
        assert!("trim".parse::<Rw>().unwrap_err().contains("none of read"));
    }

    #[test]
    fn what_cannot_be_done_is_said() {
        Options::new("/dev/null").check().unwrap();
        assert!(refusal(|o| o.block_size = 0).contains("block size"));
        assert!(refusal(|o| o.block_size = 1000).contains("multiples of 512"));
        assert!(refusal(|o| o.offset = 7).contains("multiples of 512"));
        assert!(refusal(|o| o.iodepth = 0).contains("1 to 4096"));
        assert!(refusal(|o| (o.iodepth, o.block_size) = (4096, 1 << 20)).contains("1G"));
        assert!(refusal(|o| o.limit = Limit::Operations(0)).contains("0 operations"));
        assert!(refusal(|o| o.limit = Limit::Time(Duration::ZERO)).contains("no time"));
        let buffered_aio = |o: &mut Options| {
            (o.direct, o.engine, o.iodepth) = (false, Engine::Aio, 2);
        };
        assert!(refusal(buffered_aio).contains("use io_uring"));
    }
}
