//! The expected contents of every block of the verified area.
//!
//! The ledger has two generations per block: the last completed write, and a write in flight. If
//! the run ends early, the write in flight stays recorded, and a later run knows that the block may
//! have either generation. A read that shows the newer one removes the older one. A ledger with a
//! state file is a mapping of that file. The file is valid at any time, even if this process is
//! killed.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

use crate::error::{Error, Result};
use crate::memory::Mapping;
use crate::pattern::{FIRST, Generation, UNKNOWN};
use crate::workload::{Range, mix};

/// Expected contents of a block.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Generation of the last completed write.
    pub completed: Generation,
    /// Generation of a write that was sent and has not completed. 0: none.
    pub pending: Generation,
}

/// The area that a ledger describes. A state file can be reused only for the same area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// Size of a block in bytes.
    pub block: u32,
    /// Offset of the area on the disk in bytes.
    pub offset: u64,
    pub blocks: u64,
}

const HEADER_LEN: usize = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"FATHOMV1");
/// Maximum number of blocks. More blocks need a ledger of more than 8 GiB, which is probably a
/// mistake.
const MAX_BLOCKS: u64 = 1 << 30;

/// Header at the start of a state file.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    magic: u64,
    seed: u64,
    block: u64,
    offset: u64,
    blocks: u64,
}

/// The expected contents of all blocks.
#[derive(Debug)]
pub struct Ledger {
    map: Mapping,
    blocks: usize,
    seed: u64,
    area: Area,
    /// Holds the lock of the state file. `None` for a ledger in memory.
    _file: Option<Locked>,
}

/// A file that is locked exclusively until this object is dropped.
#[derive(Debug)]
struct Locked(File);

impl Drop for Locked {
    fn drop(&mut self) {
        // Unlock explicitly: a child process forked meanwhile shares the file and its lock until
        // exec.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

impl Ledger {
    /// Creates a ledger that is not saved.
    pub fn in_memory(area: Area) -> Result<Ledger> {
        let len = file_len(&area)?;
        Ok(Ledger {
            map: Mapping::anonymous(len)?,
            blocks: area.blocks as usize,
            seed: fresh_seed(),
            area,
            _file: None,
        })
    }

    /// Opens or creates the state file, and locks it.
    pub fn open(path: &Path, area: Area) -> Result<Ledger> {
        let state = |what: String| Error::State {
            path: path.to_owned(),
            what,
        };
        let len = file_len(&area)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(|e| state(e.to_string()))?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| state("in use by another run".into()))?;
        let old_len = file.metadata().map_err(|e| state(e.to_string()))?.len();
        let is_new = old_len == 0;
        if is_new {
            file.set_len(len as u64).map_err(|e| state(e.to_string()))?;
        } else if old_len != len as u64 {
            return Err(state(format!(
                "made for another size or block size ({old_len} bytes, {len} needed)"
            )));
        }
        let map = Mapping::shared(file.as_fd(), len, false)?;
        let header: *mut Header = map.at(0, HEADER_LEN).cast();
        let mut wanted = Header {
            magic: MAGIC,
            seed: fresh_seed(),
            block: u64::from(area.block),
            offset: area.offset,
            blocks: area.blocks,
        };
        if is_new {
            // SAFETY: inside the mapping, page-aligned; the lock keeps others away.
            unsafe { header.write(wanted) };
        } else {
            // SAFETY: as above; any bytes are a valid `Header`.
            let found = unsafe { header.read() };
            wanted.seed = found.seed;
            if found != wanted {
                return Err(state("made for another area, or not a state file".into()));
            }
        }
        Ok(Ledger {
            map,
            blocks: area.blocks as usize,
            seed: wanted.seed,
            area,
            _file: Some(Locked(file)),
        })
    }

    /// Splits the ledger into the consecutive parts of the queues.
    pub fn split(&mut self, ranges: &[Range]) -> Vec<Part<'_>> {
        let entries: *mut Entry = self
            .map
            .at(HEADER_LEN, self.blocks * size_of::<Entry>())
            .cast();
        // SAFETY: the array is inside the mapping and aligned, and any bytes are valid entries.
        // `self` is borrowed mutably while the parts exist, and the lock keeps other processes
        // away.
        let mut rest = unsafe { std::slice::from_raw_parts_mut(entries, self.blocks) };
        let next = rest.iter().flat_map(|e| [e.completed, e.pending]).max();
        let next = after(next.unwrap_or(UNKNOWN));
        let mut parts = Vec::with_capacity(ranges.len());
        for range in ranges {
            let (own, others) = rest.split_at_mut(range.count as usize);
            rest = others;
            parts.push(Part {
                entries: own,
                first: range.first,
                next,
                seed: self.seed,
                area: self.area,
            });
        }
        parts
    }
}

/// Returns the generation after `g`.
fn after(g: Generation) -> Generation {
    g.checked_add(1).unwrap_or(FIRST).max(FIRST)
}

fn file_len(area: &Area) -> Result<usize> {
    if area.blocks > MAX_BLOCKS {
        return Err(Error::Options(format!(
            "--verify keeps track of at most {MAX_BLOCKS} blocks, not {}; give a smaller --size",
            area.blocks
        )));
    }
    Ok(HEADER_LEN + area.blocks as usize * size_of::<Entry>())
}

/// Returns a seed that differs from those of earlier runs, whose blocks may still be on the disk.
fn fresh_seed() -> u64 {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_nanos() as u64);
    mix(now ^ u64::from(std::process::id()) << 40)
}

/// The part of the ledger for the blocks of one queue.
#[derive(Debug)]
pub struct Part<'a> {
    entries: &'a mut [Entry],
    first: u64,
    next: Generation,
    seed: u64,
    area: Area,
}

impl Part<'_> {
    /// Returns the seed of the patterns.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the number of a block's first sector, which is part of its pattern.
    pub fn sector(&self, block: u64) -> u64 {
        self.offset(block) / u64::from(crate::options::SECTOR)
    }

    /// Returns the offset of a block on the disk in bytes.
    pub fn offset(&self, block: u64) -> u64 {
        self.area.offset + block * u64::from(self.area.block)
    }

    fn entry_mut(&mut self, block: u64) -> &mut Entry {
        &mut self.entries[(block - self.first) as usize]
    }

    /// Returns the expected contents of a block.
    pub fn entry(&self, block: u64) -> Entry {
        self.entries[(block - self.first) as usize]
    }

    /// Records that a write will be sent. Returns the generation to write.
    pub fn start_write(&mut self, block: u64) -> Generation {
        let generation = self.next;
        self.next = after(generation);
        self.start(block, generation);
        generation
    }

    /// Records that a write of `generation`, or of zeroes, will be sent.
    pub fn start(&mut self, block: u64, generation: Generation) {
        let entry = self.entry_mut(block);
        if entry.pending != UNKNOWN {
            // An earlier write is still pending, so the block may have three different contents
            // until this write completes.
            entry.completed = UNKNOWN;
        }
        entry.pending = generation;
    }

    /// Records that the block is being discarded: from now on it may have any contents.
    pub fn forget(&mut self, block: u64) {
        *self.entry_mut(block) = Entry {
            completed: UNKNOWN,
            pending: UNKNOWN,
        };
    }

    /// Records that the block's write has completed.
    pub fn complete(&mut self, block: u64) {
        let entry = self.entry_mut(block);
        entry.completed = entry.pending;
        entry.pending = UNKNOWN;
    }

    /// Returns the first block at or after `from` whose contents are known.
    pub fn next_known(&self, from: u64) -> Option<u64> {
        let skip = from.saturating_sub(self.first) as usize;
        let found = self
            .entries
            .iter()
            .skip(skip)
            .position(|e| e.completed != UNKNOWN);
        found.map(|i| self.first + (skip + i) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AREA: Area = Area {
        block: 4096,
        offset: 8192,
        blocks: 10,
    };
    const ALL: Range = Range {
        first: 0,
        count: 10,
    };

    #[test]
    fn a_state_file_remembers_completed_and_pending_writes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        let mut ledger = Ledger::open(&path, AREA).unwrap();
        let seed = ledger.seed;
        let mut part = ledger.split(&[ALL]).pop().unwrap();
        assert_eq!(part.start_write(3), FIRST);
        part.complete(3);
        assert_eq!(part.start_write(4), FIRST + 1);
        drop(ledger);

        let mut ledger = Ledger::open(&path, AREA).unwrap();
        assert_eq!(ledger.seed, seed);
        let ranges = [Range { first: 0, count: 4 }, Range { first: 4, count: 6 }];
        let mut parts = ledger.split(&ranges);
        assert_eq!(parts[0].entry(3).completed, FIRST);
        assert_eq!(parts[0].next_known(0), Some(3));
        assert_eq!(parts[1].entry(4).pending, FIRST + 1);
        assert_eq!(parts[1].next_known(4), None);
        assert_eq!(parts[0].start_write(0), FIRST + 2, "never used before");
        assert_eq!(parts[1].sector(4), (8192 + 4 * 4096) / 512);
    }

    #[test]
    fn write_after_an_unanswered_write_leaves_the_block_unknown() {
        let mut ledger = Ledger::in_memory(AREA).unwrap();
        let mut part = ledger.split(&[ALL]).pop().unwrap();
        part.start_write(1);
        part.complete(1);
        part.start_write(1);
        part.start_write(1);
        assert_eq!(part.entry(1).completed, UNKNOWN);
        part.complete(1);
        assert_ne!(part.entry(1).completed, UNKNOWN);
        part.forget(1);
        assert_eq!(part.next_known(0), None);
    }

    #[test]
    fn a_state_file_of_another_area_or_in_use_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        let first = Ledger::open(&path, AREA).unwrap();
        let busy = Ledger::open(&path, AREA).unwrap_err().to_string();
        assert!(busy.contains("in use"), "{busy}");
        drop(first);
        for other in [
            Area { blocks: 11, ..AREA },
            Area { offset: 0, ..AREA },
            Area { block: 512, ..AREA },
        ] {
            let e = Ledger::open(&path, other).unwrap_err().to_string();
            assert!(e.contains("another"), "{e}");
        }
    }
}
