//! The trace ring: one record of fixed size per request, in a file that another process can read
//! while it is written.
//!
//! Layout, in the machine's byte order: a header page (see [`header`](self::header)), then for each
//! worker's ring its records of 96 bytes. Each ring has one writer, which never waits. A reader
//! that is too slow loses the oldest records, and knows how many.
//!
//! A record starts with its sequence word. The writer of the n-th record (from 0) stores 2n+1 in
//! this word, then the record, then 2n+2. A reader that finds 2n+2 both before and after its copy
//! has the whole record.

mod header;
mod reader;
mod wire;
mod writer;

use crate::stage::{Op, Stage};
use fathom_units::cause;
use std::io;
use std::path::{Path, PathBuf};

pub use header::Header;
pub use reader::{Entry, RingReader};
pub use wire::Wire;
pub use writer::{RingFile, RingWriter};

/// A finished request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    /// Clock ticks at the start of each stage in turn, then at the end of the last stage.
    pub stamps: [u64; Stage::COUNT + 1],
    /// Offset in bytes from the start of the disk.
    pub offset: u64,
    /// Length of the request in bytes.
    pub len: u64,
    /// Number of the virtqueue on the disk, or of the NBD connection on the server modulo 65536.
    pub queue: u16,
    /// Operation of the request.
    pub op: Op,
    /// 0, or the errno that the request failed with.
    pub error: i32,
    /// Whether polling rather than a kick detected the request.
    pub polled: bool,
    /// Cookie by which another host identifies the request.
    pub wire: Wire,
}

/// Why a file cannot be used as a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A system call on the file failed.
    #[error("{}: {}", path.display(), cause(source))]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// The file cannot be used as a trace.
    #[error("{}: {problem}", path.display())]
    Unusable {
        /// Path of the file.
        path: PathBuf,
        /// Reason for the user.
        problem: String,
    },
}

impl TraceError {
    fn io(path: &Path) -> impl Fn(io::Error) -> TraceError {
        move |source| TraceError::Io {
            path: path.to_owned(),
            source,
        }
    }

    fn unusable(path: &Path) -> impl Fn(String) -> TraceError {
        move |problem| TraceError::Unusable {
            path: path.to_owned(),
            problem,
        }
    }
}

/// Limit of record numbers, which no writer reaches.
const MAX_NUMBER: u64 = 1 << 60;

/// Number of 8-byte words in a record.
const WORDS: usize = 12;
/// Number of bytes in a record.
const RECORD: usize = WORDS * 8;
/// Indices of words in a record: the sequence word and the stamps come first, then these words.
const OFFSET: usize = 1 + Stage::COUNT + 1;
const LEN: usize = OFFSET + 1;
/// From the lowest bit: queue (16 bits), op (8), polled (1), kind of the cookie (7), error (32).
const REST: usize = LEN + 1;
const COOKIE: usize = REST + 1;

const _: () = assert!(COOKIE < WORDS);

/// The words of a record without the sequence word.
type Payload = [u64; WORDS - 1];

#[inline]
fn encode(record: &TraceRecord) -> Payload {
    let mut words = [0; WORDS - 1];
    words[..Stage::COUNT + 1].copy_from_slice(&record.stamps);
    words[OFFSET - 1] = record.offset;
    words[LEN - 1] = record.len;
    let (kind, cookie) = record.wire.to_words();
    words[REST - 1] = u64::from(record.queue)
        | u64::from(record.op as u8) << 16
        | u64::from(record.polled) << 24
        | u64::from(kind) << 25
        | u64::from(record.error as u32) << 32;
    words[COOKIE - 1] = cookie;
    words
}

/// Decodes a record. Returns `None` if no writer can have written these words.
fn decode(words: &Payload) -> Option<TraceRecord> {
    let rest = words[REST - 1];
    let stamps: [u64; Stage::COUNT + 1] = words[..Stage::COUNT + 1].try_into().ok()?;
    if !stamps.is_sorted() {
        return None;
    }
    Some(TraceRecord {
        stamps,
        offset: words[OFFSET - 1],
        len: words[LEN - 1],
        queue: rest as u16,
        op: Op::from_u8((rest >> 16) as u8)?,
        polled: rest >> 24 & 1 == 1,
        wire: Wire::from_words((rest >> 25) as u8 & 0x7f, words[COOKIE - 1])?,
        error: (rest >> 32) as i32,
    })
}

#[cfg(test)]
mod tests;
