//! Waits for locks: the futex calls of threads and nothing else, which is lighter than all of
//! their system calls. The events are those of [`syscalls`](super::syscalls), so whoever reads
//! that file finds the futexes there as well.

use super::Tracefs;
use super::syscalls::{self, Syscalls};
use crate::error::Result;

pub use super::syscalls::Options;

/// The name of the file, and in a round's list.
pub const NAME: &str = "futex";

/// futex, futex_waitv, futex_wake, futex_wait and futex_requeue on x86-64. QEMU and Fathom use
/// the first; a newer C library may use the others.
const NUMBERS: &[u64] = &[202, 449, 454, 455, 456];

/// Starts to record the futex calls of the threads: address, operation, value and time-out are
/// the arguments of their entries.
///
/// # Errors
/// When the kernel does not trace system calls, or the threads are our own.
pub fn start(tracefs: &Tracefs, options: &Options) -> Result<Syscalls> {
    syscalls::start_some(tracefs, NAME, options, NUMBERS)
}
