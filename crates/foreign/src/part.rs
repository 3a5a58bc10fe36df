//! What an image is made of, whatever its format.

use crate::blocks::Blocks;
use crate::describe::Description;
use crate::place::{Extent, Place};

/// A part of the guest's disk.
#[derive(Debug)]
pub struct Part {
    /// Bytes of the disk before it.
    pub start: u64,
    /// In bytes; not 0.
    pub len: u64,
    pub file: usize,
    pub layout: Layout,
}

#[derive(Debug)]
pub enum Layout {
    /// Nothing but zeroes.
    Zero,
    /// All of it, from there in its file.
    Flat { at: u64 },
    /// As tables say.
    Blocks(Blocks),
}

impl Part {
    /// At `offset` from its start, which it has.
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

/// An image that was read.
#[derive(Debug)]
pub struct Disk {
    /// In order and without gaps.
    pub parts: Vec<Part>,
    pub description: Description,
}

impl Disk {
    /// Of one part, of the size that the description says.
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
