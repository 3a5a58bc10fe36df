//! Reads pages from an instance's buffers: all at once after tracing, or continuously in a thread.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::format::Layout;
use super::pages::CpuPages;
use crate::error::{Context, Error, Result};
use crate::tracers::tracefs::Instance;

/// Interval between two reads of the thread. A buffer must hold the events of this time.
const PAUSE: Duration = Duration::from_millis(10);
/// Maximum memory of a recording in bytes.
const MEMORY: usize = 1 << 30;

/// The buffers of an instance, open for reading.
#[derive(Debug)]
pub(super) struct Buffers {
    files: Vec<File>,
    pages: Vec<CpuPages>,
    layout: Layout,
    room: usize,
}

impl Buffers {
    pub(super) fn open(instance: &Instance, layout: Layout) -> Result<Buffers> {
        let cpus = instance.cpus();
        let files: Result<Vec<File>> = cpus.iter().map(|&cpu| instance.raw(cpu)).collect();
        Ok(Buffers {
            files: files?,
            pages: cpus.into_iter().map(CpuPages::new).collect(),
            layout,
            room: MEMORY,
        })
    }

    /// Reads all available pages and returns the number of bytes from the fullest buffer. Returns
    /// `None` if the memory limit is reached; unread events then stay in the kernel, which counts
    /// the lost ones.
    pub(super) fn read(&mut self) -> Result<Option<usize>> {
        let mut most = 0;
        let mut page = vec![0; self.layout.page];
        for (file, pages) in self.files.iter_mut().zip(&mut self.pages) {
            let before = pages.len();
            while take(file, &mut page)? {
                let length = pages.len();
                pages.push(&page, &self.layout);
                let Some(room) = self.room.checked_sub(pages.len() - length) else {
                    return Ok(None);
                };
                self.room = room;
            }
            most = most.max(pages.len() - before);
        }
        Ok(Some(most))
    }

    pub(super) fn into_pages(self) -> Vec<CpuPages> {
        self.pages
    }
}

/// Reads one page. If the buffer has the size of a page, the kernel returns whole pages, including
/// the used part of the page that is being written.
fn take(file: &mut File, page: &mut [u8]) -> Result<bool> {
    loop {
        match file.read(page) {
            Ok(0) => return Ok(false),
            Ok(read) => {
                page[read..].fill(0);
                return Ok(true);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(source) => {
                let what = "cannot read the trace buffer".into();
                return Err(Error::Io { what, source });
            }
        }
    }
}

/// A thread that empties the buffers.
#[derive(Debug)]
pub(super) struct Drain {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Buffers>>,
}

impl Drain {
    /// Starts the thread for buffers of `kib_per_cpu` KiB per CPU.
    pub(super) fn start(mut buffers: Buffers, kib_per_cpu: u32) -> Result<Drain> {
        // If one read returns more bytes than this, the next read follows without a pause.
        let busy = kib_per_cpu as usize * 1024 / 8;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let body = move || {
            loop {
                // The buffers are read once more after the stop request.
                let last = stopped.load(Ordering::Acquire);
                match buffers.read()? {
                    None => return Ok(buffers),
                    Some(_) if last => return Ok(buffers),
                    Some(read) if read > busy => {}
                    Some(_) => std::thread::sleep(PAUSE),
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("trace drain".into())
            .spawn(body)
            .context(|| "cannot start a thread".into())?;
        Ok(Drain { stop, thread })
    }

    /// Stops the thread and returns everything. Tracing must be off already.
    pub(super) fn finish(self) -> Result<Buffers> {
        self.stop.store(true, Ordering::Release);
        let done = self.thread.join();
        done.unwrap_or_else(|_| Err(Error::Protocol("the reader of the trace failed".into())))
    }
}
