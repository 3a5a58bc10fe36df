//! Blocking access to encrypted bytes.

use super::place::Place;
use crate::served::storage::Storage;
use fathom_files::ImageFile;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that are processed at once; a multiple of all sector sizes.
const STEP: u64 = 64 << 10;

/// A part of a file, decrypted when it is read and encrypted when it is written.
pub(super) struct EncryptedBytes {
    pub(super) file: Arc<dyn Storage>,
    pub(super) place: Place,
}

impl EncryptedBytes {
    /// Reads and decrypts the sectors of that range.
    fn read_sectors(&self, range: &Range<u64>) -> io::Result<Vec<u8>> {
        let mut sectors = vec![0; (range.end - range.start) as usize];
        let bytes = self.file.bytes();
        bytes.read_at(&mut sectors, self.place.start + range.start)?;
        self.place.sectors.decrypt(&mut sectors, range.start);
        Ok(sectors)
    }
}

/// Returns the pieces of a range, each of at most STEP bytes and none across a multiple of STEP.
fn steps(at: u64, len: usize) -> impl Iterator<Item = Range<u64>> {
    let end = at + len as u64;
    let mut next = at;
    std::iter::from_fn(move || {
        let start = next;
        next = end.min((start + 1).next_multiple_of(STEP));
        (start < end).then_some(start..next)
    })
}

impl ImageFile for EncryptedBytes {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        for range in steps(at, buf.len()) {
            let outer = self.place.outer(&range);
            let sectors = self.read_sectors(&outer)?;
            let inner = (range.start - outer.start) as usize..(range.end - outer.start) as usize;
            buf[(range.start - at) as usize..(range.end - at) as usize]
                .copy_from_slice(&sectors[inner]);
        }
        Ok(())
    }

    /// Reads partial sectors before it writes them. Concurrent writes to one sector are not
    /// supported.
    fn write_at(&self, buf: &[u8], at: u64) -> io::Result<()> {
        for range in steps(at, buf.len()) {
            let outer = self.place.outer(&range);
            let mut sectors = match outer == range {
                true => vec![0; (outer.end - outer.start) as usize],
                false => self.read_sectors(&outer)?,
            };
            let inner = (range.start - outer.start) as usize..(range.end - outer.start) as usize;
            sectors[inner]
                .copy_from_slice(&buf[(range.start - at) as usize..(range.end - at) as usize]);
            self.place.sectors.encrypt(&mut sectors, outer.start);
            let bytes = self.file.bytes();
            bytes.write_at(&sectors, self.place.start + outer.start)?;
        }
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.place.len(self.file.bytes().len()?))
    }

    /// Sets the length. The extension reads as random data, like a disk that was never written.
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.bytes().set_len(self.place.start + len)
    }

    fn grows(&self) -> bool {
        self.place.size.is_none() && self.file.bytes().grows()
    }

    fn sync(&self) -> io::Result<()> {
        self.file.bytes().sync()
    }

    fn forget_cache(&self) {
        self.file.bytes().forget_cache();
    }

    /// Returns data for the whole file, since a hole does not decrypt to zeroes.
    fn run_at(&self, _offset: u64) -> (bool, u64) {
        (false, u64::MAX)
    }

    fn allocated(&self) -> io::Result<u64> {
        self.file.bytes().allocated()
    }

    fn discard(&self, at: u64, len: u64) -> io::Result<()> {
        self.file.bytes().discard(self.place.start + at, len)
    }
}
