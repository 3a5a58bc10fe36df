//! Bytes of headers.

use std::io;

/// What holds a LUKS header. Offsets count from the header's first byte.
pub trait Bytes {
    /// Fills `buf` from `at`; an error where there is less.
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()>;
    /// How many there are.
    fn len(&self) -> io::Result<u64>;
    /// Whether there are none.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
}

/// In memory.
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

/// In memory.
impl Bytes for Vec<u8> {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        (&self.as_slice()).read_at(buf, at)
    }

    fn len(&self) -> io::Result<u64> {
        Bytes::len(&self.as_slice())
    }
}

/// In a file, from its start.
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

/// The big-endian number at `at`, which is within `bytes`.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array_at(bytes, at))
}

/// As [`u16_at`].
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array_at(bytes, at))
}

/// As [`u16_at`].
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array_at(bytes, at))
}

/// The `N` bytes at `at`, which are within `bytes`.
pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

/// A text that ends at the first zero byte or with the field; what is not
/// printable ASCII is shown as `?`.
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

/// Writes `part` at `at`.
pub(crate) fn put(bytes: &mut [u8], at: usize, part: &[u8]) {
    bytes[at..at + part.len()].copy_from_slice(part);
}
