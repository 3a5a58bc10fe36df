//! QEMU's own trace events: which to ask for, and what QEMU leaves behind as a stream.
//!
//! - [`collector`]: enables events while a round runs and turns QEMU's log into the round's
//!   stream.
//! - [`log`]: the `log` backend's text, which distributions build.
//! - [`simple`]: the `simple` backend's binary files, with the build's [`schema`].
//! - [`import()`]: a file of either, as a run directory of its own.
//!
//! Events become [`fathom_run::Kind::Qemu`]. Which events stand for those of the KVM wiki is in
//! [`fathom_run::qemu_names`]. A log costs QEMU two system calls an event, so it is a round of its
//! own.

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

/// What became of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Converted {
    /// Events in the stream.
    pub events: u64,
    /// Events that are known to be missing.
    pub lost: u64,
    /// For the run's problems, a line each.
    pub problems: Vec<String>,
}

/// Arguments of [`fathom_run::Kind::Qemu`].
const WIDTH: usize = 7;

fn unusable(path: &Path, reason: String) -> Error {
    Error::Unusable {
        path: path.to_owned(),
        reason,
    }
}

/// They are the only ones whose text is kept: where in QEMU's source a lock is taken.
fn is_mutex_event(name: &str) -> bool {
    matches!(
        name,
        "qemu_mutex_lock" | "qemu_mutex_locked" | "qemu_mutex_unlock"
    )
}

/// How many numbers an event that reports rely on has, by QEMU's version; None for the others.
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
