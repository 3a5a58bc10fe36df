//! Resource limits.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

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
            tracing::debug!("cannot raise the limit of {name}: {error}");
        }
    }
}
