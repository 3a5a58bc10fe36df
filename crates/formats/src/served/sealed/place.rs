//! Where encrypted bytes lie in their file, and how.

use fathom_luks::Sectors;
use std::ops::Range;
use std::sync::Arc;

#[derive(Clone)]
pub(super) struct Place {
    pub(super) sectors: Arc<Sectors>,
    /// Of the first byte, in the file.
    pub(super) start: u64,
    /// How many there are; none: all up to the file's end.
    pub(super) size: Option<u64>,
}

impl Place {
    /// Bytes that are encrypted together.
    pub(super) fn sector(&self) -> u64 {
        self.sectors.sector_size().into()
    }

    /// The sectors that a range touches.
    pub(super) fn outer(&self, range: &Range<u64>) -> Range<u64> {
        let sector = self.sector();
        range.start & !(sector - 1)..range.end.next_multiple_of(sector)
    }

    /// Bytes in a file of that length: whole sectors.
    pub(super) fn len(&self, file_len: u64) -> u64 {
        let rest = file_len.saturating_sub(self.start);
        let len = self.size.map_or(rest, |size| size.min(rest));
        len & !(self.sector() - 1)
    }
}
