//! Checks one queue's requests against the ledger.

use crate::error::{Error, Result};
use crate::ledger::Part;
use crate::memory::Buffer;
use crate::pattern::{self, Generation, UNKNOWN, ZEROES};
use crate::port::Op;

/// Marks a slot that is free or whose request touches no block.
const NONE: u64 = u64::MAX;

/// Checks the requests of one queue. No other queue uses its blocks, and no two requests in flight
/// touch the same block. Therefore the result of each read is known.
#[derive(Debug)]
pub struct Checker<'a> {
    part: Part<'a>,
    /// The block that each slot's request touches.
    busy: Vec<u64>,
    written: u64,
    checked: u64,
}

/// Number of verified blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Verified {
    /// Blocks written with a pattern or zeroes.
    pub written: u64,
    /// Blocks read with the expected contents, during the load and at the end.
    pub checked: u64,
}

impl<'a> Checker<'a> {
    pub fn new(part: Part<'a>, slots: u16) -> Checker<'a> {
        Checker {
            part,
            busy: vec![NONE; usize::from(slots)],
            written: 0,
            checked: 0,
        }
    }

    /// Returns whether a request in flight touches the block.
    pub fn is_busy(&self, block: u64) -> bool {
        self.busy.contains(&block)
    }

    /// Returns the first block at or after `from` that can be checked.
    pub fn next_known(&self, from: u64) -> Option<u64> {
        self.part.next_known(from)
    }

    /// Called before a request is queued. Fills the buffer of a write.
    pub fn start(&mut self, slot: u16, op: Op, block: u64, buffer: Buffer) {
        match op {
            Op::Read => {}
            Op::Write => {
                let generation = self.part.start_write(block);
                pattern::fill(
                    buffer,
                    self.part.seed(),
                    self.part.sector(block),
                    generation,
                );
            }
            Op::WriteZeroes => self.part.start(block, ZEROES),
            Op::Discard => self.part.forget(block),
            Op::Flush => return,
        }
        self.busy[usize::from(slot)] = block;
    }

    /// Called after a request has completed; `ok` means success. A failed write stays pending,
    /// because it may or may not have reached the disk.
    pub fn finish(&mut self, slot: u16, op: Op, ok: bool, buffer: Buffer) -> Result<()> {
        let block = std::mem::replace(&mut self.busy[usize::from(slot)], NONE);
        match op {
            _ if !ok => Ok(()),
            Op::Read => self.check(block, buffer),
            Op::Write | Op::WriteZeroes => {
                self.part.complete(block);
                self.written += 1;
                Ok(())
            }
            Op::Discard | Op::Flush => Ok(()),
        }
    }

    fn check(&mut self, block: u64, buffer: Buffer) -> Result<()> {
        let entry = self.part.entry(block);
        if entry.completed == UNKNOWN {
            return Ok(());
        }
        let both = [entry.completed, entry.pending];
        let allowed: &[Generation] = match entry.pending {
            UNKNOWN => &both[..1],
            _ => &both,
        };
        let (seed, sector) = (self.part.seed(), self.part.sector(block));
        if pattern::matches(buffer, seed, sector, allowed) {
            self.checked += 1;
            return Ok(());
        }
        Err(Error::Verify {
            block,
            offset: self.part.offset(block),
            expected: pattern::describe_expected(allowed),
            found: pattern::describe(buffer, seed, sector),
        })
    }

    /// Returns the counts so far.
    pub fn verified(&self) -> Verified {
        Verified {
            written: self.written,
            checked: self.checked,
        }
    }
}
