//! Converts a file of QEMU's `simple` trace backend to a stream.
//!
//! ```text
//! header   u64 ~0, u64 0xf2b177cb0aa429b4, u64 version (2, 3 or 4)
//! records  v4: u64 type: 0 a mapping (u64 event, u32 length, name), 1 an event
//!          event: u64 event, u64 ns of CLOCK_MONOTONIC, u32 length of the record, u32 pid
//!                 (v2: 0), then the arguments: u64, or for a string u32 length and bytes
//!          dropped events: event ~0 - 1, one argument: how many
//! ```
//! All values are in the machine's byte order. The types of the arguments are in that build's
//! `trace-events-all`, and before version 4 the numbers of the events, too.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use fathom_run::{Event, Kind, StreamWriter};

use super::line::NUMBERS;
use super::order::Order;
use super::schema::{Arg, EventSchema, Schema};
use super::strings::Strings;
use super::{Converted, WIDTH, is_mutex_event, unusable};
use crate::error::{Context, Error, Result};

const HEADER: u64 = u64::MAX;
const MAGIC: u64 = 0xf2b1_77cb_0aa4_29b4;
const DROPPED: u64 = u64::MAX - 1;
const TYPE_MAPPING: u64 = 0;
const TYPE_EVENT: u64 = 1;
/// Size of a record's fixed fields in bytes: event, time, length, pid.
const FIXED: usize = 24;
/// Maximum size of a record in bytes. QEMU writes at most ten arguments of at most 512 bytes.
const MAX_RECORD: usize = 1 << 16;
const MAX_NAME: usize = 256;

/// Converts a trace to an event file with the host's CLOCK_MONOTONIC. The events have no thread
/// ids, because the file only has the process id.
///
/// # Errors
/// When the trace cannot be read or is not a trace. When it does not match the trace events,
/// because then none of it can be trusted. When the stream cannot be written.
pub fn convert(trace: &Path, schema: &Schema, stream: &Path) -> Result<Converted> {
    let mut strings = Strings::default();
    let mut reader = Reader::open(trace, schema)?;
    let mut unknown = BTreeSet::new();
    while let Some(record) = reader.next_record()? {
        let texts = [Some(record.name.as_str()), record.text.as_deref()];
        for text in texts.into_iter().flatten() {
            let number = strings.add(text);
            number
                .ok_or_else(|| unusable(trace, "more names of events than any QEMU has".into()))?;
        }
        if !record.is_known && unknown.len() < 20 {
            unknown.insert(record.name);
        }
    }
    let (length, is_cut) = (reader.position, reader.is_cut);
    let writer = StreamWriter::create(stream, WIDTH, strings.list());
    let mut writer = writer.map_err(run_error)?;
    let mut order = Order::default();
    let mut reader = Reader::open(trace, schema)?;
    let mut lost = 0;
    while reader.position < length
        && let Some(record) = reader.next_record()?
    {
        lost += record.dropped;
        let event = record.event(&strings);
        let late = |ns: u64| {
            let reason = format!("damaged: times step back by {:.3} ms", ns as f64 / 1e6);
            unusable(trace, reason)
        };
        if let Some(event) = order.push(event).map_err(late)? {
            writer.push(&event).map_err(run_error)?;
        }
    }
    while let Some(event) = order.pop() {
        writer.push(&event).map_err(run_error)?;
    }
    let events = writer.finish().map_err(run_error)?;
    if events == 0 {
        return Err(unusable(trace, "no events".into()));
    }
    Ok(Converted {
        events,
        lost,
        problems: problems(trace, is_cut, lost, &unknown),
    })
}

fn problems(trace: &Path, is_cut: bool, lost: u64, unknown: &BTreeSet<String>) -> Vec<String> {
    let mut problems = Vec::new();
    let path = trace.display();
    if is_cut {
        problems.push(format!(
            "{path}: its last record is cut off and was left out"
        ));
    }
    if lost > 0 {
        problems.push(format!(
            "{path}: QEMU dropped {lost} events, its buffer was full"
        ));
    }
    if !unknown.is_empty() {
        let names: Vec<&str> = unknown.iter().map(String::as_str).collect();
        problems.push(format!(
            "{path}: these events are not in the trace-events file, their arguments were left \
             out: {}",
            names.join(", ")
        ));
    }
    problems
}

fn run_error(error: fathom_run::Error) -> Error {
    Error::Io {
        what: "cannot write QEMU's events".into(),
        source: io::Error::other(error),
    }
}

/// A decoded record.
#[derive(Debug, Default)]
struct Record {
    name: String,
    time: u64,
    numbers: [u64; NUMBERS],
    /// Source file of a mutex event.
    text: Option<String>,
    /// Number of events that QEMU dropped, if the record reports dropped events.
    dropped: u64,
    is_known: bool,
}

impl Record {
    fn event(&self, strings: &Strings) -> Event {
        if self.dropped > 0 {
            return Event::new(self.time, Kind::Lost, 0, 0, &[self.dropped]);
        }
        let mut args = [0; 1 + NUMBERS];
        args[0] = strings.get(&self.name).unwrap_or(0);
        args[1..].copy_from_slice(&self.numbers);
        if let Some(file) = &self.text {
            args[3] = strings.get(file).unwrap_or(0);
        }
        Event::new(self.time, Kind::Qemu, 0, 0, &args)
    }
}

struct Reader<'a> {
    file: BufReader<File>,
    path: PathBuf,
    schema: &'a Schema,
    version: u64,
    names: HashMap<u64, String>,
    /// Number of bytes read.
    position: u64,
    is_cut: bool,
    payload: Vec<u8>,
}

impl<'a> Reader<'a> {
    fn open(path: &Path, schema: &'a Schema) -> Result<Reader<'a>> {
        let file = File::open(path).context(|| format!("cannot read {}", path.display()))?;
        let mut reader = Reader {
            file: BufReader::with_capacity(1 << 17, file),
            path: path.to_owned(),
            schema,
            version: 0,
            names: HashMap::new(),
            position: 0,
            is_cut: false,
            payload: Vec::new(),
        };
        let mut header = [0; 24];
        if !reader.fill(&mut header)? || word(&header, 0) != HEADER {
            return reader.fail("not a trace of QEMU's simple backend");
        }
        if word(&header, 8) == MAGIC.swap_bytes() {
            return reader.fail("written on a machine of the other byte order");
        }
        reader.version = word(&header, 16);
        match (word(&header, 8), reader.version) {
            (MAGIC, 2..=4) => Ok(reader),
            (MAGIC, 0) => reader.fail("format 0, of QEMU before 1.3, is not read"),
            (MAGIC, other) => reader.fail(&format!("format {other} is newer than this fathom")),
            _ => reader.fail("not a trace of QEMU's simple backend"),
        }
    }

    /// Reads the next event and the mappings before it. Returns `None` at the end, or where the
    /// file is cut.
    fn next_record(&mut self) -> Result<Option<Record>> {
        loop {
            if self.version < 4 {
                return self.event();
            }
            let mut kind = [0; 8];
            if !self.fill(&mut kind)? {
                return Ok(None);
            }
            match word(&kind, 0) {
                TYPE_EVENT => return self.event(),
                TYPE_MAPPING => {
                    if !self.mapping()? {
                        return Ok(None);
                    }
                }
                other => return self.fail(&format!("unknown record type {other}")),
            }
        }
    }

    fn mapping(&mut self) -> Result<bool> {
        let mut fixed = [0; 12];
        if !self.rest(&mut fixed)? {
            return Ok(false);
        }
        let length = half(&fixed, 8) as usize;
        let mut name = vec![0; length.min(MAX_NAME)];
        if !self.rest(&mut name)? {
            return Ok(false);
        }
        match String::from_utf8(name) {
            Ok(name) if length <= MAX_NAME && !name.is_empty() => {
                self.names.insert(word(&fixed, 0), name);
                Ok(true)
            }
            _ => self.fail("the name of an event is damaged"),
        }
    }

    fn event(&mut self) -> Result<Option<Record>> {
        let mut fixed = [0; FIXED];
        let got = if self.version < 4 {
            self.fill(&mut fixed)?
        } else {
            self.rest(&mut fixed)?
        };
        if !got {
            return Ok(None);
        }
        let (id, time) = (word(&fixed, 0), word(&fixed, 8));
        let length = half(&fixed, 16) as usize;
        if !(FIXED..=MAX_RECORD).contains(&length) {
            return self.fail(&format!("a record of {length} bytes"));
        }
        let mut payload = std::mem::take(&mut self.payload);
        payload.resize(length - FIXED, 0);
        let whole = self.rest(&mut payload)?;
        let record = whole.then(|| self.decode(id, time, &payload)).transpose();
        self.payload = payload;
        record
    }

    fn decode(&self, id: u64, time: u64, payload: &[u8]) -> Result<Record> {
        if id == DROPPED {
            return match payload.len() {
                8 => Ok(Record {
                    name: "dropped".into(),
                    time,
                    // QEMU writes this record only if it has dropped at least one event.
                    dropped: word(payload, 0).max(1),
                    is_known: true,
                    ..Record::default()
                }),
                _ => self.fail("the record of dropped events is damaged"),
            };
        }
        let (name, schema) = match self.version {
            4 => {
                let name = self.names.get(&id);
                let Some(name) = name else {
                    return self.fail(&format!("an event has the number {id}, which has no name"));
                };
                (name.as_str(), self.schema.by_name(name))
            }
            _ => match self.schema.by_number(id) {
                Some(schema) => (schema.name.as_str(), Some(schema)),
                None => return self.misfit(&format!("no event has the number {id}")),
            },
        };
        let mut record = Record {
            name: name.to_owned(),
            time,
            is_known: schema.is_some(),
            ..Record::default()
        };
        if let Some(schema) = schema
            && decode_args(schema, payload, &mut record).is_none()
        {
            return self.misfit(&format!("{name} has other arguments there"));
        }
        Ok(record)
    }

    /// Fills `bytes`. Returns false at the end of the file. If some bytes were read before the end,
    /// the file is cut.
    fn fill(&mut self, bytes: &mut [u8]) -> Result<bool> {
        let mut got = 0;
        while got < bytes.len() {
            let read = self.file.read(&mut bytes[got..]);
            match read.context(|| format!("cannot read {}", self.path.display()))? {
                0 => {
                    self.is_cut |= got > 0;
                    return Ok(false);
                }
                n => got += n,
            }
        }
        self.position += bytes.len() as u64;
        Ok(true)
    }

    /// Fills `bytes` within a record, where any end of the file means that it is cut.
    fn rest(&mut self, bytes: &mut [u8]) -> Result<bool> {
        let whole = self.fill(bytes)?;
        self.is_cut |= !whole;
        Ok(whole)
    }

    fn misfit<T>(&self, what: &str) -> Result<T> {
        self.fail(&format!(
            "does not match the trace-events file ({what}); use the trace-events-all of the \
             same build of QEMU"
        ))
    }

    fn fail<T>(&self, what: &str) -> Result<T> {
        let reason = format!("{what} (before byte {})", self.position);
        Err(unusable(&self.path, reason))
    }
}

/// Decodes the arguments. Returns `None` unless they fill the payload exactly.
fn decode_args(schema: &EventSchema, mut payload: &[u8], record: &mut Record) -> Option<()> {
    let mut count = 0;
    for arg in &schema.args {
        match arg {
            Arg::Number => {
                let (number, rest) = payload.split_first_chunk()?;
                if let Some(place) = record.numbers.get_mut(count) {
                    *place = u64::from_ne_bytes(*number);
                }
                count += 1;
                payload = rest;
            }
            Arg::Text => {
                let (length, rest) = payload.split_first_chunk()?;
                let length = u32::from_ne_bytes(*length) as usize;
                let (text, rest) = rest.split_at_checked(length)?;
                if is_mutex_event(&schema.name) {
                    record.text = Some(String::from_utf8_lossy(text).into_owned());
                }
                payload = rest;
            }
        }
    }
    payload.is_empty().then_some(())
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}
