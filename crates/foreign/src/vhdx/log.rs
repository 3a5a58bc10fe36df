//! The log (2.3): a file that was not closed has changes there that have to be
//! made before it is read.

use super::header::Log;
use super::journal::{Change, Entry, SECTOR};
use crate::error::{Error, Result};
use crate::source::Source;

/// What is looked at: programs make logs of 1 MiB.
const MAX_LEN: u32 = 32 << 20;

/// Bytes of all entries that are looked at. Each sector could claim to start
/// one that goes all around.
const MAX_WORK: usize = 8 * MAX_LEN as usize;

/// Changes at most, and bytes that they make zeroes: what is read is looked for in all of them.
const MAX_CHANGES: usize = 1 << 16;
const MAX_ZEROES: u64 = 4 << 30;

/// Entries that follow each other.
struct Sequence {
    /// Where each starts.
    starts: Vec<usize>,
    /// The newest one.
    head: Entry,
    /// Bytes of all.
    len: usize,
}

struct Ring {
    bytes: Vec<u8>,
    guid: [u8; 16],
    work: usize,
}

/// The changes that the log has, in their order; none if it is empty.
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
    // A GUID without entries is left behind when a program ends between
    // announcing the first one and writing it. QEMU takes that as no log.
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

/// For what is not done here.
pub fn must_be_replayed() -> Error {
    Error::unsupported(
        "this VHDX image was not closed, and its log has changes that are not made here: open it \
         once with its own program, or run `qemu-img check -r all` on it",
    )
}

impl Ring {
    /// The sequence that counts (2.3.3): the newest of those that have the
    /// entry from which on they are needed.
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

    /// The entry at `start` and its changes, if it is valid.
    fn entry(&mut self, start: usize) -> Result<Option<(Entry, Vec<Change>)>> {
        let Some(entry) = self.peek(start) else {
            return Ok(None);
        };
        let left = self.work.checked_sub(entry.len);
        self.work = left.ok_or_else(must_be_replayed)?;
        // It may go on at the log's start.
        let straight = entry.len.min(self.bytes.len() - start);
        let mut bytes = self.bytes[start..start + straight].to_vec();
        bytes.extend_from_slice(&self.bytes[..entry.len - straight]);
        Ok(entry.changes(&bytes).map(|changes| (entry, changes)))
    }
}
