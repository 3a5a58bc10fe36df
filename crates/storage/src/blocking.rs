//! Blocking access to a disk's bytes, for whoever opens, closes and changes images that are in it: never on a
//! request's way.

use std::io;

/// Of a disk that has a size of its own; what was written here and through its channels is seen by both once
/// it has returned.
pub trait Blocking: Send + Sync {
    /// Fills `buf` from `offset` on; what lies beyond the end reads as zeroes.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all of `buf`; the disk grows when it must, or it is ENOSPC.
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()>;
    /// In bytes.
    fn len(&self) -> io::Result<u64>;
    /// No bytes at all.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Cuts the disk, or makes it longer by zeroes, if it grows; else it may only stay as it is.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Whether it becomes longer when it is written to beyond its end.
    fn grows(&self) -> bool;
    /// All writes that have returned are durable once this returns.
    fn sync(&self) -> io::Result<()>;
    /// Gives space back; what these bytes read as is undefined afterwards.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()>;
    /// Whether there is nothing at `offset`, which reads as zeroes then, and where that ends, in bytes. When it
    /// cannot be told, all is data.
    fn run_at(&self, offset: u64) -> (bool, u64);
    /// Bytes that are allocated.
    fn allocated(&self) -> io::Result<u64> {
        self.len()
    }
    /// Forgets what is cached and not dirty.
    fn forget_cache(&self) {}
}
