//! Passes what a tenant writes to its standard error on to the supervisor's. Each line names its
//! tenant and cannot be confused with other lines. The rate of lines is limited, to leave room for
//! other lines.
//!
//! All output is read, so that a tenant waits at most for a pause here. Lines beyond the limit
//! wait. The last of them are kept, so that the log has what a tenant writes before it ends, and
//! the others are dropped and counted.

use fathom_host::stderr;
use fathom_metrics::one_line;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum bytes of a line. Longer lines are split.
const LINE: usize = 1024;
/// Number of lines that a tenant which was silent for a while may write at once.
const BURST: u32 = 256;
/// Time after which a tenant may write one more line. A tenant over its limit is not read for this
/// time, either.
const EACH: Duration = Duration::from_millis(50);
/// Time after which dropped lines are reported.
const TELL: Duration = Duration::from_secs(5);
/// Number of the last lines that are always written.
const LAST_WORDS: usize = 32;
/// Maximum number of reads before the thread does other work, and when the tenant has ended.
const READS: usize = 16;
const LAST_READS: usize = 1024;

/// Takes whole lines.
type Say<'a> = &'a mut dyn FnMut(&str);

pub struct Log {
    tenant: String,
    /// None: the pipe is closed, or a predecessor did not hand one over.
    pipe: Option<Arc<OwnedFd>>,
    /// The beginning of a line whose end has not arrived.
    begun: Vec<u8>,
    /// Number of lines that may be written now, and the time of the last addition to it.
    budget: u32,
    since: Instant,
    /// Time before which nothing is read.
    pause: Option<Instant>,
    /// The last lines that wait.
    waiting: VecDeque<Vec<u8>>,
    /// Number of dropped lines, and the time at which they are reported.
    left_out: u64,
    tell: Option<Instant>,
}

impl Log {
    /// Creates a pipe for a tenant. Returns the supervisor's end and the tenant's.
    pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
        let (here, there) = pipe_with(PipeFlags::CLOEXEC)?;
        fcntl_setfl(&here, OFlags::NONBLOCK)?;
        Ok((here, there))
    }

    pub fn new(tenant: &str, pipe: Option<OwnedFd>) -> Log {
        Log {
            tenant: tenant.to_owned(),
            pipe: pipe.map(Arc::new),
            begun: Vec::new(),
            budget: BURST,
            since: Instant::now(),
            pause: None,
            waiting: VecDeque::new(),
            left_out: 0,
            tell: None,
        }
    }

    /// Writes what has been read, even an incomplete line, and returns the pipe for a successor of
    /// this supervisor.
    pub fn hand_over(&mut self) -> Option<Arc<OwnedFd>> {
        self.say_all(&mut leave);
        self.pipe.clone()
    }

    /// Returns when [`Log::pass_on`] has work to do: when the pipe is readable, or after a time.
    pub fn awaited(&self) -> (Option<Arc<OwnedFd>>, Option<Duration>) {
        let now = Instant::now();
        let first = self.pause.into_iter().chain(self.tell).min();
        let within = first.map(|at| at.saturating_duration_since(now));
        let pipe = self.pipe.clone().filter(|_| self.pause.is_none());
        (pipe, within)
    }

    /// Reads what the tenant has written, and passes on as many lines as the limit permits.
    pub fn pass_on(&mut self) {
        self.take_in(Instant::now(), &mut leave);
    }

    /// Reads and writes the last lines of a tenant that has ended.
    pub fn finish(&mut self) {
        self.end(&mut leave);
    }

    /// Logs a warning about the tenant, which counts as one of the tenant's lines.
    pub fn warn(&mut self, words: fmt::Arguments<'_>) {
        self.refill(Instant::now());
        match self.budget.checked_sub(1) {
            Some(left) => {
                self.budget = left;
                tracing::warn!("tenant '{}': {}", self.tenant, shown(&words.to_string()));
            }
            None => self.count(Instant::now()),
        }
    }

    fn take_in(&mut self, now: Instant, say: Say<'_>) {
        self.refill(now);
        if self.tell.is_some_and(|at| at <= now) {
            self.tell_left_out(say);
        }
        if self.pause.is_some_and(|until| until > now) {
            return;
        }
        self.pause = None;
        self.say_waiting(say);
        for _ in 0..READS {
            if !self.read(now, say) {
                break;
            }
        }
        if self.budget == 0 {
            self.pause = Some(now + EACH);
        }
    }

    fn end(&mut self, say: Say<'_>) {
        for _ in 0..LAST_READS {
            if !self.read(Instant::now(), say) {
                break;
            }
        }
        self.pipe = None;
        self.say_all(say);
    }

    fn refill(&mut self, now: Instant) {
        let more = now.saturating_duration_since(self.since).as_millis() / EACH.as_millis();
        if more > 0 {
            self.since = now;
            let more = more.min(BURST.into()) as u32;
            self.budget = (self.budget + more).min(BURST);
        }
    }

    /// Reads once from the pipe. False: no bytes are available.
    fn read(&mut self, now: Instant, say: Say<'_>) -> bool {
        let Some(pipe) = &self.pipe else {
            return false;
        };
        let mut buffer = [0; 4 * LINE];
        match rustix::io::read(pipe, &mut buffer) {
            Ok(read @ 1..) => {
                self.cut(&buffer[..read], now, say);
                true
            }
            Err(Errno::INTR) => true,
            Err(Errno::AGAIN) => false,
            Ok(_) | Err(_) => {
                self.pipe = None;
                false
            }
        }
    }

    /// Splits bytes into lines.
    fn cut(&mut self, mut bytes: &[u8], now: Instant, say: Say<'_>) {
        while !bytes.is_empty() {
            let room = LINE - self.begun.len();
            let within = &bytes[..bytes.len().min(room)];
            let (more, next) = match within.iter().position(|byte| *byte == b'\n') {
                Some(end) => (end, end + 1),
                None => (within.len(), within.len()),
            };
            self.begun.extend_from_slice(&bytes[..more]);
            if next > more || self.begun.len() == LINE {
                let line = std::mem::take(&mut self.begun);
                self.put(&line, now, say);
                self.begun = line;
                self.begun.clear();
            }
            bytes = &bytes[next..];
        }
    }

    fn put(&mut self, line: &[u8], now: Instant, say: Say<'_>) {
        let mut place = match self.waiting.len() {
            LAST_WORDS => {
                self.count(now);
                self.waiting.pop_front().unwrap_or_default()
            }
            _ => Vec::new(),
        };
        place.clear();
        place.extend_from_slice(line);
        self.waiting.push_back(place);
        self.say_waiting(say);
    }

    /// Writes waiting lines, up to the limit.
    fn say_waiting(&mut self, say: Say<'_>) {
        while self.budget > 0
            && let Some(line) = self.waiting.pop_front()
        {
            self.budget -= 1;
            say(&self.line(&line));
        }
    }

    fn say_all(&mut self, say: Say<'_>) {
        let line = std::mem::take(&mut self.begun);
        if !line.is_empty() {
            self.put(&line, Instant::now(), say);
        }
        self.tell_left_out(say);
        for line in std::mem::take(&mut self.waiting) {
            say(&self.line(&line));
        }
    }

    fn count(&mut self, now: Instant) {
        self.left_out += 1;
        self.tell.get_or_insert(now + TELL);
    }

    fn tell_left_out(&mut self, say: Say<'_>) {
        let count = std::mem::take(&mut self.left_out);
        self.tell = None;
        if count > 0 {
            let lines = if count == 1 { "line" } else { "lines" };
            say(&format!(
                "({count} {lines} of tenant '{}' were dropped)\n",
                self.tenant
            ));
        }
    }

    /// Returns a line with the tenant's name.
    fn line(&self, line: &[u8]) -> String {
        let text = String::from_utf8_lossy(line);
        format!("[{}] {}\n", self.tenant, shown(&text))
    }
}

fn leave(line: &str) {
    stderr::leave(line.as_bytes());
}

/// Returns a tenant's text as one line that is safe to show.
pub fn shown(text: &str) -> String {
    one_line(text, LINE)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Pipe {
        log: Log,
        there: OwnedFd,
    }

    impl Pipe {
        fn new() -> Pipe {
            let (here, there) = Log::pipe().unwrap();
            let log = Log::new("a", Some(here));
            Pipe { log, there }
        }

        fn write(&self, bytes: &[u8]) {
            assert_eq!(rustix::io::write(&self.there, bytes), Ok(bytes.len()));
        }

        fn said(&mut self, now: Instant) -> Vec<String> {
            let mut lines = Vec::new();
            self.log
                .take_in(now, &mut |line| lines.push(line.to_owned()));
            lines
        }

        fn last(&mut self) -> Vec<String> {
            let mut lines = Vec::new();
            self.log.end(&mut |line| lines.push(line.to_owned()));
            lines
        }
    }

    #[test]
    fn lines_say_whose_they_are_and_look_like_nothing_else() {
        let mut pipe = Pipe::new();
        let now = pipe.log.since;
        pipe.write(b"one\n\"two\" \x1b[31mred\r\xff\xc2\x9b\xe2\x80\xae\nthr");
        let escaped = "[a] \"two\" \\u{1b}[31mred\\r\u{fffd}\\u{9b}\\u{202e}\n";
        assert_eq!(pipe.said(now), ["[a] one\n", escaped]);
        pipe.write(b"ee\n");
        pipe.write(&[b'x'; LINE + 1]);
        let lines = pipe.said(now);
        assert_eq!((lines.len(), &*lines[0]), (2, "[a] three\n"));
        assert_eq!(lines[1].len(), LINE + "[a] \n".len());
        assert_eq!(pipe.last(), ["[a] x\n"]);
        assert_eq!(shown(&"é".repeat(LINE)).len(), LINE + 3);
    }

    #[test]
    fn what_is_too_much_is_counted() {
        let mut pipe = Pipe::new();
        let begin = pipe.log.since;
        pipe.write("x\n".repeat(1000).as_bytes());
        assert_eq!(pipe.said(begin).len(), BURST as usize);
        assert!(pipe.log.awaited().0.is_none(), "it is read on");
        // As time passes, more lines may be written.
        pipe.write("y\n".repeat(1000).as_bytes());
        assert!(pipe.said(begin + EACH / 2).is_empty());
        let later = begin + 10 * EACH;
        assert_eq!(pipe.said(later), ["[a] x\n"; 10]);
        // The last lines have waited.
        let lines = pipe.said(begin + TELL);
        assert_eq!(lines[0], "(1702 lines of tenant 'a' were dropped)\n");
        assert_eq!(lines[1..], ["[a] y\n"; LAST_WORDS]);
        assert!(pipe.said(begin + 3 * TELL).is_empty());
        assert_eq!(pipe.log.budget, BURST);
        assert!(pipe.log.awaited().0.is_some());
    }

    /// A dropped line is most important when a tenant ends, so the last lines are always written.
    #[test]
    fn the_last_words_come_out() {
        let mut pipe = Pipe::new();
        let now = pipe.log.since;
        pipe.write("x\n".repeat(1000).as_bytes());
        assert_eq!(pipe.said(now).len(), BURST as usize);
        pipe.write("y\n".repeat(500).as_bytes());
        pipe.write(b"thread 'main' panicked\n");
        assert_eq!(pipe.said(now + EACH), ["[a] x\n"]);
        // The limit permits one line, which is the first that waits.
        pipe.log.refill(now + 2 * EACH);
        pipe.write(b"alas");
        let lines = pipe.last();
        let left_out = 1000 + 500 + 2 - (BURST as usize + 1) - LAST_WORDS;
        let told = format!("({left_out} lines of tenant 'a' were dropped)\n");
        assert_eq!(lines[..2], ["[a] y\n", &told]);
        assert_eq!(lines.len(), 1 + LAST_WORDS);
        assert_eq!(
            lines[LAST_WORDS - 1..],
            ["[a] thread 'main' panicked\n", "[a] alas\n"]
        );
    }

    #[test]
    fn what_is_there_of_a_line_is_not_lost_to_a_successor() {
        let mut pipe = Pipe::new();
        pipe.write(b"half");
        assert!(pipe.said(pipe.log.since).is_empty());
        let mut lines = Vec::new();
        pipe.log.say_all(&mut |line| lines.push(line.to_owned()));
        assert_eq!(lines, ["[a] half\n"]);
        assert!(pipe.log.hand_over().is_some());
    }
}
