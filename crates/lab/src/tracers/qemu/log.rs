//! Converts a file of QEMU's `log` trace backend to a stream.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use fathom_run::{Event, Kind, StreamWriter};

use super::line::{self, Line, LogEvent, NUMBERS};
use super::order::Order;
use super::strings::Strings;
use super::{Converted, WIDTH, expected_numbers, is_mutex_event, unusable};
use crate::error::{Context, Error, Result};

/// Maximum length of a line in bytes. QEMU's lines are shorter than 200 bytes.
const MAX_LINE: usize = 4096;
/// Maximum time between two lines in nanoseconds, in either direction. A larger one is a damaged
/// stamp.
const MAX_JUMP: u64 = 3_600_000_000_000;

/// Converts a log to an event file with the host's CLOCK_REALTIME.
///
/// The log is read twice and never held in memory. Lines without an event are skipped; garbled
/// lines become [`Kind::Lost`].
///
/// # Errors
/// When the log cannot be read, or has no events with timestamps. When its times step back further
/// than threads overtake each other. When the stream cannot be written.
pub fn convert(log: &Path, stream: &Path) -> Result<Converted> {
    let mut survey = Survey::default();
    let length = std::fs::metadata(log)
        .context(|| format!("cannot read {}", log.display()))?
        .len();
    read(log, length, &mut |line| survey.take(line))?;
    survey.check(log)?;
    let writer = StreamWriter::create(stream, WIDTH, survey.strings.list());
    let mut output = Output {
        log: log.to_owned(),
        strings: survey.strings,
        sieve: Sieve::default(),
        order: Order::default(),
        writer: writer.map_err(run_error)?,
        number: 0,
        first_garbled: None,
        lost: 0,
    };
    let cut = read(log, length, &mut |line| output.take(line))?;
    output.finish(cut)
}

/// Results of the first pass.
#[derive(Default)]
struct Survey {
    strings: Strings,
    sieve: Sieve,
    events: u64,
    unstamped: u64,
    too_many_names: bool,
}

impl Survey {
    fn take(&mut self, text: Option<&str>) -> Result<()> {
        match self.sieve.sift(text) {
            Sifted::Event(event, _) => {
                self.events += 1;
                self.add(event.name);
                if is_mutex_event(event.name)
                    && let Some((_, _, file)) = line::mutex(event.args)
                {
                    self.add(file);
                }
            }
            Sifted::Unstamped => self.unstamped += 1,
            Sifted::Garbled | Sifted::Other => {}
        }
        Ok(())
    }

    fn add(&mut self, text: &str) {
        self.too_many_names |= self.strings.add(text).is_none();
    }

    fn check(&self, log: &Path) -> Result<()> {
        let reason = match self {
            _ if self.too_many_names => "damaged: more names of events than any QEMU has",
            Survey { events: 1.., .. } => return Ok(()),
            Survey { unstamped: 1.., .. } => {
                "the trace events have no time stamps; start QEMU with -msg timestamp=on"
            }
            _ => {
                "no trace events: was QEMU built with the log backend \
                 (qemu-system-x86_64 -trace help), and were events enabled?"
            }
        };
        Err(unusable(log, reason.to_owned()))
    }
}

/// Separates trustworthy events from other lines.
#[derive(Default)]
struct Sieve {
    /// Time of the last event.
    last: Option<u64>,
}

enum Sifted<'a> {
    /// An event and its time.
    Event(LogEvent<'a>, u64),
    Unstamped,
    Garbled,
    Other,
}

impl Sieve {
    fn sift<'a>(&mut self, text: Option<&'a str>) -> Sifted<'a> {
        let event = match text.map(line::parse) {
            Some(Line::Event(event)) => event,
            Some(Line::Other) => return Sifted::Other,
            Some(Line::Garbled) | None => return Sifted::Garbled,
        };
        let Some(time) = event.time else {
            return Sifted::Unstamped;
        };
        let jumps = self.last.is_some_and(|last| last.abs_diff(time) > MAX_JUMP);
        if jumps || !is_complete(&event) {
            return Sifted::Garbled;
        }
        self.last = Some(time);
        Sifted::Event(event, time)
    }
}

/// Returns whether an event has all arguments that reports rely on.
fn is_complete(event: &LogEvent) -> bool {
    if is_mutex_event(event.name) {
        return line::mutex(event.args).is_some();
    }
    let mut numbers = [0; NUMBERS];
    match expected_numbers(event.name) {
        Some(counts) => counts.contains(&line::numbers(event.args, &mut numbers)),
        None => true,
    }
}

/// State of the second pass, which writes the events.
struct Output {
    log: PathBuf,
    strings: Strings,
    sieve: Sieve,
    order: Order,
    writer: StreamWriter,
    /// Number of the current line.
    number: u64,
    first_garbled: Option<u64>,
    lost: u64,
}

impl Output {
    fn take(&mut self, text: Option<&str>) -> Result<()> {
        self.number += 1;
        match self.sieve.sift(text) {
            Sifted::Event(event, time) => {
                let event = self.event(&event, time)?;
                self.push(event)
            }
            Sifted::Garbled => {
                self.lost += 1;
                self.first_garbled.get_or_insert(self.number);
                // Before the first event, no time is known for it.
                match self.sieve.last {
                    Some(time) => self.push(Event::new(time, Kind::Lost, 0, 0, &[1])),
                    None => Ok(()),
                }
            }
            Sifted::Unstamped | Sifted::Other => Ok(()),
        }
    }

    fn event(&self, event: &LogEvent, time: u64) -> Result<Event> {
        let mut args = [0; 1 + NUMBERS];
        args[0] = self.string(event.name)?;
        match line::mutex(event.args).filter(|_| is_mutex_event(event.name)) {
            Some((address, line, file)) => {
                args[1..4].copy_from_slice(&[address, line, self.string(file)?]);
            }
            None => {
                let mut numbers = [0; NUMBERS];
                line::numbers(event.args, &mut numbers);
                args[1..].copy_from_slice(&numbers);
            }
        }
        Ok(Event::new(time, Kind::Qemu, 0, event.tid, &args))
    }

    fn string(&self, text: &str) -> Result<u64> {
        let changed = || unusable(&self.log, "the file changed while it was read".into());
        self.strings.get(text).ok_or_else(changed)
    }

    fn push(&mut self, event: Event) -> Result<()> {
        let late = |ns: u64| {
            let reason = format!(
                "its times go back by {:.3} ms at line {}: the host's clock was set, or two \
                 QEMUs wrote to it",
                ns as f64 / 1e6,
                self.number
            );
            unusable(&self.log, reason)
        };
        match self.order.push(event).map_err(late)? {
            Some(event) => self.writer.push(&event).map_err(run_error),
            None => Ok(()),
        }
    }

    fn finish(mut self, cut: bool) -> Result<Converted> {
        while let Some(event) = self.order.pop() {
            self.writer.push(&event).map_err(run_error)?;
        }
        let mut problems = Vec::new();
        if let Some(first) = self.first_garbled {
            problems.push(format!(
                "{}: {} of {} lines are garbled (the first is line {first}); events are missing",
                self.log.display(),
                self.lost,
                self.number
            ));
        }
        if cut {
            problems.push(format!(
                "{}: its last line is cut off and was left out",
                self.log.display()
            ));
        }
        Ok(Converted {
            events: self.writer.finish().map_err(run_error)?,
            lost: self.lost,
            problems,
        })
    }
}

fn run_error(error: fathom_run::Error) -> Error {
    Error::Io {
        what: "cannot write QEMU's events".into(),
        source: std::io::Error::other(error),
    }
}

/// Passes each whole line in the first `length` bytes to `take`; `None` for a line that is too long
/// or not UTF-8. Returns whether the last line was cut.
fn read(
    path: &Path,
    length: u64,
    take: &mut dyn FnMut(Option<&str>) -> Result<()>,
) -> Result<bool> {
    let context = || format!("cannot read {}", path.display());
    let file = File::open(path).context(context)?;
    let mut file = BufReader::with_capacity(1 << 17, file.take(length));
    let mut line = Vec::with_capacity(MAX_LINE);
    loop {
        line.clear();
        let limited = &mut (&mut file).take(MAX_LINE as u64);
        if limited.read_until(b'\n', &mut line).context(context)? == 0 {
            return Ok(false);
        }
        if line.pop_if(|last| *last == b'\n').is_some() {
            line.pop_if(|last| *last == b'\r');
            take(std::str::from_utf8(&line).ok())?;
        } else if line.len() < MAX_LINE {
            return Ok(true);
        } else {
            take(None)?;
            if !skip_line(&mut file).context(context)? {
                return Ok(true);
            }
        }
    }
}

/// Skips the rest of the current line. Returns false if the file ends first.
fn skip_line(file: &mut impl BufRead) -> std::io::Result<bool> {
    loop {
        let bytes = file.fill_buf()?;
        if bytes.is_empty() {
            return Ok(false);
        }
        let end = bytes.iter().position(|&byte| byte == b'\n');
        let used = end.map_or(bytes.len(), |at| at + 1);
        file.consume(used);
        if end.is_some() {
            return Ok(true);
        }
    }
}
