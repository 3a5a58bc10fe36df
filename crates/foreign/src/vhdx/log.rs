//! The log (section 2.3).
//!
//! If a file was not closed properly, the changes in its log must be applied before it is read.

use super::header::Log;
use super::journal::{Change, Entry, SECTOR};
use crate::error::{Error, Result};
use crate::source::Source;

/// Maximum supported size of a log in bytes. Programs create logs of 1 MiB.
const MAX_LEN: u32 = 32 << 20;

/// Maximum total size in bytes of all entries that are parsed.
///
/// The limit is needed because each sector could claim to start an entry as large as the log.
const MAX_WORK: usize = 8 * MAX_LEN as usize;

/// Maximum number of changes; the constant below limits the bytes that they zero.
///
/// Both limits bound the work of a read, which searches all changes.
const MAX_CHANGES: usize = 1 << 16;
const MAX_ZEROES: u64 = 4 << 30;

/// A sequence of consecutive log entries.
struct Sequence {
    /// Offsets in the log at which the entries start.
    starts: Vec<usize>,
    /// The newest entry.
    head: Entry,
    /// Total size of the entries in bytes.
    len: usize,
}

struct Ring {
    bytes: Vec<u8>,
    guid: [u8; 16],
    work: usize,
}

/// Returns the changes in the log, in the order of their entries; none if the log is empty.
pub fn changes(source: &Source, log: &Log) -> Result<Vec<Change>> {
    if log.guid == [0; 16] || log.len == 0 {
        return Ok(Vec::new());
    }
    if log.len > MAX_LEN {
        return Err(must_be_replayed());
    }
    let mut bytes = vec![0; log.len as usize];
    source.read(&mut bytes, log.at, "its log")?;
    let mut ring = Ring {
        bytes,
        guid: log.guid,
        work: MAX_WORK,
    };
    // A program that ends between announcing the first entry and writing it leaves a GUID without
    // entries. QEMU treats such a log as empty.
    let Some(active) = ring.active()? else {
        return Ok(Vec::new());
    };
    if active.head.flushed > source.len {
        return Err(Error::damaged(format!(
            "its file had {} bytes, but now it ends at {}",
            active.head.flushed, source.len
        )));
    }
    let mut changes = Vec::new();
    let needed = { active.starts.iter() }.skip_while(|start| **start != active.head.tail);
    for start in needed {
        let (_, more) = ring.entry(*start)?.ok_or_else(must_be_replayed)?;
        changes.extend(more);
    }
    let mut zeroes = changes.iter().filter(|change| change.data.is_none());
    let zeroes = zeroes.try_fold(0_u64, |sum, change| sum.checked_add(change.len));
    match changes.len() <= MAX_CHANGES && zeroes.is_some_and(|sum| sum <= MAX_ZEROES) {
        true => Ok(changes),
        false => Err(must_be_replayed()),
    }
}

/// Returns the error for a log that Fathom does not replay.
pub fn must_be_replayed() -> Error {
    Error::unsupported(
        "this VHDX image was not closed, and its log has changes that are not made here: open it \
         once with its own program, or run `qemu-img check -r all` on it",
    )
}

impl Ring {
    /// Returns the active sequence (section 2.3.3).
    ///
    /// The active sequence is the newest one that contains the oldest entry that its head still
    /// needs.
    fn active(&mut self) -> Result<Option<Sequence>> {
        let mut best: Option<Sequence> = None;
        let mut tail = 0;
        while tail < self.bytes.len() {
            let Some(found) = self.sequence(tail)? else {
                tail += SECTOR;
                continue;
            };
            tail += found.len;
            let newest = best.as_ref().map_or(0, |best| best.head.sequence);
            if found.starts.contains(&found.head.tail) && found.head.sequence > newest {
                best = Some(found);
            }
        }
        Ok(best)
    }

    fn sequence(&mut self, tail: usize) -> Result<Option<Sequence>> {
        let Some((head, _)) = self.entry(tail)? else {
            return Ok(None);
        };
        let mut found = Sequence {
            starts: vec![tail],
            head,
            len: head.len,
        };
        while found.len < self.bytes.len() {
            let start = (tail + found.len) % self.bytes.len();
            let next = match self.peek(start) {
                Some(next) if Some(next.sequence) == found.head.sequence.checked_add(1) => {
                    self.entry(start)?
                }
                _ => None,
            };
            let Some((next, _)) = next else { break };
            found.starts.push(start);
            found.head = next;
            found.len += next.len;
        }
        Ok(Some(found))
    }

    fn peek(&self, start: usize) -> Option<Entry> {
        let sector = &self.bytes[start..start + SECTOR];
        Entry::parse(sector, &self.guid, self.bytes.len())
    }

    /// Returns the entry at `start` and its changes, or `None` if the entry is invalid.
    fn entry(&mut self, start: usize) -> Result<Option<(Entry, Vec<Change>)>> {
        let Some(entry) = self.peek(start) else {
            return Ok(None);
        };
        let left = self.work.checked_sub(entry.len);
        self.work = left.ok_or_else(must_be_replayed)?;
        // The entry may wrap around to the start of the log.
        let straight = entry.len.min(self.bytes.len() - start);
        let mut bytes = self.bytes[start..start + straight].to_vec();
        bytes.extend_from_slice(&self.bytes[..entry.len - straight]);
        Ok(entry.changes(&bytes).map(|changes| (entry, changes)))
    }
}
