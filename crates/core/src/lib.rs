//! Requests, disks, channels, sources and the worker loop.
//!
//! A [`Source`] (for example a virtqueue) pops a request. The [`Worker`](worker::Worker) submits
//! the request to its [`Channel`] of the [`Disk`]. The channel does the I/O through the worker's
//! [`Engine`], and the source sends the reply. `worker.rs` follows the same order.
//!
//! # Rules of the hot path
//!
//! Once its queues are attached, a worker allocates no memory, takes no lock, formats no text, and
//! waits only in [`Engine::submit`]. Locks are necessary only where other threads do a part of the
//! work. The slab, the batch and the buffer of completions grow when a source attaches. A single
//! system call of the engine submits and reaps the requests of a turn. A request has a system call
//! of its own only if its storage has the data in memory.
//!
//! [`Source::pop`] fills a batch instead of returning one request. A batch therefore costs one
//! dynamic call, and a virtqueue reads its avail index once.

mod aligned_buffer;
pub mod blocks;
pub mod changes;
mod counters;
pub mod cx;
mod dedicated;
pub mod disk;
pub mod engine;
pub mod event_notifier;
pub mod extents;
pub mod handle;
mod handover_state;
mod kind;
mod layer;
mod mailbox;
mod oldest;
pub mod peer_event;
pub mod polling;
pub mod pool;
mod pooled;
pub mod request;
pub mod saved_state;
mod seat;
pub mod segments;
mod settle;
mod shared_engine;
mod slot;
pub mod source;
#[cfg(feature = "testing")]
pub mod testing;
mod thread;
pub mod token;
pub mod worker;
mod zero;

pub use aligned_buffer::AlignedBuffer;
pub use changes::Changes;
pub use counters::{BATCH_SIZES, Counter, Counters, SourceCounters};
pub use cx::{Completed, Cx, Mark};
pub use disk::{Channel, Disk, DiskError, DiskInfo, RangeLimits, Resize, SizeWatch};
pub use engine::{Buffer, Completion, Engine, FileId, Io, IoKind, SocketIo, SocketIoKind, Wait};
pub use event_notifier::EventNotifier;
pub use extents::{Extents, Status};
pub use fathom_trace::{Clock, Op, Stage, Stamps, Summary, Wire};
pub use handle::{Detaching, Looking, Settling, Unresponsive, WorkerHandle};
pub use handover_state::{HandoverState, Part, PartState, Parts};
pub use kind::{ThreadKind, at_thread_start, thread_starts};
pub use layer::{ChannelLayer, DiskLayer, SourceLayer};
pub use oldest::Oldest;
pub use polling::Polling;
pub use pool::Pool;
pub use request::{Owner, Request, RequestId, Segments, Slab};
pub use saved_state::{SAVED_STATE_ROOM, SavedState};
pub use source::{Broken, Eventfd, Source, SourceId, WrapSource};
pub use thread::{ThreadId, WorkerOptions};
pub use token::Token;
pub use zero::is_zero;
