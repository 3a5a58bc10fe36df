//! Writes to standard error without delaying the server.
//!
//! The reader of standard error may have stopped: a journal that hangs, a pager, a suspended
//! terminal. Once the pipe is full, writers block, which must not happen to workers and to threads
//! that reply to `fathom stats`. Therefore one thread writes, and other threads queue their lines.
//! (O_NONBLOCK would apply to the open file, and so to every other process that has the file open.)
//!
//! While the reader keeps up, a thread that logs a line waits until the line is written. Lines from
//! before a crash are therefore in the log after the crash.

use crate::signals::LeftToThisThread;
use fathom_core::{ThreadKind, thread_starts};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::io::{self, Write};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tracing_subscriber::fmt::MakeWriter;

/// Maximum number of lines in the queue. Further lines are counted and dropped.
const ROOM: usize = 1024;

/// Time that a thread waits for its line to be written. After a timeout, no thread waits until the
/// reader has caught up.
const COURTESY: Duration = Duration::from_millis(100);

/// Time that the process waits for the reader when it ends.
const PATIENCE: Duration = Duration::from_secs(1);

/// The writer of this process, once it has started.
static STARTED: OnceLock<Stderr> = OnceLock::new();

/// Queues a line of another process, and never waits for the reader.
pub fn leave(line: &[u8]) {
    match STARTED.get() {
        Some(stderr) => drop(stderr.0.leave(line)),
        // (An error cannot be reported anywhere.)
        None => drop(io::stderr().write_all(line)),
    }
}

/// Queues lines, and each write is one line.
#[derive(Clone)]
pub struct Stderr(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified when a line is queued, and when lines have been written.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    lines: Vec<Vec<u8>>,
    /// Number of lines dropped after the lines in the queue.
    lost: u64,
    /// Number of lines ever queued or dropped, and number of these that are written or reported as
    /// lost.
    put: u64,
    written: u64,
    /// Whether waiting for the reader has timed out.
    is_late: bool,
}

impl Stderr {
    /// Starts the thread that writes to standard error.
    pub fn start() -> io::Result<Stderr> {
        let stderr = Stderr::to(io::stderr())?;
        // (A second call keeps the first writer.)
        let _ = STARTED.set(stderr.clone());
        Ok(stderr)
    }

    fn to(mut out: impl Write + Send + 'static) -> io::Result<Stderr> {
        let shared = Arc::<Shared>::default();
        let thread = std::thread::Builder::new().name("stderr".into());
        let _signals = LeftToThisThread::begin();
        let theirs = shared.clone();
        thread.spawn(move || theirs.write_to(&mut out))?;
        Ok(Stderr(shared))
    }

    /// Waits until all lines are written, or a timeout has passed.
    pub fn drain(&self) {
        let state = self.0.state.lock();
        self.0.wait(state, PATIENCE);
    }
}

impl Shared {
    fn put(&self, line: &[u8]) {
        let state = self.leave(line);
        if !state.is_late {
            self.wait(state, COURTESY);
        }
    }

    fn leave(&self, line: &[u8]) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        state.put += 1;
        // Once a line is dropped, all lines after it are dropped until the thread takes the queue,
        // so that the order is right.
        if state.lines.len() < ROOM && state.lost == 0 {
            state.lines.push(line.to_owned());
        } else {
            state.lost += 1;
        }
        self.changed.notify_all();
        state
    }

    /// Waits until the lines so far are written, or until `most` has passed.
    fn wait(&self, mut state: MutexGuard<'_, State>, most: Duration) {
        let until = state.put;
        let unwritten = |state: &mut State| state.written < until;
        self.changed.wait_while_for(&mut state, unwritten, most);
        state.is_late |= state.written < until;
    }

    fn write_to(&self, out: &mut dyn Write) {
        let mut state = self.state.lock();
        let mut has_started = false;
        loop {
            // The thread starts before the process has a sandbox, so each round tries to enter the
            // sandbox until there is one.
            has_started = has_started || thread_starts(ThreadKind::Log);
            let idle = |state: &mut State| state.written == state.put;
            self.changed.wait_while(&mut state, idle);
            let lines = std::mem::take(&mut state.lines);
            let lost = std::mem::take(&mut state.lost);
            let until = state.put;
            drop(state);
            // (A failure to write a line cannot be reported anywhere.)
            for line in lines {
                let _ = out.write_all(&line);
            }
            if lost > 0 {
                let _ = writeln!(
                    out,
                    "({lost} lines of the log are lost because its reader was too slow)"
                );
            }
            state = self.state.lock();
            state.written = until;
            state.is_late &= state.put > until;
            self.changed.notify_all();
        }
    }
}

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.put(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Stderr {
    type Writer = Stderr;

    fn make_writer(&'a self) -> Stderr {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    /// The reader stops, and the writer does not.
    #[test]
    fn nobody_waits_for_the_reader_and_what_is_lost_is_counted() {
        const LINES: usize = 20 * ROOM;
        let (reader, out) = UnixStream::pair().unwrap();
        let mut stderr = Stderr::to(out).unwrap();
        let filler = "x".repeat(1000);
        for n in 0..LINES {
            stderr
                .write_all(format!("{n} {filler}\n").as_bytes())
                .unwrap();
        }
        let start = Instant::now();
        stderr.drain();
        assert!(start.elapsed() >= PATIENCE);
        let reading = std::thread::spawn(move || {
            let mut reader = BufReader::new(reader);
            let (mut read, mut lost) = (0, 0);
            while read + lost < LINES {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                match line.strip_prefix('(') {
                    Some(rest) => lost += rest.split(' ').next().unwrap().parse::<usize>().unwrap(),
                    None => {
                        assert!(line.starts_with(&format!("{} ", read + lost)), "{line}");
                        read += 1;
                    }
                }
            }
            (reader, lost)
        });
        let (mut reader, lost) = reading.join().unwrap();
        assert!(lost > 0);
        // The log works as before.
        stderr.write_all(b"the last\n").unwrap();
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        assert_eq!(line, "the last\n");
        stderr.drain();
        let state = stderr.0.state.lock();
        assert!(state.written == state.put && !state.is_late);
    }
}
