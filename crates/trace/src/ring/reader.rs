//! Reads a trace while another process, which is not trusted, may write to it.
//!
//! The reader copies with pread(2) instead of mapping the file. The page cache is the same memory,
//! and truncation causes an end of file and not a SIGBUS.

use super::header::{AT_HZ, HEADER, Header};
use super::{MAX_NUMBER, Payload, RECORD, TraceError, TraceRecord, WORDS, decode};
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};

/// Maximum number of records that are copied at once.
const BATCH: usize = 128;
/// Number of times that one [`RingReader::poll`] restarts on a ring whose writer has overtaken it,
/// before it reads the other rings.
const ATTEMPTS: usize = 64;

/// A record and its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Index of the ring, which is that of the worker.
    pub ring: u32,
    /// The finished request that the record describes.
    pub record: TraceRecord,
}

/// Three copies of the same part of a ring, made one after the other.
#[derive(Debug)]
struct Batch {
    /// First copy, for the sequence words before the records.
    before: Box<[u8]>,
    /// Second copy, for the records.
    records: Box<[u8]>,
    /// Third copy, for the sequence words after the records.
    after: Box<[u8]>,
}

/// State of one record of a batch.
enum Seen {
    Whole(Payload),
    /// The record is not yet written, or is being written.
    NotYet,
    /// The record was overwritten by the record with this sequence word.
    Overtaken(u64),
}

impl Batch {
    fn new() -> Batch {
        let buffer = || vec![0; BATCH * RECORD].into();
        Batch {
            before: buffer(),
            records: buffer(),
            after: buffer(),
        }
    }

    /// Copies `count` records from offset `at` of the file.
    fn copy(&mut self, file: &File, at: u64, count: usize) -> io::Result<()> {
        for buffer in [&mut self.before, &mut self.records, &mut self.after] {
            file.read_exact_at(&mut buffer[..count * RECORD], at)?;
            fence(Ordering::SeqCst);
        }
        Ok(())
    }

    /// Returns the record at `index`, which should have number `number`.
    fn record(&self, index: usize, number: u64) -> Seen {
        let written = number.wrapping_mul(2).wrapping_add(2);
        let [before, ..] = words(&self.before, index);
        let [after, ..] = words(&self.after, index);
        if after > written {
            Seen::Overtaken(after)
        } else if before == written && after == written {
            let [_, payload @ ..] = words(&self.records, index);
            Seen::Whole(payload)
        } else {
            Seen::NotYet
        }
    }
}

/// Returns the words of the record at `index`.
fn words(buffer: &[u8], index: usize) -> [u64; WORDS] {
    let (words, _) = buffer[index * RECORD..].as_chunks::<8>();
    std::array::from_fn(|i| u64::from_ne_bytes(words[i]))
}

/// Result of reading a batch of a ring.
enum Look {
    /// Records were appended, and more may follow.
    Records,
    /// The writer has written no further record.
    Nothing,
    /// The writer has overwritten the next record, with one of this sequence word.
    Overtaken(u64),
}

/// Reads each record of a trace file once.
#[derive(Debug)]
pub struct RingReader {
    file: File,
    path: PathBuf,
    header: Header,
    /// Number of the next record of each ring.
    next: Vec<u64>,
    lost: u64,
    batch: Batch,
}

impl RingReader {
    /// Opens a trace and checks its header.
    pub fn open(path: &Path) -> Result<RingReader, TraceError> {
        let failed = TraceError::io(path);
        // Opening a FIFO would block, and a terminal would become the controlling terminal.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)
            .map_err(&failed)?;
        let metadata = file.metadata().map_err(&failed)?;
        let mut page = [0; HEADER];
        let long_enough = metadata.is_file() && metadata.len() >= HEADER as u64;
        if long_enough {
            file.read_exact_at(&mut page, 0).map_err(&failed)?;
        }
        let header = Header::decode(&page).and_then(|header| {
            let (is, should) = (metadata.len(), header.file_bytes());
            if is < should {
                return Err(format!(
                    "the trace is truncated: it has {is} of {should} bytes"
                ));
            }
            Ok(header)
        });
        let header = header.map_err(TraceError::unusable(path))?;
        Ok(RingReader {
            file,
            path: path.to_owned(),
            next: vec![0; header.rings as usize],
            header,
            lost: 0,
            batch: Batch::new(),
        })
    }

    /// Returns the description of the trace. [`RingReader::poll`] updates the frequency in it.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the number of records since the start of the trace that were overwritten before this
    /// reader could read them.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Returns whether the writing process still holds the trace. If not, one last `poll` finds all
    /// remaining records.
    pub fn is_live(&self) -> bool {
        match self.file.try_lock_shared() {
            Ok(()) => {
                let _ = self.file.unlock();
                false
            }
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Error(_)) => false,
        }
    }

    /// Appends all new records to `out`, ring by ring, and returns their number.
    pub fn poll(&mut self, out: &mut Vec<Entry>) -> Result<usize, TraceError> {
        let before = out.len();
        self.recalibrate()?;
        for ring in 0..self.header.rings {
            self.poll_ring(ring, out)?;
        }
        Ok(out.len() - before)
    }

    /// Reads at most as many records as the ring has, because a writer can keep a reader busy for
    /// ever.
    fn poll_ring(&mut self, ring: u32, out: &mut Vec<Entry>) -> Result<(), TraceError> {
        let enough = out.len() + self.header.capacity as usize;
        let mut attempts = 0;
        while out.len() < enough && attempts < ATTEMPTS {
            match self.look(ring, out)? {
                Look::Records => {}
                Look::Nothing => break,
                Look::Overtaken(sequence) => {
                    // If overtaken again, the writer is fast. The oldest records would be
                    // overwritten next, so skip some.
                    let margin = if attempts == 0 { 0 } else { 4 };
                    self.catch_up(ring, sequence, margin)?;
                    attempts += 1;
                }
            }
        }
        Ok(())
    }

    /// Reads a batch of one ring, from its next record on.
    fn look(&mut self, ring: u32, out: &mut Vec<Entry>) -> Result<Look, TraceError> {
        let first = self.next[ring as usize];
        let capacity = u64::from(self.header.capacity);
        let count = (capacity - first % capacity).min(BATCH as u64);
        let at = self.position(ring, first);
        let copied = self.batch.copy(&self.file, at, count as usize);
        copied.map_err(|e| self.unreadable(e))?;
        for index in 0..count {
            match self.batch.record(index as usize, first + index) {
                Seen::Whole(payload) => {
                    let record = decode(&payload).ok_or_else(|| self.damaged(ring))?;
                    out.push(Entry { ring, record });
                    self.next[ring as usize] += 1;
                }
                Seen::Overtaken(sequence) if index == 0 => return Ok(Look::Overtaken(sequence)),
                // Another look finds more records.
                Seen::Overtaken(_) => return Ok(Look::Records),
                Seen::NotYet => return Ok(Look::Nothing),
            }
        }
        Ok(Look::Records)
    }

    /// Continues with the oldest record that still exists.
    ///
    /// `sequence` is the sequence word in the slot of the next record. If `margin` is n > 0, the
    /// oldest n-th of the ring is skipped.
    fn catch_up(&mut self, ring: u32, sequence: u64, margin: u64) -> Result<(), TraceError> {
        let capacity = u64::from(self.header.capacity);
        let next = self.next[ring as usize];
        let seen = (sequence - 1) / 2;
        if seen % capacity != next % capacity || seen > MAX_NUMBER {
            return Err(self.damaged(ring));
        }
        let newest = seen + self.written_since(ring, seen)?;
        let oldest = newest + 1 - capacity + capacity.checked_div(margin).unwrap_or(0);
        self.lost = self.lost.saturating_add(oldest - next);
        self.next[ring as usize] = oldest;
        Ok(())
    }

    /// Returns how many records the writer has written since record `seen`.
    ///
    /// The slots after that record hold newer records up to the newest, then older ones.
    fn written_since(&self, ring: u32, seen: u64) -> Result<u64, TraceError> {
        let (mut written, mut not) = (0, u64::from(self.header.capacity));
        while not - written > 1 {
            let middle = written + (not - written) / 2;
            let mut word = [0; 8];
            let read = self
                .file
                .read_exact_at(&mut word, self.position(ring, seen + middle));
            read.map_err(|e| self.unreadable(e))?;
            if u64::from_ne_bytes(word) > 2 * (seen + middle) {
                written = middle;
            } else {
                not = middle;
            }
        }
        Ok(written)
    }

    /// Returns the offset in the file of the slot of the record with this number.
    fn position(&self, ring: u32, number: u64) -> u64 {
        let slot = number % u64::from(self.header.capacity);
        HEADER as u64 + u64::from(ring) * self.header.ring_bytes() + slot * RECORD as u64
    }

    /// Reads the current value of the frequency, which the writer improves over time.
    fn recalibrate(&mut self) -> Result<(), TraceError> {
        let mut hz = [0; 8];
        let read = self.file.read_exact_at(&mut hz, AT_HZ as u64);
        read.map_err(|e| self.unreadable(e))?;
        self.header.hz = f64::from_ne_bytes(hz);
        self.header
            .check()
            .map_err(TraceError::unusable(&self.path))
    }

    fn unreadable(&self, error: io::Error) -> TraceError {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            let problem = "the trace was truncated while it was read";
            return TraceError::unusable(&self.path)(problem.into());
        }
        TraceError::io(&self.path)(error)
    }

    fn damaged(&self, ring: u32) -> TraceError {
        let problem = format!("the trace is damaged in ring {ring}");
        TraceError::unusable(&self.path)(problem)
    }
}
