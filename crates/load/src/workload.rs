//! Generates the sequence of requests.

use crate::options::{Load, Rw};
use crate::port::Op;

/// The wyrand random number generator, which needs one multiplication per number, and is good
/// enough for offsets.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Creates a generator. Different seeds give unrelated sequences.
    pub fn new(seed: u64) -> Rng {
        Rng(mix(seed))
    }

    /// Returns 64 random bits.
    #[inline(always)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0xa076_1d64_78bd_642f);
        let wide = u128::from(self.0) * u128::from(self.0 ^ 0xe703_7ed1_a0b4_28db);
        (wide >> 64) as u64 ^ wide as u64
    }

    /// Returns a number below `n`, which is uniform except for a bias of n / 2^64.
    #[inline(always)]
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }
}

/// The finalizer of splitmix64: every input bit affects every output bit.
pub fn mix(value: u64) -> u64 {
    let v = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let v = (v ^ (v >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let v = (v ^ (v >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    v ^ (v >> 31)
}

/// A range of blocks that a queue uses, counted from the start of the whole used area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub first: u64,
    pub count: u64,
}

/// How a queue's operations are chosen.
#[derive(Clone, Copy, Debug)]
enum Choice {
    Always(Op),
    /// Thresholds in percent: a draw below `trim` is a discard, and one below `zero` is a write of
    /// zeroes. Otherwise the operation is `other` or, without it, a second draw decides between
    /// read and write.
    Mixed {
        trim: u64,
        zero: u64,
        other: Option<Op>,
        reads: u64,
    },
}

/// An endless sequence of requests.
#[derive(Clone, Debug)]
pub struct Workload {
    rng: Rng,
    choice: Choice,
    random: bool,
    range: Range,
    /// Next block of a sequential workload, relative to the range.
    cursor: u64,
    fsync: u32,
    writes_since_flush: u32,
}

impl Workload {
    /// Creates the requests of queue `index` in `range`, which must not be empty.
    pub fn new(load: &Load, index: u16, range: Range) -> Workload {
        assert!(range.count > 0);
        Workload {
            rng: Rng::new(load.seed ^ mix(u64::from(index) + 1)),
            choice: choice(load),
            random: load.rw.is_random(),
            range,
            cursor: 0,
            fsync: load.fsync,
            writes_since_flush: 0,
        }
    }

    /// Returns the operation of the next request. A write counts towards `fsync`.
    #[inline(always)]
    pub fn op(&mut self) -> Op {
        if self.fsync != 0 && self.writes_since_flush >= self.fsync {
            self.writes_since_flush = 0;
            return Op::Flush;
        }
        let op = match self.choice {
            Choice::Always(op) => op,
            Choice::Mixed {
                trim,
                zero,
                other,
                reads,
            } => self.draw(trim, zero, other, reads),
        };
        self.writes_since_flush += u32::from(op == Op::Write);
        op
    }

    fn draw(&mut self, trim: u64, zero: u64, other: Option<Op>, reads: u64) -> Op {
        let r = self.rng.below(100);
        if r < trim {
            return Op::Discard;
        }
        if r < zero {
            return Op::WriteZeroes;
        }
        match other {
            Some(op) => op,
            None if self.rng.below(100) < reads => Op::Read,
            None => Op::Write,
        }
    }

    /// Returns the block of the next request.
    #[inline(always)]
    pub fn block(&mut self) -> u64 {
        if self.random {
            return self.range.first + self.rng.below(self.range.count);
        }
        let block = self.range.first + self.cursor;
        self.cursor += 1;
        if self.cursor == self.range.count {
            self.cursor = 0;
        }
        block
    }
}

fn choice(load: &Load) -> Choice {
    let trim = u64::from(load.rwmixtrim);
    let zero = trim + u64::from(load.rwmixzero);
    let only = match load.rw {
        Rw::Read | Rw::RandRead => Some(Op::Read),
        Rw::Write | Rw::RandWrite => Some(Op::Write),
        Rw::Trim | Rw::RandTrim => Some(Op::Discard),
        Rw::ReadWrite | Rw::RandRw => None,
    };
    match only {
        Some(op) if zero == 0 => Choice::Always(op),
        other => Choice::Mixed {
            trim,
            zero,
            other,
            reads: u64::from(load.rwmixread),
        },
    }
}

/// Returns the part of `blocks` that queue `index` of `queues` uses: its own slice if `own_slice`,
/// otherwise all blocks.
pub fn range_of(blocks: u64, index: u16, queues: u16, own_slice: bool) -> Range {
    if !own_slice {
        return Range {
            first: 0,
            count: blocks,
        };
    }
    let cut = |i: u16| (u128::from(blocks) * u128::from(i) / u128::from(queues)) as u64;
    let first = cut(index);
    Range {
        first,
        count: cut(index + 1) - first,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(rw: Rw) -> Load {
        Load {
            rw,
            ..Load::default()
        }
    }

    #[test]
    fn slices_cover_everything_once() {
        for (blocks, queues) in [(10u64, 3u16), (1 << 40, 7), (5, 5)] {
            let mut next = 0;
            for i in 0..queues {
                let r = range_of(blocks, i, queues, true);
                assert_eq!(r.first, next);
                next += r.count;
            }
            assert_eq!(next, blocks);
        }
    }

    #[test]
    fn sequential_wraps_and_random_stays_inside() {
        let range = Range {
            first: 100,
            count: 3,
        };
        let mut w = Workload::new(&load(Rw::Read), 0, range);
        let blocks: Vec<u64> = (0..7).map(|_| w.block()).collect();
        assert_eq!(blocks, [100, 101, 102, 100, 101, 102, 100]);
        let mut w = Workload::new(&load(Rw::RandRead), 0, range);
        let mut hits = [0u32; 3];
        (0..3000).for_each(|_| hits[(w.block() - 100) as usize] += 1);
        assert!(hits.iter().all(|h| *h > 800), "{hits:?}");
    }

    #[test]
    fn mixes_have_the_shares_that_were_asked_for() {
        let range = Range { first: 0, count: 9 };
        let mixed = Load {
            rwmixread: 70,
            rwmixtrim: 10,
            rwmixzero: 20,
            fsync: 10,
            ..load(Rw::RandRw)
        };
        let mut w = Workload::new(&mixed, 0, range);
        let mut n = [0u32; 5];
        (0..100_000).for_each(|_| n[w.op() as usize] += 1);
        let share = |op: Op| f64::from(n[op as usize]) / 100_000.0;
        let flushes = share(Op::Flush);
        let close = |a: f64, b: f64| (a - b).abs() < 0.01;
        assert!(close(flushes, share(Op::Write) / 10.0), "{n:?}");
        assert!(close(share(Op::Discard), 0.1 * (1.0 - flushes)), "{n:?}");
        assert!(
            close(share(Op::WriteZeroes), 0.2 * (1.0 - flushes)),
            "{n:?}"
        );
        assert!(close(share(Op::Read), 0.7 * 0.7 * (1.0 - flushes)), "{n:?}");
    }
}
