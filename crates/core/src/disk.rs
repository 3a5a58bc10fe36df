//! Disks, and each worker's channel to a disk.

use crate::cx::Cx;
use crate::request::{Request, RequestId};
use crate::saved_state::SavedState;
use fathom_units::cause;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Properties of a disk. All sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskInfo {
    /// Size of the disk, a multiple of 512.
    pub size: u64,
    /// Logical block size: the unit in which the guest should address the disk.
    pub block_size: u32,
    /// Unit that the storage writes in one piece: `block_size` times a power of two.
    pub physical_block_size: u32,
    /// Preferred I/O size, or 0 if the disk has no preference.
    pub optimal_io_size: u32,
    /// The disk cannot be written.
    pub read_only: bool,
    /// A completed write may be volatile until the next flush.
    pub write_cache: bool,
    /// Limits of discards; none if the disk cannot discard.
    pub discard: Option<RangeLimits>,
    /// Limits of write-zeroes requests; none if the disk does not support them.
    pub write_zeroes: Option<RangeLimits>,
}

/// Limits of an operation on ranges without data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeLimits {
    /// Preferred alignment of ranges, in bytes, at least 512.
    pub alignment: u32,
    /// Maximum length of a range in one request, in bytes.
    pub max_len: u64,
}

/// Reason why an operation on a disk failed, as one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// A system call on the storage failed.
    #[error("{}: {what}: {}", path.display(), cause(source))]
    Io {
        /// Path or URI of the storage.
        path: PathBuf,
        /// Description of the failed step, such as `cannot resize the image`.
        what: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
    /// The storage cannot be used.
    #[error("{}: {problem}", path.display())]
    Unusable {
        /// Path or URI of the storage.
        path: PathBuf,
        /// Reason for the user.
        problem: String,
    },
    /// The disk does not support the requested operation.
    #[error("{0}")]
    Refused(String),
}

/// Parameters of a resize.
pub struct Resize<'a> {
    /// New size in bytes, a multiple of 512. None: the current size of the disk's file.
    pub size: Option<u64>,
    /// The disk may shrink; the data beyond its new end is lost.
    pub shrink: bool,
    /// Waits until all requests that the disk has already accepted have ended. Returns an error if
    /// they do not end.
    pub settle: &'a dyn Fn() -> Result<(), DiskError>,
}

impl Resize<'_> {
    /// Returns the requested size, if any, for a disk of `now` bytes. Fails if the size is not
    /// valid, or if the disk would shrink and `shrink` is not set.
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

    /// Like [`Resize::wanted`], for disks that are not in a file and need an explicit size.
    pub fn named(&self, now: u64) -> Result<u64, DiskError> {
        let problem = "no size given, which only disks in files can do without";
        let wanted = self.wanted(now)?;
        wanted.ok_or_else(|| DiskError::Refused(problem.into()))
    }
}

/// Callback that any thread may call; it must not wait.
pub type SizeWatch = Arc<dyn Fn() + Send + Sync>;

/// A disk as the guest sees it, shared by all workers. Requests do not pass through this trait.
pub trait Disk: Send + Sync {
    /// Returns the current properties. The size may change, see [`Disk::resize`].
    fn info(&self) -> DiskInfo;

    /// Size of the [`SavedState`] that the disk needs, in bytes, a multiple of 8; 0 if it needs
    /// none. A disk gets no saved state if it asks for more than
    /// [`SAVED_STATE_ROOM`](crate::SAVED_STATE_ROOM).
    fn saved_state_len(&self) -> u64 {
        0
    }

    /// Passes the memory to use from `activate` to `deactivate`; called before `activate`. The
    /// memory contains the state of a process that was killed, or zeroes.
    fn set_saved_state(&self, _saved_state: Option<SavedState>) {}

    /// Time for which a newly connected client waits before it is served. The exporter enforces it.
    fn connect_delay(&self) -> Duration {
        Duration::ZERO
    }

    /// Locks the image and reads its metadata, when the first queue starts. May block. On failure
    /// the disk is unchanged.
    fn activate(&self) -> Result<(), DiskError>;

    /// Writes cached data back, flushes, drops the metadata and unlocks the image, when the last
    /// queue has stopped and is drained. May block.
    fn deactivate(&self) -> Result<(), DiskError>;

    /// Changes the size of the disk and returns the new size. The disk may be in use; it must be
    /// activated only if `to` gives a size. May block, while requests continue. New space reads as
    /// zeroes. From some moment on, requests beyond the new end fail. On failure the size is
    /// unchanged, or is the requested one if only its durability is in doubt.
    fn resize(&self, _to: &Resize) -> Result<u64, DiskError> {
        let problem = "only disks in files and in memory can be resized";
        Err(DiskError::Refused(problem.into()))
    }

    /// Registers a callback for a possible change of the storage's size by another program. The
    /// caller then calls [`resize`](Disk::resize). Called at most once; not every disk can detect
    /// such a change.
    fn watch_size(&self, _watch: SizeWatch) {}

    /// Creates one worker's channel to the disk; called on that worker's thread.
    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError>;
}

/// A worker's path to the disk. A channel never blocks, except in storage that does not wait for a
/// device (memory, a file in tmpfs).
pub trait Channel {
    /// Starts a request, which is in [`Stage::Queue`](crate::Stage::Queue). The layer that accepts
    /// the request moves it to `Map` and `Device`. The request ends, now or later, in exactly one
    /// `cx.complete(id, errno)`.
    fn submit(&mut self, cx: &mut Cx, id: RequestId);

    /// Handles the completion of an operation pushed with `Token::request(id, tag)`. `result` is a
    /// number of bytes or a negative errno. For an operation pushed with `Token::channel(tag)`,
    /// `id` is [`RequestId::NOBODY`]; layers get their tags from [`Cx::new_tag`].
    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32);

    /// Continues the work that is due. Called at the time requested by [`Cx::wake_at`], and when
    /// another thread has changed something that the channel depends on ([`WorkerHandle::look`]).
    /// Earlier calls of `wake_at` and [`Cx::close`] are void; the channel repeats those that still
    /// apply.
    ///
    /// [`WorkerHandle::look`]: crate::WorkerHandle::look
    fn timer(&mut self, _cx: &mut Cx) {}

    /// Prepares for the departure of a source. The channel continues or fails the source's requests
    /// that it holds back, and holds back no further ones ([`Cx::may_wait`]). I/O in flight
    /// continues normally.
    fn drain(&mut self, _cx: &mut Cx, _source: u16) {}

    /// Receives a request after its reply, when its stamps are complete. Called only for channels
    /// that have called [`Cx::watch_answers`].
    fn answered(&mut self, _request: &Request) {}
}
