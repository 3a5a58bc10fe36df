//! This server's cage: which kind of thread is shut in how.

use fathom_core::ThreadKind;
use fathom_sandbox::{Kind, Mode};

/// Shut this process in, before it has threads that matter, and each thread as it starts.
pub fn enter(mode: Mode) {
    let report = fathom_sandbox::cage_server(mode);
    if mode != Mode::Off {
        fathom_core::at_thread_start(|kind| fathom_sandbox::enter(kind_of(kind)));
    }
    for part in report.parts.iter().filter(|part| !part.in_force) {
        tracing::warn!(
            "--sandbox {mode}: not in force: {}: {}",
            part.name,
            part.why
        );
    }
}

fn kind_of(kind: ThreadKind) -> Kind {
    match kind {
        ThreadKind::General => Kind::General,
        ThreadKind::Worker => Kind::Worker,
        ThreadKind::Io => Kind::Io,
        ThreadKind::Session => Kind::Session,
        ThreadKind::NbdListener => Kind::NbdListener,
        ThreadKind::NbdConnection => Kind::NbdConnection,
        ThreadKind::Helper => Kind::Helper,
        ThreadKind::Log => Kind::Log,
        ThreadKind::Watch => Kind::Watch,
    }
}
