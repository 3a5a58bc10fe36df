//! Resource limits.

use fathom_units::cause;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Have a write beyond the limit of a file's size fail (EFBIG), like one to a
/// full disk. The signal of it would end the process, with all its disks.
pub fn survive_size_limit() {
    // SAFETY: no handler, and no memory.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Raise what is limited for the sake of interactive programs to what may be
/// had: each queue of each disk takes descriptors, and memory registered with
/// io_uring counts as locked.
pub fn raise() {
    for (resource, name) in [
        (Resource::Nofile, "open files"),
        (Resource::Memlock, "locked memory"),
    ] {
        let limit = getrlimit(resource);
        let raised = Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        };
        if let Err(error) = setrlimit(resource, raised) {
            tracing::debug!("cannot raise the limit of {name}: {}", cause(error));
        }
    }
}
