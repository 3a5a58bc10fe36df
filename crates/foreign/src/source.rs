//! A file of an image, as used while its tables are read.

use crate::bytes::Bytes;
use crate::error::{Error, Result};

/// Number of bytes of a table that are read at a time.
const CHUNK: usize = 256 << 10;

/// A file with the size that it had when it was opened.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    pub bytes: &'a dyn Bytes,
    pub len: u64,
}

impl<'a> Source<'a> {
    pub fn new(bytes: &'a dyn Bytes) -> Result<Source<'a>> {
        let len = bytes.len()?;
        Ok(Source { bytes, len })
    }

    /// Returns whether all of the `len` bytes at `at` are inside the file.
    pub fn holds(&self, at: u64, len: u64) -> bool {
        at.checked_add(len).is_some_and(|end| end <= self.len)
    }

    /// Fills `buf` with the bytes at `at`. Errors call the data `what`.
    pub fn read(&self, buf: &mut [u8], at: u64, what: &str) -> Result<()> {
        self.expect(at, buf.len() as u64, what)?;
        Ok(self.bytes.read_at(buf, at)?)
    }

    /// Reads `N` bytes, as [`Source::read`] does.
    pub fn array<const N: usize>(&self, at: u64, what: &str) -> Result<[u8; N]> {
        let mut array = [0; N];
        self.read(&mut array, at, what)?;
        Ok(array)
    }

    /// Reads up to `len` bytes at `at`, fewer if the file ends before.
    pub fn up_to(&self, at: u64, len: usize) -> Result<Vec<u8>> {
        let there = self.len.saturating_sub(at).min(len as u64);
        let mut buf = vec![0; there as usize];
        self.bytes.read_at(&mut buf, at)?;
        Ok(buf)
    }

    /// Calls `each` for each of the `count` entries of the table at `at`, which have `N` bytes
    /// each.
    ///
    /// The table is read in chunks, so that it is never in memory as a whole.
    pub fn entries<const N: usize>(
        &self,
        at: u64,
        count: u64,
        what: &str,
        mut each: impl FnMut([u8; N]) -> Result<()>,
    ) -> Result<()> {
        let len = count.checked_mul(N as u64).ok_or(Error::TooLarge)?;
        self.expect(at, len, what)?;
        let mut chunk = vec![0; len.min((CHUNK / N * N) as u64) as usize];
        let mut done = 0;
        while done < len {
            let part = chunk.len().min((len - done) as usize);
            self.bytes.read_at(&mut chunk[..part], at + done)?;
            let (entries, _) = chunk[..part].as_chunks::<N>();
            entries.iter().try_for_each(|entry| each(*entry))?;
            done += part as u64;
        }
        Ok(())
    }

    fn expect(&self, at: u64, len: u64, what: &str) -> Result<()> {
        if self.holds(at, len) {
            return Ok(());
        }
        Err(Error::damaged(format!(
            "{what} of {len} bytes is at {at}, but its file ends at {}",
            self.len
        )))
    }
}
