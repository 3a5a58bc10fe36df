//! The kind of each thread, reported to a hook when the thread starts.

use std::sync::OnceLock;

/// The task of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// General tasks besides the disks: opens files, resolves names, talks to API clients.
    General,
    /// Moves requests.
    Worker,
    /// Does blocking I/O for a worker.
    Io,
    /// Handles the vhost-user messages of a virtual machine.
    Session,
    /// Accepts NBD clients.
    NbdListener,
    /// Handles an NBD client's handshake.
    NbdConnection,
    /// Serves a file by FUSE.
    Fuse,
    /// Does CPU-bound work for workers.
    Helper,
    /// Writes a log.
    Log,
    /// Watches other threads and wakes them up.
    Watch,
}

static AT_START: OnceLock<fn(ThreadKind)> = OnceLock::new();

/// Sets a hook that each thread calls from now on when it starts, after its own initialisation. If
/// a hook is already set, it stays.
pub fn at_thread_start(hook: fn(ThreadKind)) {
    let _ = AT_START.set(hook);
}

/// Reports the kind of this thread, which has just started. Returns false if there is no hook yet.
pub fn thread_starts(kind: ThreadKind) -> bool {
    let hook = AT_START.get();
    hook.is_some_and(|hook| {
        hook(kind);
        true
    })
}
