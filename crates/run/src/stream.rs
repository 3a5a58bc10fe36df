//! An event file: a self-describing header, then records of one size.
//!
//! ```text
//! 8 bytes   "FATHOMEV"
//! u32       version (1)
//! u32       length of the JSON that follows
//! JSON      StreamHeader
//! records   until the end of the file:
//!             u64 time, u16 kind (index into the header's `kinds`), u16 cpu, u32 tid,
//!             then `width` u64 arguments
//! ```
//! All numbers are little-endian. Records are in order of time. A file that ends within a record,
//! because its writer was killed, is read up to there; [`Stream::is_cut`] then returns true.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::event::{Event, Kind, MAX_ARGS};
use crate::open::{MAX_EVENTS, open_file};

const MAGIC: &[u8; 8] = b"FATHOMEV";
const FORMAT: u32 = 1;
/// Maximum length of a header in bytes; a header holds at most some thousand strings.
const MAX_HEADER: u32 = 16 << 20;
const FIXED: usize = 16;

/// Self-description of an event file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamHeader {
    /// Names of the kinds, which records refer to by index, with the names of their arguments.
    pub kinds: Vec<(String, Vec<String>)>,
    /// Number of arguments in a record.
    pub width: usize,
    /// Strings that arguments refer to by index.
    pub strings: Vec<String>,
}

impl StreamHeader {
    /// Creates a header for this program's kinds.
    pub fn new(width: usize, strings: Vec<String>) -> StreamHeader {
        let names = |kind: &Kind| kind.args().iter().map(|&arg| arg.to_owned()).collect();
        StreamHeader {
            kinds: Kind::ALL
                .iter()
                .map(|kind| (kind.name().to_owned(), names(kind)))
                .collect(),
            width,
            strings,
        }
    }
}

/// Writes an event file.
#[derive(Debug)]
pub struct StreamWriter {
    file: BufWriter<File>,
    path: PathBuf,
    width: usize,
    last: u64,
    events: u64,
}

impl StreamWriter {
    /// Creates the file for events with at most `width` arguments.
    ///
    /// # Errors
    /// The file cannot be written, or the strings exceed the maximum length of the header.
    ///
    /// # Panics
    /// Panics if the width is above [`MAX_ARGS`].
    pub fn create(path: &Path, width: usize, strings: Vec<String>) -> Result<StreamWriter> {
        assert!(
            width <= MAX_ARGS,
            "an event has at most {MAX_ARGS} arguments"
        );
        let header = serde_json::to_vec(&StreamHeader::new(width, strings))
            .map_err(|error| Error::unusable(path, error.to_string()))?;
        let file = File::create(path).map_err(Error::io(path))?;
        let mut writer = StreamWriter {
            file: BufWriter::with_capacity(1 << 18, file),
            path: path.to_owned(),
            width,
            last: 0,
            events: 0,
        };
        let length = u32::try_from(header.len()).unwrap_or(u32::MAX);
        if length > MAX_HEADER {
            return Err(Error::unusable(
                path,
                "too many strings for one file of events",
            ));
        }
        writer.put(MAGIC)?;
        writer.put(&FORMAT.to_le_bytes())?;
        writer.put(&length.to_le_bytes())?;
        writer.put(&header)?;
        Ok(writer)
    }

    /// Appends an event.
    ///
    /// # Errors
    /// The disk is full, or the event is older than the previous one: events must be sorted.
    pub fn push(&mut self, event: &Event) -> Result<()> {
        if event.time < self.last {
            let problem = format!("an event at {} after one at {}", event.time, self.last);
            return Err(Error::unusable(&self.path, problem));
        }
        debug_assert!(event.args[self.width..].iter().all(|&arg| arg == 0));
        self.last = event.time;
        self.events += 1;
        let mut record = [0; FIXED + MAX_ARGS * 8];
        record[..8].copy_from_slice(&event.time.to_le_bytes());
        record[8..10].copy_from_slice(&(event.kind as u16).to_le_bytes());
        record[10..12].copy_from_slice(&event.cpu.to_le_bytes());
        record[12..16].copy_from_slice(&event.tid.to_le_bytes());
        for (out, arg) in record[FIXED..].chunks_exact_mut(8).zip(event.args) {
            out.copy_from_slice(&arg.to_le_bytes());
        }
        self.put(&record[..FIXED + self.width * 8])
    }

    /// Writes the buffered events; returns the number of events.
    ///
    /// # Errors
    /// The disk is full.
    pub fn finish(mut self) -> Result<u64> {
        self.file.flush().map_err(Error::io(&self.path))?;
        Ok(self.events)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(Error::io(&self.path))
    }
}

/// Reads an event file, one event at a time.
#[derive(Debug)]
pub struct Stream {
    file: BufReader<File>,
    path: PathBuf,
    header: StreamHeader,
    /// This program's kinds for the file's kind numbers; None for an unknown kind.
    kinds: Vec<Option<Kind>>,
    last: u64,
    unknown: u64,
    cut: bool,
}

impl Stream {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// The file cannot be read, or is not an event file.
    pub fn open(path: &Path) -> Result<Stream> {
        let file = open_file(path, MAX_EVENTS).map_err(Error::io(path))?;
        Stream::read(file, path)
    }

    /// Reads the header of a file; `path` is used in errors.
    pub(crate) fn read(file: File, path: &Path) -> Result<Stream> {
        let mut file = BufReader::with_capacity(1 << 18, file);
        let mut fixed = [0; 16];
        file.read_exact(&mut fixed)
            .map_err(|error| no_stream(path, error))?;
        let word = |at: usize| {
            u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]])
        };
        if &fixed[..8] != MAGIC {
            return Err(Error::unusable(path, "this is not a file of events"));
        }
        if word(8) != FORMAT {
            let problem = format!(
                "format {} of a newer fathom; this one reads {FORMAT}",
                word(8)
            );
            return Err(Error::unusable(path, problem));
        }
        if word(12) > MAX_HEADER {
            return Err(Error::unusable(path, "its header is damaged (too long)"));
        }
        let mut json = vec![0; word(12) as usize];
        file.read_exact(&mut json)
            .map_err(|error| no_stream(path, error))?;
        let header: StreamHeader = serde_json::from_slice(&json)
            .map_err(|error| Error::unusable(path, format!("its header is damaged ({error})")))?;
        if header.width > MAX_ARGS {
            return Err(Error::unusable(
                path,
                "its records are wider than this fathom knows",
            ));
        }
        let kinds = header
            .kinds
            .iter()
            .map(|(name, _)| Kind::from_name(name))
            .collect();
        Ok(Stream {
            file,
            path: path.to_owned(),
            header,
            kinds,
            last: 0,
            unknown: 0,
            cut: false,
        })
    }

    /// Returns the file's header.
    pub fn header(&self) -> &StreamHeader {
        &self.header
    }

    /// Returns the number of events so far of unknown kinds, which are skipped.
    pub fn unknown(&self) -> u64 {
        self.unknown
    }

    /// Returns true if the file ended within a record.
    pub fn is_cut(&self) -> bool {
        self.cut
    }

    /// Returns the next event, or None at the end.
    ///
    /// # Errors
    /// The file cannot be read, or its records are damaged: out of order, or of a kind that the
    /// header does not list.
    pub fn next_event(&mut self) -> Result<Option<Event>> {
        loop {
            let mut record = [0; FIXED + MAX_ARGS * 8];
            let size = FIXED + self.header.width * 8;
            match read_up_to(&mut self.file, &mut record[..size]) {
                Ok(0) => return Ok(None),
                Ok(read) if read < size => {
                    self.cut = true;
                    return Ok(None);
                }
                Ok(_) => {}
                Err(error) => return Err(Error::io(&self.path)(error)),
            }
            let event = |kind| decode(&record, kind);
            let number = usize::from(u16::from_le_bytes([record[8], record[9]]));
            let Some(kind) = self.kinds.get(number) else {
                let problem = format!("damaged: kind {number} is not in its header");
                return Err(Error::unusable(&self.path, problem));
            };
            let Some(event) = kind.map(event) else {
                self.unknown += 1;
                continue;
            };
            if event.time < self.last {
                let problem = format!(
                    "damaged: an event at {} after one at {}",
                    event.time, self.last
                );
                return Err(Error::unusable(&self.path, problem));
            }
            self.last = event.time;
            return Ok(Some(event));
        }
    }
}

impl Iterator for Stream {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Result<Event>> {
        self.next_event().transpose()
    }
}

fn decode(record: &[u8; FIXED + MAX_ARGS * 8], kind: Kind) -> Event {
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&record[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    let mut args = [0; MAX_ARGS];
    for (i, arg) in args.iter_mut().enumerate() {
        *arg = word(FIXED + i * 8); // zero beyond the file's width
    }
    Event {
        time: word(0),
        kind,
        cpu: u16::from_le_bytes([record[10], record[11]]),
        tid: u32::from_le_bytes([record[12], record[13], record[14], record[15]]),
        args,
    }
}

fn read_up_to(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read(&mut buffer[done..]) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

fn no_stream(path: &Path, error: io::Error) -> Error {
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return Error::unusable(path, "this is not a file of events (it ends too early)");
    }
    Error::io(path)(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(events: &[Event], width: usize) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.events");
        let mut writer = StreamWriter::create(&path, width, vec!["one".into()]).unwrap();
        for event in events {
            writer.push(event).unwrap();
        }
        assert_eq!(writer.finish().unwrap(), events.len() as u64);
        (dir, path)
    }

    proptest! {
        #[test]
        fn events_come_back_as_written(
            mut times in proptest::collection::vec(any::<u64>(), 0..50),
            args in any::<[u64; 4]>(),
        ) {
            times.sort_unstable();
            let kinds = Kind::ALL.iter().cycle();
            let events: Vec<Event> = times.iter().zip(kinds)
                .map(|(&time, &kind)| Event::new(time, kind, time as u16, time as u32, &args))
                .collect();
            let (_dir, path) = file(&events, 4);
            let stream = Stream::open(&path).unwrap();
            prop_assert_eq!(&stream.header().strings, &["one".to_owned()]);
            let read: Result<Vec<Event>> = stream.collect();
            prop_assert_eq!(read.unwrap(), events);
        }

        /// Reading a damaged file returns events or one error.
        #[test]
        fn damage_is_survived(at: prop::sample::Index, value: u8, cut in 0usize..400) {
            let events = [Event::new(1, Kind::Lost, 0, 0, &[1]), Event::new(2, Kind::KvmPio, 1, 2, &[3])];
            let (_dir, path) = file(&events, 4);
            let mut bytes = std::fs::read(&path).unwrap();
            let end = bytes.len();
            bytes[at.index(end)] = value;
            bytes.truncate(end - cut % end);
            std::fs::write(&path, &bytes).unwrap();
            if let Ok(stream) = Stream::open(&path) {
                let read: Vec<_> = stream.take(10).collect();
                prop_assert!(read.len() <= 2);
            }
        }
    }

    #[test]
    fn damage_is_told() {
        let events = [
            Event::new(7, Kind::Lost, 0, 0, &[1]),
            Event::new(8, Kind::KvmPio, 1, 2, &[3]),
        ];
        let (_dir, path) = file(&events, 1);
        let good = std::fs::read(&path).unwrap();
        let second = good.len() - (FIXED + 8);
        let read = || Stream::open(&path)?.collect::<Result<Vec<Event>>>();
        assert_eq!(read().unwrap(), events);
        let told = |at: usize, bytes: &[u8]| {
            let mut bad = good.clone();
            bad[at..at + bytes.len()].copy_from_slice(bytes);
            std::fs::write(&path, bad).unwrap();
            read().unwrap_err().to_string()
        };
        assert!(told(0, b"f").contains("not a file of events"));
        assert!(told(8, &[9]).contains("format 9"));
        assert!(told(12, &u32::MAX.to_le_bytes()).contains("too long"));
        assert!(told(16, b"[").contains("its header is damaged"));
        assert!(told(second + 8, &[0xff, 0xff]).contains("kind 65535"));
        assert!(told(second, &[6]).contains("an event at 6 after one at 7"));
        // Records that are wider than the maximum.
        let header = String::from_utf8_lossy(&good[FIXED..second - (FIXED + 8)]);
        let header = header.replace("\"width\":1", "\"width\":11");
        let mut wide = good[..12].to_vec();
        wide.extend((header.len() as u32).to_le_bytes());
        wide.extend(header.as_bytes());
        wide.extend([0; 96]);
        std::fs::write(&path, wide).unwrap();
        assert!(read().unwrap_err().to_string().contains("wider"));
    }

    /// As with files of a newer Fathom.
    #[test]
    fn kinds_that_are_unknown_are_left_out_and_counted() {
        let events = [
            Event::new(7, Kind::Lost, 0, 0, &[1]),
            Event::new(8, Kind::KvmPio, 1, 2, &[3]),
        ];
        let (_dir, path) = file(&events, 1);
        let text = std::fs::read(&path).unwrap();
        let name = Kind::Lost.name().as_bytes();
        let at = text.windows(name.len()).position(|w| w == name).unwrap();
        let mut other = text.clone();
        other[at] = b'?';
        std::fs::write(&path, other).unwrap();
        let mut stream = Stream::open(&path).unwrap();
        assert_eq!(stream.next_event().unwrap(), Some(events[1]));
        assert_eq!(stream.unknown(), 1);
    }

    #[test]
    fn order_is_kept_and_a_cut_file_is_read_to_its_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.events");
        let mut writer = StreamWriter::create(&path, 1, Vec::new()).unwrap();
        writer.push(&Event::new(5, Kind::Lost, 0, 0, &[1])).unwrap();
        writer.push(&Event::new(5, Kind::Lost, 0, 0, &[2])).unwrap();
        let error = writer
            .push(&Event::new(4, Kind::Lost, 0, 0, &[]))
            .unwrap_err();
        assert!(error.to_string().contains("an event at 4 after one at 5"));
        writer.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let mut stream = Stream::open(&path).unwrap();
        assert_eq!(stream.next_event().unwrap().unwrap().args[0], 1);
        assert!(stream.next_event().unwrap().is_none());
        assert!(stream.is_cut());
    }
}
