//! What images are read from, and numbers in them.

use std::io;

/// A file of an image.
pub trait Bytes {
    /// Fills `buf` from `at`; an error where there is less.
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()>;
    /// How many there are. Asked once, when an image is opened: what comes
    /// later is not looked at.
    fn len(&self) -> io::Result<u64>;
    /// Whether there are none.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
}

/// In memory.
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

/// From its start.
impl Bytes for std::fs::File {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self, buf, at)
    }

    fn len(&self) -> io::Result<u64> {
        // A block device has no length in its metadata.
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

/// The little-endian number at `at`, which is within `bytes`.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, at))
}

/// As [`u16_at`].
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

/// As [`u16_at`].
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// The `N` bytes at `at`, which are within `bytes`.
pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}
