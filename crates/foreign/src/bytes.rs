//! Access to the files of an image, and helpers to read numbers from them.

use std::io;

/// A file of an image.
pub trait Bytes {
    /// Fills `buf` with the bytes at offset `at`. Fails if the file ends before that.
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()>;
    /// Returns the size in bytes.
    ///
    /// Called once, when an image is opened. Bytes appended later are ignored.
    fn len(&self) -> io::Result<u64>;
    /// Returns whether the file is empty.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
}

/// A file in memory.
impl Bytes for Vec<u8> {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        let from = usize::try_from(at)
            .ok()
            .and_then(|at| self.get(at..)?.get(..buf.len()))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.copy_from_slice(from);
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(Vec::len(self) as u64)
    }
}

/// A file, read from its start.
impl Bytes for std::fs::File {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self, buf, at)
    }

    fn len(&self) -> io::Result<u64> {
        // The metadata of a block device reports no length, so this seeks to the end.
        let mut file = self;
        io::Seek::seek(&mut file, io::SeekFrom::End(0))
    }
}

impl<B: Bytes + ?Sized> Bytes for &B {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        (**self).read_at(buf, at)
    }

    fn len(&self) -> io::Result<u64> {
        (**self).len()
    }
}

/// Reads the little-endian number at offset `at`, which must be within `bytes`.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, at))
}

/// Reads a 32-bit number, as [`u16_at`] does.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

/// Reads a 64-bit number, as [`u16_at`] does.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// Returns the `N` bytes at offset `at`, which must be within `bytes`.
pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}
