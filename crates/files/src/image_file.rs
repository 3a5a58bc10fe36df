//! Access to an image's bytes for code that may block: opening, closing, changing and checking
//! images. The request path does not use it.

use crate::open_mark;
use rustix::fs::FallocateFlags;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};

/// The file or block device of an image, or an equivalent.
///
/// All methods take `&self`. Offsets are explicit, and implementations with state (for example, a
/// recorder of writes) keep it behind their own lock.
pub trait ImageFile: Send + Sync {
    /// Fills `buf` from `offset` on. Bytes beyond the end of the file read as zeroes, because an
    /// image's last cluster may be incomplete.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all of `buf`, and extends the file if necessary.
    ///
    /// A write of one 512-byte sector is atomic. Several sectors are written in any order.
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()>;
    /// Returns the length of the file in bytes.
    fn len(&self) -> io::Result<u64>;
    /// Returns whether the file has no bytes.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Truncates the file, or extends it with a hole.
    ///
    /// A file that does not [grow](ImageFile::grows) keeps its length, and extending it is an
    /// error.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Returns whether a write beyond the end extends the file. A block device does not grow.
    fn grows(&self) -> bool {
        true
    }
    /// Makes all completed writes durable.
    fn sync(&self) -> io::Result<()>;
    /// Fails if [`ImageFile::allocate`] cannot reserve space, as on a block device.
    fn check_allocate(&self) -> io::Result<()> {
        Ok(())
    }
    /// Reserves space for `len` bytes from `offset` on, without changing what they read as. Extends
    /// the file if necessary.
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        match offset.saturating_add(len) {
            end if len > 0 && self.len()? < end => self.set_len(end),
            _ => Ok(()),
        }
    }
    /// Drops clean cached data of the file, because another host may have written to the file since
    /// it was read.
    fn forget_cache(&self) {}
    /// Returns whether the whole range is a hole, and so reads as zeroes. Returns false if that is
    /// unknown.
    fn is_hole(&self, offset: u64, len: u64) -> bool {
        matches!(self.run_at(offset), (true, end) if end >= offset.saturating_add(len))
    }
    /// Returns whether `offset` lies in a hole, and the offset in bytes at which the hole or the
    /// data ends.
    ///
    /// If holes are unknown, everything is data.
    fn run_at(&self, _offset: u64) -> (bool, u64) {
        (false, u64::MAX)
    }
    /// Returns the number of bytes that the file occupies in its file system.
    fn allocated(&self) -> io::Result<u64> {
        self.len()
    }
    /// Deallocates these bytes; what they read as is undefined afterwards.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()>;
    /// Returns whether a writer has [marked](open_mark) the image as open and has not closed it.
    /// Returns false if that is unknown.
    fn is_marked_open(&self) -> bool {
        false
    }
    /// Marks the image as open, or removes the mark. Does nothing for an image that cannot be
    /// marked.
    fn mark_open(&self, _is_open: bool) -> io::Result<()> {
        Ok(())
    }
}

impl ImageFile for File {
    fn read_at(&self, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !buf.is_empty() {
            match FileExt::read_at(self, buf, offset) {
                Ok(0) => {
                    buf.fill(0);
                    return Ok(());
                }
                Ok(n) => {
                    buf = &mut buf[n..];
                    offset += n as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(buf, offset)
    }

    fn len(&self) -> io::Result<u64> {
        // The metadata of a block device has a length of 0.
        Ok(rustix::fs::seek(self, rustix::fs::SeekFrom::End(0))?)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if !self.metadata()?.file_type().is_block_device() {
            return File::set_len(self, len);
        }
        // A block device keeps its length.
        match len <= ImageFile::len(self)? {
            true => Ok(()),
            false => Err(io::ErrorKind::StorageFull.into()),
        }
    }

    fn grows(&self) -> bool {
        self.metadata().is_ok_and(|metadata| metadata.is_file())
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }

    fn check_allocate(&self) -> io::Result<()> {
        match self.metadata()?.file_type().is_block_device() {
            false => Ok(()),
            true => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "a block device cannot reserve space",
            )),
        }
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check_allocate()?;
        if len == 0 {
            return Ok(());
        }
        rustix::fs::fallocate(self, FallocateFlags::empty(), offset, len)?;
        Ok(())
    }

    fn forget_cache(&self) {
        // The advice may have no effect, and there is no alternative.
        let _ = rustix::fs::fadvise(self, 0, None, rustix::fs::Advice::DontNeed);
    }

    fn is_hole(&self, offset: u64, len: u64) -> bool {
        use rustix::fs::{SeekFrom, seek};
        match seek(self, SeekFrom::Data(offset)) {
            Ok(data) => data >= offset.saturating_add(len),
            // ENXIO: there is no data up to the end of the file, and bytes beyond the end read as
            // zeroes.
            Err(error) => error == rustix::io::Errno::NXIO,
        }
    }

    fn run_at(&self, offset: u64) -> (bool, u64) {
        use rustix::fs::{SeekFrom, seek};
        match seek(self, SeekFrom::Data(offset)) {
            Ok(data) if data > offset => (true, data),
            // If no hole follows, the data extends to the end of the file.
            Ok(_) => match seek(self, SeekFrom::Hole(offset)) {
                Ok(hole) if hole > offset => (false, hole),
                _ => (false, u64::MAX),
            },
            Err(rustix::io::Errno::NXIO) => (true, u64::MAX),
            Err(_) => (false, u64::MAX),
        }
    }

    fn allocated(&self) -> io::Result<u64> {
        Ok(self.metadata()?.blocks() * 512)
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(self, hole, offset, len)?;
        Ok(())
    }

    fn is_marked_open(&self) -> bool {
        open_mark::is_set(self)
    }

    fn mark_open(&self, is_open: bool) -> io::Result<()> {
        match is_open {
            true => open_mark::set(self),
            false => open_mark::clear(self),
        }
    }
}

/// Reads `len` bytes from `offset` on, or fewer if the file ends before. Callers must limit `len`.
pub fn read_up_to(file: &dyn ImageFile, offset: u64, len: u64) -> io::Result<Vec<u8>> {
    let there = file.len()?.saturating_sub(offset).min(len);
    let there = usize::try_from(there).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let mut buf = vec![0; there];
    file.read_at(&mut buf, offset)?;
    Ok(buf)
}
