//! Splits requests that cannot go directly to the engine into pieces.

use crate::buffers::BUFFER_LEN;
use fathom_core::{IoKind, Op};
use libc::{FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE};
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};

/// Maximum length in bytes of one write of zeroes.
const MAX_ZERO_WRITE: u64 = 1 << 20;

/// Methods by which the storage itself discards or zeroes a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u8)]
pub(super) enum Method {
    /// Deallocates the range; reads return zeroes afterwards.
    #[default]
    PunchHole,
    /// Zeroes the range and keeps it allocated.
    ZeroRange,
    /// Discards the range of a device; reads may return any data afterwards.
    DeviceDiscard,
}

impl Method {
    pub(super) fn io_kind(self) -> IoKind {
        let mode = match self {
            Method::PunchHole => FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            Method::ZeroRange => FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE,
            Method::DeviceDiscard => crate::engine::DEVICE_DISCARD,
        };
        IoKind::Allocate { mode }
    }
}

/// Set of methods that the file has turned out not to support.
#[derive(Debug, Default)]
pub(super) struct Unsupported(AtomicU8);

impl Unsupported {
    pub(super) fn add(&self, method: Method) {
        self.0.fetch_or(1 << method as u8, Ordering::Relaxed);
    }

    fn contains(&self, method: Method) -> bool {
        self.0.load(Ordering::Relaxed) & 1 << method as u8 != 0
    }
}

/// How to carry out a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Through a buffer; partial blocks are read, changed and written back.
    Buffer,
    /// Writes zeroes to whole blocks.
    WriteZeroes,
    Allocate(Method),
    /// Does nothing: discards are advisory.
    Skip,
}

/// The next bytes of a request, up to `end`, in bytes from the start of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) end: u64,
    pub(super) action: Action,
}

/// Plans the pieces of one file's requests. Units are powers of two, in bytes.
#[derive(Debug)]
pub(super) struct Planner {
    /// Alignment of reads and writes; 1 if none is required.
    pub(super) block: u64,
    /// Alignment of fallocate(2); 1 if none is required.
    pub(super) allocation_unit: u64,
    pub(super) is_device: bool,
    /// Whether write zeroes may deallocate.
    pub(super) may_unmap: bool,
    pub(super) unsupported: Unsupported,
}

impl Planner {
    /// Returns the first piece of a non-empty range.
    pub(super) fn plan(&self, op: Op, unmap: bool, range: Range<u64>) -> Piece {
        let methods: &[Method] = match op {
            Op::Read | Op::Write | Op::Flush | Op::BlockStatus => return self.buffered(range),
            Op::Discard if self.is_device => &[Method::PunchHole, Method::DeviceDiscard],
            Op::Discard => &[Method::PunchHole],
            Op::WriteZeroes if unmap && self.may_unmap => &[Method::PunchHole, Method::ZeroRange],
            Op::WriteZeroes => &[Method::ZeroRange],
        };
        let method = methods.iter().find(|m| !self.unsupported.contains(**m));
        let whole = whole_units(&range, self.allocation_unit);
        let by_hand = match method {
            Some(method) if !whole.is_empty() && whole.start == range.start => {
                return Piece {
                    end: whole.end,
                    action: Action::Allocate(*method),
                };
            }
            Some(_) if !whole.is_empty() => range.start..whole.start,
            _ => range,
        };
        match op {
            Op::Discard => Piece {
                end: by_hand.end,
                action: Action::Skip,
            },
            _ => self.written(by_hand),
        }
    }

    /// Returns a piece of as many bytes as a buffer holds.
    fn buffered(&self, range: Range<u64>) -> Piece {
        let outer_start = range.start & !(self.block - 1);
        Piece {
            end: range.end.min(outer_start + BUFFER_LEN as u64),
            action: Action::Buffer,
        }
    }

    /// Returns a piece of zeroes to write: whole blocks, or a part of a block at an edge.
    fn written(&self, range: Range<u64>) -> Piece {
        let whole = whole_units(&range, self.block);
        if !whole.is_empty() && whole.start == range.start {
            return Piece {
                end: whole.end.min(whole.start + MAX_ZERO_WRITE),
                action: Action::WriteZeroes,
            };
        }
        let part_end = range
            .end
            .min((range.start + 1).next_multiple_of(self.block));
        Piece {
            end: part_end,
            action: Action::Buffer,
        }
    }
}

/// Returns the whole units within a range; may be empty.
fn whole_units(range: &Range<u64>, unit: u64) -> Range<u64> {
    range.start.next_multiple_of(unit)..range.end & !(unit - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn planner(block: u64, allocation_unit: u64, unsupported: u8) -> Planner {
        Planner {
            block,
            allocation_unit,
            is_device: allocation_unit > 1,
            may_unmap: true,
            unsupported: Unsupported(AtomicU8::new(unsupported)),
        }
    }

    /// Returns all pieces of a request, with their starts.
    fn pieces(planner: &Planner, op: Op, range: Range<u64>) -> Vec<(u64, Piece)> {
        let mut start = range.start;
        let mut pieces = Vec::new();
        while start < range.end {
            let piece = planner.plan(op, true, start..range.end);
            assert!(start < piece.end && piece.end <= range.end);
            pieces.push((start, piece));
            start = piece.end;
        }
        pieces
    }

    #[test]
    fn the_storage_zeroes_what_it_can_and_the_edges_are_written() {
        let planner = planner(4096, 4096, 0);
        let all = pieces(&planner, Op::WriteZeroes, 512..16384 + 512);
        let actions: Vec<_> = all.iter().map(|(_, p)| (p.end, p.action)).collect();
        assert_eq!(
            actions,
            [
                (4096, Action::Buffer),
                (16384, Action::Allocate(Method::PunchHole)),
                (16384 + 512, Action::Buffer),
            ]
        );
        let all = pieces(&planner, Op::Discard, 512..16384 + 512);
        let actions: Vec<_> = all.iter().map(|(_, p)| p.action).collect();
        let punch = Action::Allocate(Method::PunchHole);
        assert_eq!(actions, [Action::Skip, punch, Action::Skip]);
    }

    #[test]
    fn what_is_unsupported_is_not_tried_again() {
        let planner = planner(1, 512, 0);
        let first = |op| planner.plan(op, true, 0..1 << 30).action;
        planner.unsupported.add(Method::PunchHole);
        assert_eq!(first(Op::Discard), Action::Allocate(Method::DeviceDiscard));
        assert_eq!(first(Op::WriteZeroes), Action::Allocate(Method::ZeroRange));
        planner.unsupported.add(Method::DeviceDiscard);
        planner.unsupported.add(Method::ZeroRange);
        assert_eq!(first(Op::Discard), Action::Skip);
        assert_eq!(first(Op::WriteZeroes), Action::WriteZeroes);
    }

    proptest! {
        #[test]
        fn pieces_respect_the_units(
            block in prop::sample::select(vec![1u64, 512, 4096]),
            unit in prop::sample::select(vec![1u64, 512, 4096]),
            unsupported in 0u8..8,
            start in 0u64..64,
            len in 1u64..4096,
            zeroes: bool,
        ) {
            let planner = planner(block, unit, unsupported);
            let op = if zeroes { Op::WriteZeroes } else { Op::Discard };
            let range = start * 512..(start + len) * 512;
            for (start, piece) in pieces(&planner, op, range) {
                let aligned = |unit| start % unit == 0 && piece.end % unit == 0;
                match piece.action {
                    Action::Allocate(_) => prop_assert!(aligned(unit)),
                    Action::WriteZeroes => {
                        prop_assert!(aligned(block));
                        prop_assert!(piece.end - start <= MAX_ZERO_WRITE);
                    }
                    Action::Buffer => {
                        prop_assert!(!aligned(block), "whole blocks need no buffer");
                        prop_assert_eq!(start / block, (piece.end - 1) / block);
                    }
                    Action::Skip => prop_assert_eq!(op, Op::Discard),
                }
            }
        }
    }
}
