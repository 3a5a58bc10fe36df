//! Starts write-back of a file's dirty pages during a job. On its own, the kernel starts when a
//! tenth of the memory is dirty, and the final flush would wait for all of it.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

/// Number of bytes written between two starts of write-back.
const STEP: u64 = 16 << 20;

/// A thread that starts write-back of a file's dirty pages, because starting it may block.
pub(crate) struct WriteBehind {
    due: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
    written: u64,
}

impl WriteBehind {
    /// Starts the thread. Without a file or a thread, `add` has no effect: the final flush makes
    /// the data durable anyway.
    pub(crate) fn new(file: Option<File>) -> WriteBehind {
        let (due, is_due) = sync_channel(1);
        let body = |file: File| {
            move || {
                for () in is_due {
                    // SAFETY: the descriptor is open during the call, and the call takes no
                    // pointers. The result is ignored, because write-back is only an optimization.
                    unsafe {
                        libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE)
                    };
                }
            }
        };
        let thread = file.and_then(|file| {
            let named = std::thread::Builder::new().name("write behind".into());
            named.spawn(body(file)).ok()
        });
        WriteBehind {
            due: thread.is_some().then_some(due),
            thread,
            written: 0,
        }
    }

    /// Counts written bytes, and wakes the thread after every [`STEP`] bytes.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.written += bytes;
        if self.written < STEP {
            return;
        }
        self.written = 0;
        if let Some(due) = &self.due {
            match due.try_send(()) {
                Ok(()) | Err(TrySendError::Full(())) => {}
                Err(TrySendError::Disconnected(())) => self.due = None,
            }
        }
    }
}

impl Drop for WriteBehind {
    fn drop(&mut self) {
        self.due = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
