//! I/O engines: three ways for a worker to do I/O and to sleep.

mod aio;
mod epoll;
mod files;
mod native;
mod operation;
mod pinned;
mod pool;
mod restrict;
mod ring;
mod sockets;
mod threads;
mod uring;

pub use native::Native;
pub use threads::Threads;
pub use uring::IoUring;

use fathom_core::Engine;
use fathom_units::cause;
use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Once;

/// The engine of a worker, named as in QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EngineKind {
    /// The kernel's io_uring.
    #[default]
    IoUring,
    /// Linux AIO.
    Native,
    /// A pool of threads that make blocking system calls.
    Threads,
}

impl EngineKind {
    /// All engines, the default first.
    pub const ALL: [EngineKind; 3] = [EngineKind::IoUring, EngineKind::Native, EngineKind::Threads];

    /// Returns the name of the engine, as in QEMU.
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::IoUring => "io_uring",
            EngineKind::Native => "native",
            EngineKind::Threads => "threads",
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for EngineKind {
    type Err = String;

    fn from_str(text: &str) -> Result<EngineKind, String> {
        let known = |kind: &EngineKind| kind.name() == text;
        EngineKind::ALL
            .into_iter()
            .find(known)
            .ok_or_else(|| format!("'{text}' is not io_uring, native or threads"))
    }
}

/// Number of disks that share an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Users {
    /// The worker of a single disk uses the engine alone.
    One,
    /// A pool's thread uses the engine for the workers of many disks.
    Many,
}

/// Makes an engine for the worker of one disk, on the thread that will use it.
///
/// Where io_uring is not permitted (by a container's seccomp filter or kernel.io_uring_disabled), a
/// pool of threads takes its place, with a warning.
pub fn engine(kind: EngineKind) -> io::Result<Box<dyn Engine>> {
    engine_for(kind, Users::One)
}

/// Makes an engine as [`engine`](fn@engine) does, for the workers of one or of many disks.
pub fn engine_for(kind: EngineKind, users: Users) -> io::Result<Box<dyn Engine>> {
    match kind {
        EngineKind::IoUring => match IoUring::new(users) {
            Ok(engine) => Ok(Box::new(engine)),
            Err(error) if is_forbidden(&error) => {
                static WARNED: Once = Once::new();
                WARNED.call_once(|| {
                    tracing::warn!(
                        "io_uring is not permitted here, so the disk uses threads: {}",
                        cause(error)
                    );
                });
                Ok(Box::new(Threads::new()?))
            }
            Err(error) => Err(error),
        },
        EngineKind::Native => Ok(Box::new(Native::new()?)),
        EngineKind::Threads => Ok(Box::new(Threads::new()?)),
    }
}

fn is_forbidden(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EPERM | libc::EACCES | libc::ENOSYS)
    )
}

/// The `mode` of an [`IoKind::Allocate`](fathom_core::IoKind) that discards a range of a block
/// device (BLKDISCARD). Afterwards reads of the range may return any data. fallocate(2) itself had
/// this mode before Linux 6.12.
pub const DEVICE_DISCARD: i32 =
    libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE | FALLOC_FL_NO_HIDE_STALE;

/// See linux/falloc.h.
const FALLOC_FL_NO_HIDE_STALE: i32 = 0x04;
