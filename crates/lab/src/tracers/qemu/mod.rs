//! QEMU's own trace events: selects the events to record and converts QEMU's output to a stream.
//!
//! - [`collector`]: enables events while a round runs and converts QEMU's log to the round's
//!   stream.
//! - [`log`]: the text of the `log` backend, which distributions build.
//! - [`simple`]: the binary files of the `simple` backend, with the build's [`schema`].
//! - [`import()`]: a file of either backend, as a run directory of its own.
//!
//! Events become [`fathom_run::Kind::Qemu`]. [`fathom_run::qemu_names`] lists the events that
//! replace those of the KVM wiki. Each logged event costs QEMU two system calls, so the log has its
//! own round.

pub mod collector;
mod import;
mod line;
pub mod log;
mod order;
pub mod schema;
pub mod simple;
mod strings;
#[cfg(test)]
mod tests;

use std::path::Path;

pub use collector::Collector;
pub use import::import;
pub use line::{Line, LogEvent, parse as parse_line};

use crate::error::Error;

/// Result of converting a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Converted {
    /// Number of events in the stream.
    pub events: u64,
    /// Number of events that are known to be missing.
    pub lost: u64,
    /// Lines for the run's problems.
    pub problems: Vec<String>,
}

/// Number of arguments of [`fathom_run::Kind::Qemu`].
const WIDTH: usize = 7;

fn unusable(path: &Path, reason: String) -> Error {
    Error::Unusable {
        path: path.to_owned(),
        reason,
    }
}

/// Returns whether this is a mutex event. Only these keep a text: the source file that takes the
/// lock.
fn is_mutex_event(name: &str) -> bool {
    matches!(
        name,
        "qemu_mutex_lock" | "qemu_mutex_locked" | "qemu_mutex_unlock"
    )
}

/// Returns the possible counts of numbers in an event that reports rely on, depending on QEMU's
/// version. Returns `None` for other events.
fn expected_numbers(name: &str) -> Option<&'static [usize]> {
    Some(match name {
        "virtio_notify" | "virtio_notify_irqfd" | "virtio_notify_irqfd_deferred_fn" => &[2],
        "luring_cqe_handler" => &[2],
        "virtio_queue_notify" | "virtio_blk_rw_complete" | "virtio_blk_req_complete" => &[3],
        "thread_pool_submit" | "thread_pool_submit_aio" | "luring_process_completion" => &[3],
        "virtqueue_pop" | "virtio_blk_handle_read" | "virtio_blk_handle_write" => &[4],
        "thread_pool_complete" | "thread_pool_complete_aio" => &[4],
        "luring_co_submit" => &[6, 7],
        _ => return None,
    })
}
