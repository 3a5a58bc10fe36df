//! Sends replies when the disk has completed requests.

use super::source::Completed;
use super::state::Shared;
use fathom_core::{ThreadKind, thread_starts};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::{Builder, JoinHandle};

/// Starts the reply thread, which ends when the source has been dropped.
pub(super) fn start(
    shared: Arc<Shared>,
    completed: Receiver<Completed>,
) -> io::Result<JoinHandle<()>> {
    let builder = Builder::new().name("fuse replies".into());
    builder.spawn(move || {
        thread_starts(ThreadKind::Fuse);
        for (task, errno) in completed {
            shared.completed(task, errno);
        }
    })
}
