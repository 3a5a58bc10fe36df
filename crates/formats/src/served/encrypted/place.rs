//! Position and encryption of the encrypted bytes in their file.

use fathom_luks::Sectors;
use std::ops::Range;
use std::sync::Arc;

#[derive(Clone)]
pub(super) struct Place {
    pub(super) sectors: Arc<Sectors>,
    /// Offset in the file of the first byte.
    pub(super) start: u64,
    /// Number of bytes; `None`: up to the end of the file.
    pub(super) size: Option<u64>,
}

impl Place {
    /// Returns the bytes that are encrypted together.
    pub(super) fn sector(&self) -> u64 {
        self.sectors.sector_size().into()
    }

    /// Returns the sectors that a range touches.
    pub(super) fn outer(&self, range: &Range<u64>) -> Range<u64> {
        let sector = self.sector();
        range.start & !(sector - 1)..range.end.next_multiple_of(sector)
    }

    /// Returns the number of bytes, in whole sectors, in a file of that length.
    pub(super) fn len(&self, file_len: u64) -> u64 {
        let rest = file_len.saturating_sub(self.start);
        let len = self.size.map_or(rest, |size| size.min(rest));
        len & !(self.sector() - 1)
    }
}
