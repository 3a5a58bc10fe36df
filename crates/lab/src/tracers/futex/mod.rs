//! Records waits for locks: only the threads' futex calls, which costs less than all their system
//! calls. The events are those of [`syscalls`](super::syscalls), which also contain the futex
//! calls.

use super::Tracefs;
use super::syscalls::{self, Syscalls};
use crate::error::Result;

pub use super::syscalls::Options;

/// Name of the event file and of the collector in a round's list.
pub const NAME: &str = "futex";

/// futex, futex_waitv, futex_wake, futex_wait and futex_requeue on x86-64. QEMU and Fathom use the
/// first; a newer C library may use the others.
const NUMBERS: &[u64] = &[202, 449, 454, 455, 456];

/// Starts to record the threads' futex calls. The arguments of the entries are address, operation,
/// value and timeout.
///
/// # Errors
/// When the kernel cannot trace system calls, or a thread belongs to this process.
pub fn start(tracefs: &Tracefs, options: &Options) -> Result<Syscalls> {
    syscalls::start_some(tracefs, NAME, options, NUMBERS)
}
