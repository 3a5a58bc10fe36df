//! Moves a disk from another server to this one. The disk is copied while its guest runs there,
//! and changes are copied again. When the guest arrives here, this server takes the disk over.
//! The guest waits until all data is here.
//!
//! - `terms` are the parameters and the status;
//! - `record` is the persistent state;
//! - `source` is the other server, which also reports changes;
//! - `puller` is the thread, which retries after failures, and `post_copy` its variant for guests
//!   that do not wait;
//! - `handle` starts and controls the pull, and `shared` is the state that both share.
//!
//! No interruption loses data. Until the takeover the other server has the disk, and an
//! interrupted copy starts again. Between the takeover and the durable `record` of the complete
//! copy, only the puller changes the copy, so it can start again then, too. The guest resumes only
//! after that. With post-copy the guest resumes earlier; see `post_copy`.

mod handle;
mod post_copy;
mod puller;
mod record;
mod shared;
mod source;
mod terms;

pub use handle::{Going, Gone, Prepared, Pull};
pub use puller::Target;
pub use record::is_unfinished;
pub use terms::{Phase, Status, Terms};
