//! Checks one queue's requests against the ledger.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::ledger::{Entry, Part};
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
    /// Blocks that were read with some sectors of the generation before an unanswered write, and
    /// some of the write's: whether each sector had the write's. Only this run remembers it.
    torn: BTreeMap<u64, Box<[bool]>>,
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
            torn: BTreeMap::new(),
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

    /// Called before a request is queued. Fills the buffer of a write, and removes old data from
    /// the buffer of a read.
    pub fn start(&mut self, slot: u16, op: Op, block: u64, buffer: Buffer) {
        if !self.torn.is_empty() && !matches!(op, Op::Read | Op::Flush) {
            self.torn.remove(&block);
        }
        match op {
            Op::Read => pattern::mark_unread(buffer),
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
        let (seed, sector) = (self.part.seed(), self.part.sector(block));
        let is = |generation| pattern::matches(buffer, seed, sector, &[generation]);
        let is_right = match (entry.completed, entry.pending) {
            (UNKNOWN, UNKNOWN) => return Ok(()),
            (UNKNOWN, pending) => {
                // Any contents are right until the unanswered write was seen.
                if is(pending) {
                    self.part.complete(block);
                }
                return Ok(());
            }
            (completed, UNKNOWN) => is(completed),
            (old, new) => self.is_either(block, old, new, buffer),
        };
        if is_right {
            self.checked += 1;
            return Ok(());
        }
        Err(Error::Verify {
            block,
            offset: self.part.offset(block),
            expected: self.expected(block, entry),
            found: pattern::describe(buffer, seed, sector),
        })
    }

    /// Returns whether the contents of a block are right whose last write was not answered, because
    /// it failed or the server crashed: each sector has the generation before the write, or the
    /// write's. A sector that had the write's generation once must keep it.
    fn is_either(&mut self, block: u64, old: Generation, new: Generation, buffer: Buffer) -> bool {
        let (seed, sector) = (self.part.seed(), self.part.sector(block));
        let seen = self.torn.get(&block);
        if seen.is_none() && pattern::matches(buffer, seed, sector, &[old]) {
            // The write may still be in progress below the server.
            return true;
        }
        if pattern::matches(buffer, seed, sector, &[new]) {
            self.torn.remove(&block);
            self.part.complete(block);
            return true;
        }
        let is = |s: usize, generation| {
            pattern::sector_is(buffer, s, seed, sector + s as u64, generation)
        };
        let sectors = buffer.words() / pattern::SECTOR_WORDS;
        let newer: Box<[bool]> = (0..sectors).map(|s| is(s, new)).collect();
        let may_be_old = |s: usize| seen.is_none_or(|seen| !seen[s]);
        let is_right = (0..sectors).all(|s| newer[s] || may_be_old(s) && is(s, old));
        if is_right {
            self.torn.insert(block, newer);
        }
        is_right
    }

    /// Describes the contents that a block should have, for an error message.
    fn expected(&self, block: u64, entry: Entry) -> String {
        let completed = pattern::describe_expected(&[entry.completed]);
        let pending = pattern::describe_expected(&[entry.pending]);
        match (entry.pending, self.torn.contains_key(&block)) {
            (UNKNOWN, _) => completed,
            (_, false) => format!("{completed} or {pending}"),
            (_, true) => format!("{pending} where it was read before, else {completed}"),
        }
    }

    /// Returns the counts so far.
    pub fn verified(&self) -> Verified {
        Verified {
            written: self.written,
            checked: self.checked,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Area, Ledger};
    use crate::pattern::{FIRST, SECTOR_WORDS};
    use crate::workload::Range;

    const BLOCK: u64 = 3;
    const SECTORS: usize = 8;
    const AREA: Area = Area {
        block: 512 * SECTORS as u32,
        offset: 0,
        blocks: 10,
    };
    const ALL: Range = Range {
        first: 0,
        count: 10,
    };

    /// A request's data.
    struct Data(Vec<u64>);

    impl Data {
        fn new() -> Data {
            Data(vec![0; SECTORS * SECTOR_WORDS])
        }

        fn buffer(&mut self) -> Buffer {
            let len = self.0.len() * 8;
            // SAFETY: the vector is aligned to 8 and not touched otherwise while the returned
            // buffer is in use.
            unsafe { Buffer::new(self.0.as_mut_ptr().cast(), len) }
        }
    }

    /// Reads [`BLOCK`], whose first `newer` sectors have the second generation of this test, and
    /// the others the first.
    fn read(checker: &mut Checker<'_>, newer: usize) -> Result<()> {
        let (seed, sector) = (checker.part.seed(), checker.part.sector(BLOCK));
        let (mut data, mut new) = (Data::new(), Data::new());
        checker.start(0, Op::Read, BLOCK, data.buffer());
        pattern::fill(data.buffer(), seed, sector, FIRST);
        pattern::fill(new.buffer(), seed, sector, FIRST + 1);
        let end = newer * SECTOR_WORDS;
        data.0[..end].copy_from_slice(&new.0[..end]);
        checker.finish(0, Op::Read, true, data.buffer())
    }

    /// Writes [`BLOCK`]; the write is answered or not.
    fn write(checker: &mut Checker<'_>, answered: bool) {
        let mut data = Data::new();
        checker.start(0, Op::Write, BLOCK, data.buffer());
        checker
            .finish(0, Op::Write, answered, data.buffer())
            .unwrap();
    }

    /// Runs `test` after one write that was answered, and one that was not.
    fn after_a_crash(test: impl FnOnce(&mut Checker<'_>)) {
        let mut ledger = Ledger::in_memory(AREA).unwrap();
        let part = ledger.split(&[ALL]).pop().unwrap();
        let mut checker = Checker::new(part, 1);
        write(&mut checker, true);
        write(&mut checker, false);
        test(&mut checker);
    }

    #[test]
    fn older_generation_after_a_newer_one_is_an_error() {
        after_a_crash(|checker| {
            // The unanswered write may reach the disk late, but it cannot be taken back.
            read(checker, 0).unwrap();
            read(checker, 0).unwrap();
            read(checker, SECTORS).unwrap();
            read(checker, SECTORS).unwrap();
            let error = read(checker, 0).unwrap_err().to_string();
            let wanted = "expected generation 3, found generation 2";
            assert!(error.contains(wanted), "{error}");
            assert_eq!(checker.verified().checked, 4);
        });
    }

    #[test]
    fn sector_of_a_torn_block_never_becomes_older() {
        after_a_crash(|checker| {
            read(checker, 3).unwrap();
            read(checker, 5).unwrap();
            let error = read(checker, 3).unwrap_err().to_string();
            let wanted = "expected generation 3 where it was read before, else generation 2";
            assert!(error.contains(wanted), "{error}");
            read(checker, 0).unwrap_err();
            read(checker, SECTORS).unwrap();
            read(checker, 5).unwrap_err();
        });
        // A new write ends the uncertainty, also that about sectors.
        after_a_crash(|checker| {
            read(checker, 3).unwrap();
            write(checker, false);
            read(checker, 0).unwrap();
            read(checker, 3).unwrap();
        });
    }

    #[test]
    fn first_write_that_was_seen_without_an_answer_must_stay() {
        let mut ledger = Ledger::in_memory(AREA).unwrap();
        let part = ledger.split(&[ALL]).pop().unwrap();
        let mut checker = Checker::new(part, 1);
        write(&mut checker, false);
        read(&mut checker, SECTORS).unwrap();
        read(&mut checker, 0).unwrap();
        let error = read(&mut checker, SECTORS).unwrap_err().to_string();
        assert!(error.contains("expected generation 2"), "{error}");
    }

    #[test]
    fn data_of_an_earlier_request_is_not_what_was_read() {
        let mut ledger = Ledger::in_memory(AREA).unwrap();
        let part = ledger.split(&[ALL]).pop().unwrap();
        let mut checker = Checker::new(part, 1);
        let mut slot = Data::new();
        checker.start(0, Op::Write, BLOCK, slot.buffer());
        checker.finish(0, Op::Write, true, slot.buffer()).unwrap();
        // The read transfers nothing, and the buffer had the block's data before.
        checker.start(0, Op::Read, BLOCK, slot.buffer());
        let error = checker.finish(0, Op::Read, true, slot.buffer());
        let error = error.unwrap_err().to_string();
        assert!(error.contains("found no data"), "{error}");
    }
}
