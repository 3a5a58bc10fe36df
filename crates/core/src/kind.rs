//! What each thread is there for, told to whoever wants to know it at the thread's start.

use std::sync::OnceLock;

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// Everything around the disks: opens files, knows names, has clients of its own.
    General,
    /// Requests.
    Worker,
    /// Blocking I/O for a worker.
    Io,
    /// The messages of a virtual machine.
    Session,
    /// Accepts NBD clients.
    NbdListener,
    /// An NBD client's handshake.
    NbdConnection,
    /// Computes for workers.
    Helper,
    /// Writes a log.
    Log,
    /// Wakes others up.
    Watch,
}

static AT_START: OnceLock<fn(ThreadKind)> = OnceLock::new();

/// Have `hook` called by each thread that starts from now on, once it has what only a beginning thread
/// makes. The first hook stays.
pub fn at_thread_start(hook: fn(ThreadKind)) {
    let _ = AT_START.set(hook);
}

/// This thread is one of that kind: for whoever starts one. False: there is no hook yet.
pub fn thread_starts(kind: ThreadKind) -> bool {
    let hook = AT_START.get();
    hook.is_some_and(|hook| {
        hook(kind);
        true
    })
}
