//! A model of a disk's content, sector by sector, and random requests that are checked against it.

use super::{Ask, Guest, Memory};
use fathom_core::Op;
use proptest::prelude::*;

pub const SECTOR: u64 = 512;

/// Possible content of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    Stamp(u64),
    /// The sector was discarded: zeroes, or the former stamp.
    ZeroOr(u64),
    /// A write to the sector has failed.
    Anything,
}

impl Content {
    fn allows(self, stamp: u64) -> bool {
        match self {
            Content::Stamp(expected) => stamp == expected,
            Content::ZeroOr(other) => stamp == 0 || stamp == other,
            Content::Anything => true,
        }
    }
}

/// Returns the stamp that fills a sector, or None if the sector is torn.
fn stamp_of(sector: &[u8]) -> Option<u64> {
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    let first = word(&sector[..8]);
    let same = sector.chunks_exact(8).all(|bytes| word(bytes) == first);
    same.then_some(first)
}

/// Plan of a request, small enough for proptest to shrink.
#[derive(Clone, Debug)]
pub struct Plan {
    pub op: Op,
    pub sector: u64,
    pub sectors: u64,
    pub fua: bool,
    pub unmap: bool,
    /// Offset within a page of the first segment's address.
    pub misalign: usize,
    /// Offsets in bytes at which the data is split into segments.
    pub cuts: Vec<u64>,
    /// Number of bytes between segments.
    pub gap: usize,
    pub guest: usize,
}

pub fn plans(sectors: u64, guests: usize) -> impl Strategy<Value = Plan> {
    let op = prop_oneof![
        4 => Just(Op::Read),
        6 => Just(Op::Write),
        1 => Just(Op::Flush),
        1 => Just(Op::Discard),
        2 => Just(Op::WriteZeroes),
    ];
    let length = prop_oneof![8 => 1..24u64, 1 => 1..1200u64];
    let misalign =
        prop_oneof![3 => Just(0usize), 1 => 0..4096usize, 1 => (0..8usize).prop_map(|n| n * 512)];
    let cut = prop_oneof![(0..1200u64).prop_map(|n| n * SECTOR), 0..600_000u64];
    let place = (0..sectors, length, any::<bool>(), any::<bool>(), 0..guests);
    let memory = (misalign, prop::collection::vec(cut, 0..7), 0..3usize);
    (op, place, memory).prop_map(
        move |(op, (sector, length, fua, unmap, guest), (misalign, cuts, gap))| Plan {
            op,
            sector,
            sectors: length.min(sectors - sector),
            fua,
            unmap,
            misalign,
            cuts,
            gap: gap * 64,
            guest,
        },
    )
}

impl Plan {
    fn range(&self) -> std::ops::Range<usize> {
        self.sector as usize..(self.sector + self.sectors) as usize
    }

    fn overlaps(&self, other: &Plan) -> bool {
        self.sector < other.sector + other.sectors && other.sector < self.sector + self.sectors
    }

    /// Makes the request, with its data in scattered segments. `data` is for writes.
    fn ask(&self, data: Option<&[u8]>) -> Ask {
        let len = self.sectors * SECTOR;
        let mut ask = Ask::new(self.op, self.sector * SECTOR, len);
        ask.fua = self.fua && self.op != Op::Read;
        ask.unmap = self.unmap;
        if !matches!(self.op, Op::Read | Op::Write) {
            return ask;
        }
        let mut cuts: Vec<u64> = self.cuts.iter().map(|c| c % (len + 1)).collect();
        cuts.extend([0, len]);
        cuts.sort_unstable();
        cuts.dedup();
        let room = 2 * 4096 + len as usize + cuts.len() * self.gap;
        let mut memory = Memory::new(room, 0xee);
        let mut at = memory.bytes().as_ptr().align_offset(4096) + self.misalign;
        for ends in cuts.windows(2) {
            let n = (ends[1] - ends[0]) as usize;
            if let Some(data) = data {
                memory.bytes_mut()[at..at + n]
                    .copy_from_slice(&data[ends[0] as usize..ends[1] as usize]);
            }
            ask.segments.push((at, n));
            at += n + self.gap;
        }
        ask.memory = memory;
        ask
    }
}

/// The model of one disk.
pub struct Model {
    pub sectors: Vec<Content>,
    next_stamp: u64,
    /// Whether requests may fail.
    pub faults: bool,
    pub failures: usize,
}

impl Model {
    pub fn new(sectors: u64) -> Model {
        Model {
            sectors: vec![Content::Stamp(0); sectors as usize],
            next_stamp: 1,
            faults: false,
            failures: 0,
        }
    }

    /// Runs all requests, concurrently as far as they do not overlap, and checks the data that is
    /// read.
    pub fn run(&mut self, guests: &mut [Guest], plans: &[Plan]) {
        let mut rest = plans;
        while !rest.is_empty() {
            let apart = |n: &usize| (0..*n).all(|i| !rest[i].overlaps(&rest[*n]));
            let n = 1 + (1..rest.len().min(super::DEPTH)).take_while(apart).count();
            self.run_together(guests, &rest[..n]);
            rest = &rest[n..];
        }
    }

    fn run_together(&mut self, guests: &mut [Guest], plans: &[Plan]) {
        let mut asked = Vec::new();
        for plan in plans {
            let stamp = self.next_stamp;
            self.next_stamp += plan.sectors;
            let data: Vec<u8> = (stamp..stamp + plan.sectors)
                .flat_map(|stamp| stamp.to_le_bytes().repeat(SECTOR as usize / 8))
                .collect();
            let ask = plan.ask((plan.op == Op::Write).then_some(&data));
            asked.push((stamp, guests[plan.guest].queue(ask)));
        }
        guests.iter().for_each(Guest::kick);
        for (plan, (stamp, asked)) in plans.iter().zip(asked) {
            let (errno, ask) = guests[plan.guest].wait(asked);
            if errno == 0 {
                self.succeeded(plan, stamp, &ask);
            } else {
                assert!(self.faults, "{plan:?} failed with errno {errno}");
                self.failures += 1;
                self.failed(plan);
            }
        }
    }

    fn succeeded(&mut self, plan: &Plan, stamp: u64, ask: &Ask) {
        match plan.op {
            Op::Flush => {}
            Op::BlockStatus => unreachable!("not asked here"),
            Op::Read => self.check(plan.sector as usize, &ask.data()),
            Op::Write => {
                for (i, sector) in plan.range().enumerate() {
                    self.sectors[sector] = Content::Stamp(stamp + i as u64);
                }
            }
            Op::WriteZeroes => self.sectors[plan.range()].fill(Content::Stamp(0)),
            Op::Discard => {
                for content in &mut self.sectors[plan.range()] {
                    if let Content::Stamp(stamp) = *content {
                        *content = Content::ZeroOr(stamp);
                    }
                }
            }
        }
    }

    fn failed(&mut self, plan: &Plan) {
        if !matches!(plan.op, Op::Read | Op::Flush) {
            self.sectors[plan.range()].fill(Content::Anything);
        }
    }

    /// Checks `data`, which was read from sector `first` on.
    pub fn check(&mut self, first: usize, data: &[u8]) {
        for (i, found) in data.chunks_exact(SECTOR as usize).enumerate() {
            let expected = &mut self.sectors[first + i];
            match stamp_of(found) {
                Some(stamp) => {
                    assert!(
                        expected.allows(stamp),
                        "sector {}: stamp {stamp}, expected {expected:?}",
                        first + i
                    );
                    // The content is known from now on.
                    *expected = Content::Stamp(stamp);
                }
                None => assert_eq!(
                    *expected,
                    Content::Anything,
                    "sector {} is torn: {:x?}...",
                    first + i,
                    &found[..16]
                ),
            }
        }
    }
}
