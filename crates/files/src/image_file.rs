//! Where an image's bytes are, for whoever opens, closes, changes or examines it and waits: never on a request's way.

use crate::open_mark;
use rustix::fs::FallocateFlags;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};

/// A file or block device that an image is in, or what is like one. `&self` throughout: offsets
/// are explicit, and whoever keeps state (a recorder of writes, say) keeps it
/// behind a lock of its own.
pub trait ImageFile: Send + Sync {
    /// Fills `buf` from `offset` on. What lies beyond the end of the file
    /// reads as zeroes: an image's last cluster need not be there in full.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all of `buf`; the file grows when it must. A single 512-byte
    /// sector is written wholly or not at all, more than one in any order.
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()>;
    /// In bytes.
    fn len(&self) -> io::Result<u64>;
    /// No bytes at all.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Cuts the file, or extends it by a hole. What does not grow keeps its length, and
    /// cannot be extended.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Whether it becomes longer when it is written to beyond its end: a block device does not.
    fn grows(&self) -> bool {
        true
    }
    /// All writes that have returned are durable once this returns.
    fn sync(&self) -> io::Result<()>;
    /// Fails if [`ImageFile::allocate`] cannot reserve space, as on a block device.
    fn check_allocate(&self) -> io::Result<()> {
        Ok(())
    }
    /// Reserves space for `len` bytes from `offset` on, without changing what
    /// they read as; the file grows when it must.
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        match offset.saturating_add(len) {
            end if len > 0 && self.len()? < end => self.set_len(end),
            _ => Ok(()),
        }
    }
    /// Forgets what is cached of the file and not dirty: another host may have
    /// written to it since it was read.
    fn forget_cache(&self) {}
    /// Whether the file has nothing there, and so reads as zeroes. False when
    /// that cannot be told.
    fn is_hole(&self, offset: u64, len: u64) -> bool {
        matches!(self.run_at(offset), (true, end) if end >= offset.saturating_add(len))
    }
    /// Whether the file has nothing at `offset`, and so reads as zeroes, and
    /// where that ends, in bytes. When it cannot be told, all is data.
    fn run_at(&self, _offset: u64) -> (bool, u64) {
        (false, u64::MAX)
    }
    /// Bytes of its file system that it takes up.
    fn allocated(&self) -> io::Result<u64> {
        self.len()
    }
    /// Gives space back; what these bytes read as is undefined afterwards.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()>;
    /// Whether a writer has [marked](open_mark) the image as open, and has not closed it. False when that cannot be told.
    fn is_marked_open(&self) -> bool {
        false
    }
    /// Marks the image as open, or removes the mark. What cannot be marked stays as it is.
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
        // The metadata of a block device says 0.
        Ok(rustix::fs::seek(self, rustix::fs::SeekFrom::End(0))?)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if !self.metadata()?.file_type().is_block_device() {
            return File::set_len(self, len);
        }
        // A device stays as long as it is.
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
        // It is advice; nothing else could be done.
        let _ = rustix::fs::fadvise(self, 0, None, rustix::fs::Advice::DontNeed);
    }

    fn is_hole(&self, offset: u64, len: u64) -> bool {
        use rustix::fs::{SeekFrom, seek};
        match seek(self, SeekFrom::Data(offset)) {
            Ok(data) => data >= offset.saturating_add(len),
            // There is no data up to its end, and zeroes follow that.
            Err(error) => error == rustix::io::Errno::NXIO,
        }
    }

    fn run_at(&self, offset: u64) -> (bool, u64) {
        use rustix::fs::{SeekFrom, seek};
        match seek(self, SeekFrom::Data(offset)) {
            Ok(data) if data > offset => (true, data),
            // Without holes there, it ends where the file does.
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

/// The `len` bytes from `offset` on, or as many of them as the file has.
/// Callers bound `len`.
pub fn read_up_to(file: &dyn ImageFile, offset: u64, len: u64) -> io::Result<Vec<u8>> {
    let there = file.len()?.saturating_sub(offset).min(len);
    let there = usize::try_from(there).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let mut buf = vec![0; there];
    file.read_at(&mut buf, offset)?;
    Ok(buf)
}
