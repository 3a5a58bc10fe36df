//! Entries of the log (2.3.1): changes of the file that were perhaps not made.

use super::crc;
use crate::bytes::{array_at, u32_at, u64_at};

/// Entries are made of sectors of this size, and change such.
pub const SECTOR: usize = 4096;

const HEADER: usize = 64;
const CHECKSUM: usize = 4;
const LEN: usize = 8;
const TAIL: usize = 12;
const SEQUENCE: usize = 16;
const COUNT: usize = 24;
const GUID: usize = 32;
const FLUSHED: usize = 48;

/// Of a change.
const DESCRIPTOR: usize = 32;
const TRAILING: usize = 4;
const LEADING: usize = 8;
const ZERO_LEN: usize = 8;
const PLACE: usize = 16;
const CHANGE_SEQUENCE: usize = 24;

/// What the start of an entry says.
#[derive(Clone, Copy)]
pub struct Entry {
    /// In bytes, of whole sectors.
    pub len: usize,
    /// Where in the log the first entry is that is still needed.
    pub tail: usize,
    pub sequence: u64,
    /// How long the file has been at least.
    pub flushed: u64,
    count: usize,
}

/// Bytes that take the place of those in the file.
#[derive(Debug)]
pub struct Change {
    pub at: u64,
    pub len: u64,
    /// Zeroes if there are none.
    pub data: Option<Box<[u8; SECTOR]>>,
}

impl Entry {
    /// Of the entry that starts with `sector`, if its fields are those of an
    /// entry in the log with that GUID and of `log_len` bytes.
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
        // At least the descriptors have to fit.
        let fits = entry.descriptors_len().is_some_and(|len| len <= entry.len);
        (is_one && sized && fits && entry.sequence > 0).then_some(entry)
    }

    /// Bytes of the sectors with the header and the descriptors.
    fn descriptors_len(&self) -> Option<usize> {
        let len = self.count.checked_mul(DESCRIPTOR)?.checked_add(HEADER)?;
        len.checked_next_multiple_of(SECTOR)
    }

    /// The changes of the entry with all `bytes`; `None` if it is not valid.
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

    /// What is to be in the place of a sector (2.3.1.3, 2.3.1.4): its ends are
    /// in the descriptor.
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
