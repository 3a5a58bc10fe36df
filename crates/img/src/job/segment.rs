//! What the parts of a disk are.

use crate::error::Error;
use std::ops::Range;

/// What is known of a part of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has to be read.
    Data,
    /// It reads as zeroes, and an image says so.
    Zero,
    /// It reads as zeroes, since nothing is there.
    Hole,
    /// None of the images that were looked at decides.
    Below,
}

impl State {
    /// Whether it is known to read as zeroes.
    pub fn is_zero(self) -> bool {
        matches!(self, State::Zero | State::Hole)
    }
}

/// A part of a disk that is all alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// In bytes of the disk.
    pub range: Range<u64>,
    pub state: State,
}

/// The parts of a disk, in order and without gaps.
pub type Segments<'a> = Box<dyn Iterator<Item = Result<Segment, Error>> + 'a>;
