//! Entries of the log (section 2.3.1): changes that may not have been applied to the file.

use super::crc;
use crate::bytes::{array_at, u32_at, u64_at};

/// Size in bytes of a log sector and of a changed sector of the file.
pub const SECTOR: usize = 4096;

const HEADER: usize = 64;
const CHECKSUM: usize = 4;
const LEN: usize = 8;
const TAIL: usize = 12;
const SEQUENCE: usize = 16;
const COUNT: usize = 24;
const GUID: usize = 32;
const FLUSHED: usize = 48;

/// Size in bytes of a descriptor, which describes one change.
const DESCRIPTOR: usize = 32;
const TRAILING: usize = 4;
const LEADING: usize = 8;
const ZERO_LEN: usize = 8;
const PLACE: usize = 16;
const CHANGE_SEQUENCE: usize = 24;

/// The header of a log entry.
#[derive(Clone, Copy)]
pub struct Entry {
    /// Size of the entry in bytes, a multiple of the sector size.
    pub len: usize,
    /// Offset in the log of the oldest entry that is still needed.
    pub tail: usize,
    pub sequence: u64,
    /// Minimum size in bytes of the file when the entry was written.
    pub flushed: u64,
    count: usize,
}

/// A change that replaces bytes of the file.
#[derive(Debug)]
pub struct Change {
    pub at: u64,
    pub len: u64,
    /// The new contents of one sector; `None` if the bytes become zeroes.
    pub data: Option<Box<[u8; SECTOR]>>,
}

impl Entry {
    /// Parses the entry that starts with `sector`.
    ///
    /// Returns `None` unless the fields are valid for a log with the GUID `guid` and a size of
    /// `log_len` bytes.
    pub fn parse(sector: &[u8], guid: &[u8; 16], log_len: usize) -> Option<Entry> {
        let entry = Entry {
            len: u32_at(sector, LEN) as usize,
            tail: u32_at(sector, TAIL) as usize,
            sequence: u64_at(sector, SEQUENCE),
            flushed: u64_at(sector, FLUSHED),
            count: u32_at(sector, COUNT) as usize,
        };
        let is_one = sector.starts_with(b"loge") && array_at(sector, GUID) == *guid;
        let sized = entry.len <= log_len && entry.len.is_multiple_of(SECTOR);
        // The entry must have space for at least its descriptors.
        let fits = entry.descriptors_len().is_some_and(|len| len <= entry.len);
        (is_one && sized && fits && entry.sequence > 0).then_some(entry)
    }

    /// Returns the size in bytes of the sectors that contain the header and the descriptors.
    fn descriptors_len(&self) -> Option<usize> {
        let len = self.count.checked_mul(DESCRIPTOR)?.checked_add(HEADER)?;
        len.checked_next_multiple_of(SECTOR)
    }

    /// Returns the changes of this entry, whose complete contents are `bytes`.
    ///
    /// Returns `None` if the entry is invalid.
    pub fn changes(&self, bytes: &[u8]) -> Option<Vec<Change>> {
        if !crc::is_right(bytes, CHECKSUM) {
            return None;
        }
        let (descriptors, data) = bytes.split_at(self.descriptors_len()?);
        let mut sectors = data.chunks_exact(SECTOR);
        let descriptors = descriptors[HEADER..].chunks_exact(DESCRIPTOR);
        let changes = descriptors.take(self.count).map(|descriptor| {
            let at = u64_at(descriptor, PLACE);
            let is_aligned = at.is_multiple_of(SECTOR as u64);
            if !is_aligned || u64_at(descriptor, CHANGE_SEQUENCE) != self.sequence {
                return None;
            }
            if descriptor.starts_with(b"zero") {
                let len = u64_at(descriptor, ZERO_LEN);
                let data = None;
                let is_valid = len.is_multiple_of(SECTOR as u64) && at.checked_add(len).is_some();
                return is_valid.then_some(Change { at, len, data });
            }
            let data = self.data(descriptor, sectors.next()?)?;
            let (len, data) = (SECTOR as u64, Some(data));
            at.checked_add(len)?;
            Some(Change { at, len, data })
        });
        changes.collect()
    }

    /// Assembles the new contents of a sector (sections 2.3.1.3 and 2.3.1.4).
    ///
    /// The first 8 and the last 4 bytes of the contents are in the descriptor.
    fn data(&self, descriptor: &[u8], sector: &[u8]) -> Option<Box<[u8; SECTOR]>> {
        let high = u64::from(u32_at(sector, 4));
        let low = u64::from(u32_at(sector, SECTOR - 4));
        let is_valid = descriptor.starts_with(b"desc")
            && sector.starts_with(b"data")
            && (high << 32 | low) == self.sequence;
        if !is_valid {
            return None;
        }
        let mut data: Box<[u8; SECTOR]> = sector.to_vec().try_into().ok()?;
        data[..8].copy_from_slice(&descriptor[LEADING..LEADING + 8]);
        data[SECTOR - 4..].copy_from_slice(&descriptor[TRAILING..TRAILING + 4]);
        Some(data)
    }
}
