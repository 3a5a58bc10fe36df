//! Access to the bytes of a header, and helpers to read and write header fields.

use std::io;

/// A source that contains a LUKS header. Offsets are relative to the header's first byte.
pub trait Bytes {
    /// Fills `buf` with the bytes at offset `at`. Fails if the source ends before that.
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()>;
    /// Returns the number of bytes in the source.
    fn len(&self) -> io::Result<u64>;
    /// Returns whether the source contains no bytes.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
}

/// A header in memory.
impl Bytes for &[u8] {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        let from = usize::try_from(at)
            .ok()
            .and_then(|at| self.get(at..)?.get(..buf.len()))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.copy_from_slice(from);
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(<[u8]>::len(self) as u64)
    }
}

/// A header in memory.
impl Bytes for Vec<u8> {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        (&self.as_slice()).read_at(buf, at)
    }

    fn len(&self) -> io::Result<u64> {
        Bytes::len(&self.as_slice())
    }
}

/// A header at the start of a file.
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

/// Reads the big-endian number at offset `at`, which must be within `bytes`.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array_at(bytes, at))
}

/// Reads a 32-bit number, as [`u16_at`] does.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array_at(bytes, at))
}

/// Reads a 64-bit number, as [`u16_at`] does.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array_at(bytes, at))
}

/// Returns the `N` bytes at offset `at`, which must be within `bytes`.
pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

/// Decodes a text that ends at the first zero byte or at the end of `field`.
///
/// Bytes that are not printable ASCII become `?`.
pub(crate) fn text(field: &[u8]) -> String {
    let end = field.iter().position(|&byte| byte == 0);
    let shown = |&byte: &u8| match byte {
        b' '..=b'~' => char::from(byte),
        _ => '?',
    };
    field[..end.unwrap_or(field.len())]
        .iter()
        .map(shown)
        .collect()
}

/// Copies `part` into `bytes` at offset `at`.
pub(crate) fn put(bytes: &mut [u8], at: usize, part: &[u8]) {
    bytes[at..at + part.len()].copy_from_slice(part);
}
