//! Allocation states of the parts of a disk.

use crate::error::Error;
use std::ops::Range;

/// Allocation state of a part of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Contains data that has to be read.
    Data,
    /// Reads as zeroes, because an image records zeroes there.
    Zero,
    /// Reads as zeroes, because nothing is allocated there.
    Hole,
    /// Not allocated in any of the examined images; a lower image of the chain decides.
    Below,
}

impl State {
    /// Returns whether the part is known to read as zeroes.
    pub fn is_zero(self) -> bool {
        matches!(self, State::Zero | State::Hole)
    }
}

/// A part of a disk with a single allocation state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Range in bytes of the disk.
    pub range: Range<u64>,
    pub state: State,
}

/// Iterator over the segments of a disk, in order and without gaps.
pub type Segments<'a> = Box<dyn Iterator<Item = Result<Segment, Error>> + 'a>;
