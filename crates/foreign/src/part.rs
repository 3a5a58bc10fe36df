//! The parts of an image, for all formats.

use crate::blocks::Blocks;
use crate::describe::Description;
use crate::place::{Extent, Place};

/// A contiguous part of the guest's disk.
#[derive(Debug)]
pub struct Part {
    /// Offset on the disk in bytes.
    pub start: u64,
    /// Size in bytes; not 0.
    pub len: u64,
    pub file: usize,
    pub layout: Layout,
}

#[derive(Debug)]
pub enum Layout {
    /// The part contains only zeroes.
    Zero,
    /// The part's data is contiguous in its file, starting at the offset `at`.
    Flat { at: u64 },
    /// Tables locate the part's blocks.
    Blocks(Blocks),
}

impl Part {
    /// Looks up `offset`, which is relative to the start of the part and must be inside it.
    pub fn lookup(&self, offset: u64, len: u64) -> Extent {
        let rest = len.min(self.len - offset);
        let place = match &self.layout {
            Layout::Zero => Place::Zero,
            Layout::Flat { at } => Place::Data {
                file: self.file,
                at: at + offset,
            },
            Layout::Blocks(blocks) => return blocks.lookup(offset, rest, self.file),
        };
        Extent { len: rest, place }
    }
}

/// An image that has been read.
#[derive(Debug)]
pub struct Disk {
    /// Parts in the order of the disk, without gaps.
    pub parts: Vec<Part>,
    pub description: Description,
}

impl Disk {
    /// Creates a disk of one part, whose size is that of the description.
    pub fn of(layout: Layout, description: Description) -> Disk {
        let part = Part {
            start: 0,
            len: description.size,
            file: 0,
            layout,
        };
        Disk {
            parts: (part.len > 0).then_some(part).into_iter().collect(),
            description,
        }
    }
}
