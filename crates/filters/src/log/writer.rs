//! The thread that writes the log, so that no worker waits for a file.

use super::line::{Format, Record};
use fathom_core::{ThreadKind, thread_starts};
use fathom_units::cause;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Write, pipe, stderr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Capacity of the queue in requests; further requests are counted and dropped.
const ROOM: usize = 1 << 16;

/// Time to wait for an output that accepts no data, such as a pipe that no process reads.
const PATIENCE: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(10);

/// Number of bytes that are written at once.
const PIECE: usize = 64 << 10;

pub(super) struct Output {
    to: Box<dyn Write + Send>,
    format: Format,
}

impl Output {
    /// Creates an output to `file`; none for standard error.
    pub(super) fn new(file: Option<File>, format: Format) -> Output {
        let to: Box<dyn Write + Send> = match file {
            Some(file) => Box::new(file),
            None => Box::new(stderr()),
        };
        Output { to, format }
    }
}

enum Message {
    Record(Record),
    Switch(Output),
    End,
}

pub(super) struct Writer {
    queue: Queue,
    thread: JoinHandle<()>,
    /// Hangs up when the thread ends, because the thread owns the other end.
    end: PipeReader,
    /// Set when this writer must not wait for another writer's end any more.
    is_over: Arc<AtomicBool>,
}

/// A worker's connection to the writer.
#[derive(Clone)]
pub(super) struct Queue {
    messages: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

impl Queue {
    pub(super) fn put(&self, record: Record) {
        if self.messages.try_send(Message::Record(record)).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Sends a message. Returns whether there was room before the deadline.
    fn insist(&self, mut message: Message, deadline: Instant) -> bool {
        loop {
            message = match self.messages.try_send(message) {
                Ok(()) => return true,
                Err(TrySendError::Full(message)) if Instant::now() < deadline => message,
                Err(_) => return false,
            };
            std::thread::sleep(POLL);
        }
    }
}

impl Writer {
    /// Starts a writer. The writer writes nothing before the end of `after`, another writer's [end
    /// event](Self::end_event).
    pub(super) fn start(output: Output, after: Option<OwnedFd>) -> io::Result<Writer> {
        let (messages, received) = sync_channel(ROOM);
        let (dropped, is_over) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let (end, alive) = pipe()?;
        let body = Body {
            received,
            dropped: dropped.clone(),
            output,
            text: String::new(),
        };
        let thread = std::thread::Builder::new().name("log".into());
        let gives_up = is_over.clone();
        Ok(Writer {
            queue: Queue { messages, dropped },
            thread: thread.spawn(move || {
                thread_starts(ThreadKind::Log);
                let _alive: PipeWriter = alive;
                if let Some(other) = after {
                    wait_for_end(&other, &gives_up);
                }
                body.run();
            })?,
            end,
            is_over,
        })
    }

    /// Returns a descriptor that hangs up when this writer has written its whole queue and ended.
    pub(super) fn end_event(&self) -> io::Result<OwnedFd> {
        self.end.try_clone().map(OwnedFd::from)
    }

    /// Writes the queue until the deadline, and ends the thread.
    pub(super) fn end(&self, deadline: Instant) {
        self.is_over.store(true, Ordering::Relaxed);
        self.queue.insist(Message::End, deadline);
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
    }

    pub(super) fn queue(&self) -> Queue {
        self.queue.clone()
    }

    /// Changes the output. Returns whether the writer will use it.
    pub(super) fn switch(&self, output: Output) -> bool {
        let deadline = Instant::now() + PATIENCE;
        self.queue.insist(Message::Switch(output), deadline)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.end(Instant::now() + PATIENCE);
    }
}

/// Waits until the other writer ends, or until this one is ordered to end.
fn wait_for_end(other: &OwnedFd, gives_up: &AtomicBool) {
    let pause = Timespec::try_from(POLL).ok();
    // A failed poll is repeated.
    let is_there = || {
        poll(
            &mut [PollFd::new(other, PollFlags::empty())],
            pause.as_ref(),
        ) != Ok(1)
    };
    while !gives_up.load(Ordering::Relaxed) && is_there() {}
}

struct Body {
    received: Receiver<Message>,
    dropped: Arc<AtomicU64>,
    output: Output,
    /// Text that is not written yet.
    text: String,
}

impl Body {
    fn run(mut self) {
        loop {
            let message = match self.received.try_recv() {
                Err(TryRecvError::Empty) => {
                    self.flush();
                    self.received.recv().ok()
                }
                other => other.ok(),
            };
            match message {
                Some(Message::Record(record)) => record.write(self.output.format, &mut self.text),
                Some(Message::Switch(output)) => {
                    self.flush();
                    self.output = output;
                }
                Some(Message::End) | None => return self.flush(),
            }
            if self.text.len() >= PIECE {
                self.flush();
            }
        }
    }

    fn flush(&mut self) {
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            self.text += &match self.output.format {
                Format::Line => format!(
                    "({dropped} requests are missing, because the log was written too slowly)\n"
                ),
                Format::Json => format!("{{\"lost\":{dropped}}}\n"),
            };
        }
        if self.text.is_empty() {
            return;
        }
        if let Err(error) = self.output.to.write_all(self.text.as_bytes()) {
            tracing::warn!(
                "log: {} bytes could not be written and are lost: {}",
                self.text.len(),
                cause(error)
            );
        }
        self.text.clear();
    }
}
