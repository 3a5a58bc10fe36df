//! Disks, and each worker's channel to its disk.

use crate::cx::Cx;
use crate::keepsake::Keepsake;
use crate::request::{Request, RequestId};
use fathom_units::cause;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// What a disk is like. All sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskInfo {
    /// A multiple of 512.
    pub size: u64,
    /// The unit in which the guest should address the disk (logical block).
    pub block_size: u32,
    /// The unit that the storage writes in one piece; a power of two times
    /// `block_size`.
    pub physical_block_size: u32,
    /// Preferred size of I/O, or 0.
    pub optimal_io_size: u32,
    pub read_only: bool,
    /// Completed writes may be volatile until a flush.
    pub write_cache: bool,
    /// None: the disk cannot discard.
    pub discard: Option<RangeLimits>,
    /// None: the disk cannot write zeroes by itself.
    pub write_zeroes: Option<RangeLimits>,
}

/// Limits of an operation on ranges without data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeLimits {
    /// Ranges aligned to this are handled best (bytes, at least 512).
    pub alignment: u32,
    /// The longest range in one request.
    pub max_len: u64,
}

/// Why a disk could not be opened or activated; one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    #[error("{}: {what}: {}", path.display(), cause(source))]
    Io {
        path: PathBuf,
        what: &'static str,
        source: io::Error,
    },
    #[error("{}: {problem}", path.display())]
    Unusable { path: PathBuf, problem: String },
    /// Something that was asked of it, which it does not do.
    #[error("{0}")]
    Refused(String),
}

/// What a disk's size is to become.
pub struct Resize<'a> {
    /// In bytes, a multiple of 512; none: what its file has by now.
    pub size: Option<u64>,
    /// It may become smaller: what is behind its new end is lost.
    pub shrink: bool,
    /// Waits for the end of all requests that the disk has taken on by now. An error: they do not
    /// end.
    pub settle: &'a dyn Fn() -> Result<(), DiskError>,
}

impl Resize<'_> {
    /// The size that is asked for, of a disk that has `now` bytes; none is. Refuses what no disk
    /// can have, and a loss that was not agreed to.
    pub fn wanted(&self, now: u64) -> Result<Option<u64>, DiskError> {
        let problem = match self.size {
            Some(0) => "a disk needs at least 512 bytes".into(),
            Some(size) if size > i64::MAX as u64 => {
                format!("{size} bytes exceed the largest size of a disk")
            }
            Some(size) if !size.is_multiple_of(512) => {
                format!("{size} bytes are not a multiple of 512")
            }
            Some(size) if size < now && !self.shrink => format!(
                "the disk would shrink from {now} to {size} bytes, and lose the data beyond; add \
                 --shrink if that data is not needed"
            ),
            size => return Ok(size),
        };
        Err(DiskError::Refused(problem))
    }

    /// Likewise, for disks that are in no file.
    pub fn named(&self, now: u64) -> Result<u64, DiskError> {
        let problem = "no size given, which only disks in files can do without";
        let wanted = self.wanted(now)?;
        wanted.ok_or_else(|| DiskError::Refused(problem.into()))
    }
}

/// Called on any thread, and does not wait.
pub type SizeWatch = Arc<dyn Fn() + Send + Sync>;

/// What a guest sees as its disk; shared by all workers. Nothing here is on
/// the way of a request.
pub trait Disk: Send + Sync {
    fn info(&self) -> DiskInfo;

    /// Bytes, a multiple of 8, that it wants of a [`Keepsake`]; 0: it needs none. It gets none if it wants more than
    /// [`KEEPSAKE_ROOM`](crate::KEEPSAKE_ROOM).
    fn keepsake_len(&self) -> u64 {
        0
    }

    /// Before `activate`: the memory to use until `deactivate`. It holds what a
    /// process that was killed has left there, or zeroes.
    fn keep(&self, _keepsake: Option<Keepsake>) {}

    /// How long a client that has just connected is to wait before it is
    /// served. The exporter sees to it.
    fn connect_delay(&self) -> Duration {
        Duration::ZERO
    }

    /// The first queue starts: lock the image, read its metadata. May block.
    /// On failure the disk is as before.
    fn activate(&self) -> Result<(), DiskError>;

    /// The last queue has stopped and is drained: write back, flush, forget,
    /// unlock. May block.
    fn deactivate(&self) -> Result<(), DiskError>;

    /// Gives the disk another size while it is in use, or at least activated if `to` says which;
    /// returns what it has then. May block, and requests go on meanwhile. What is new reads as
    /// zeroes; requests behind the new end fail from some instant on. On failure its size is as
    /// before, or as asked for if only its durability is in doubt.
    fn resize(&self, _to: &Resize) -> Result<u64, DiskError> {
        let problem = "only disks in files and in memory can be resized";
        Err(DiskError::Refused(problem.into()))
    }

    /// Have it told when somebody else may have given its storage another size, which
    /// [`resize`](Disk::resize) takes in then. Once at most; not all disks can tell.
    fn watch_size(&self, _watch: SizeWatch) {}

    /// One worker's way to the disk; called on that worker's thread.
    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError>;
}

/// Owned by one worker. Never blocks, except for storage that does not wait
/// on a device (memory, a file in tmpfs).
pub trait Channel {
    /// Start the request. It is in [`Stage::Queue`](crate::Stage::Queue);
    /// whoever takes it on moves it to `Map` and `Device`. Ends, now or
    /// later, in exactly one `cx.complete(id, errno)`.
    fn submit(&mut self, cx: &mut Cx, id: RequestId);

    /// An operation pushed with `Token::request(id, tag)` has completed with
    /// `result` (bytes or negative errno); one pushed with
    /// `Token::channel(tag)` has [`RequestId::NOBODY`] for `id`.
    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32);

    /// The time asked for by [`Cx::wake_at`] has come, or another thread has
    /// changed something that the channel goes by ([`WorkerHandle::look`]):
    /// go on with what is due. What was asked for before, by `wake_at` and
    /// [`Cx::close`], is forgotten; what still holds is said again.
    ///
    /// [`WorkerHandle::look`]: crate::WorkerHandle::look
    fn timer(&mut self, _cx: &mut Cx) {}

    /// A source is leaving: whatever is held back of its requests goes on now,
    /// or fails, and nothing of it is held back from now on
    /// ([`Cx::may_wait`]). I/O under way just goes on.
    fn drain(&mut self, _cx: &mut Cx, _source: u16) {}

    /// The request has been answered, and its stamps are complete. Only for
    /// channels that have asked for it by [`Cx::watch_answers`].
    fn answered(&mut self, _request: &Request) {}
}
