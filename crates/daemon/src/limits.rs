//! Resource limits.

use fathom_units::cause;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Makes a write beyond the limit of the file size fail with EFBIG, which is handled like a full
/// disk. By default, SIGXFSZ would end the process with all its disks.
pub fn survive_size_limit() {
    // SAFETY: the signal is ignored, so that no handler runs, and no memory is passed.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Raises soft limits, which are low for the sake of interactive programs, to the hard limits. Each
/// queue of each disk needs file descriptors, and memory that is registered with io_uring counts as
/// locked.
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
