//! An image file in memory.

use fathom_files::ImageFile;
use parking_lot::{Mutex, MutexGuard};
use std::io;

/// A file of at most `limit` bytes; a longer write fails as on a full disk.
#[derive(Debug)]
pub struct MemoryFile {
    bytes: Mutex<Vec<u8>>,
    limit: u64,
}

impl MemoryFile {
    /// Creates a file with these contents.
    pub fn new(bytes: Vec<u8>, limit: u64) -> MemoryFile {
        MemoryFile {
            bytes: Mutex::new(bytes),
            limit,
        }
    }

    /// Returns the contents.
    pub fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock()
    }

    fn fits(&self, end: Option<u64>) -> io::Result<usize> {
        let end = end.filter(|end| *end <= self.limit);
        end.map(|end| end as usize)
            .ok_or_else(|| io::ErrorKind::StorageFull.into())
    }
}

impl ImageFile for MemoryFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let bytes = self.bytes();
        let start = bytes
            .len()
            .min(usize::try_from(offset).unwrap_or(usize::MAX));
        let there = (bytes.len() - start).min(buf.len());
        buf[..there].copy_from_slice(&bytes[start..start + there]);
        buf[there..].fill(0);
        Ok(())
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        let end = self.fits(offset.checked_add(buf.len() as u64))?;
        let mut bytes = self.bytes();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[offset as usize..end].copy_from_slice(buf);
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes().len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let len = self.fits(Some(len))?;
        self.bytes().resize(len, 0);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        let end = self.fits(offset.checked_add(len))?;
        let mut bytes = self.bytes();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        Ok(())
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let mut bytes = self.bytes();
        let end = (offset + len).min(bytes.len() as u64) as usize;
        // Not zeroes, so that no test can rely on zeroes.
        bytes[offset as usize..end].fill(0xdb);
        Ok(())
    }
}
