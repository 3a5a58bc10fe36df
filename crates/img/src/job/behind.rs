//! Has the kernel write to the disk while a job goes on. By itself it would begin when a tenth of
//! the memory is dirty, and the flush in the end would wait for all of it.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

/// Bytes between two starts.
const STEP: u64 = 16 << 20;

/// A thread that starts the writing of a file's dirty pages: to start it may block.
pub(crate) struct WriteBehind {
    due: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
    written: u64,
}

impl WriteBehind {
    /// Without a thread it does nothing: what is written becomes durable in the end anyway.
    pub(crate) fn new(file: Option<File>) -> WriteBehind {
        let (due, is_due) = sync_channel(1);
        let body = |file: File| {
            move || {
                for () in is_due {
                    // SAFETY: the file is open; the call takes no pointers. It is advice.
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

    /// So many bytes more were written.
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
