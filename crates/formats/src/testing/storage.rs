//! A storage in memory whose requests complete at once.

use super::MemoryFile;
use crate::served::Storage;
use fathom_core::{
    Channel, Cx, Disk, DiskError, DiskInfo, Extents, Op, Request, RequestId, Stage, Status,
};
use fathom_files::ImageFile;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A storage in memory; see [`MemoryFile`].
#[derive(Clone)]
pub struct MemoryStorage {
    file: Arc<MemoryFile>,
    number: u64,
}

impl MemoryStorage {
    /// Creates a storage; `number` is its identity.
    pub fn new(file: MemoryFile, number: u64) -> MemoryStorage {
        MemoryStorage {
            file: Arc::new(file),
            number,
        }
    }

    /// Returns the file.
    pub fn file(&self) -> &MemoryFile {
        &self.file
    }

    fn carry_out(&self, request: &Request) -> io::Result<()> {
        let mut at = request.at;
        match request.op {
            Op::Flush => return Ok(()),
            Op::Discard => return self.file.discard(at, request.len),
            Op::WriteZeroes => {
                return self.file.write_at(&vec![0; request.len as usize], at);
            }
            Op::BlockStatus => {
                // SAFETY: the creator of a request guarantees that its segments are valid.
                unsafe { Extents::of(&request.segments, request.len) }
                    .push(Status::DATA, request.len);
                return Ok(());
            }
            Op::Read | Op::Write => {}
        }
        for segment in &request.segments {
            let (base, len) = (segment.iov_base.cast::<u8>(), segment.iov_len);
            if request.op == Op::Read {
                // SAFETY: the creator of a request guarantees that its segments are valid.
                let bytes = unsafe { std::slice::from_raw_parts_mut(base, len) };
                self.file.read_at(bytes, at)?;
            } else {
                // SAFETY: as above.
                let bytes = unsafe { std::slice::from_raw_parts(base, len) };
                self.file.write_at(bytes, at)?;
            }
            at += len as u64;
        }
        Ok(())
    }
}

impl Storage for MemoryStorage {
    fn disk(&self) -> &dyn Disk {
        self
    }

    fn path(&self) -> &Path {
        Path::new("memory")
    }

    fn bytes(&self) -> &dyn ImageFile {
        &*self.file
    }

    fn identity(&self) -> (u64, u64) {
        (0, self.number)
    }
}

impl Disk for MemoryStorage {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size: ImageFile::len(&*self.file).unwrap_or(0),
            block_size: 512,
            physical_block_size: 512,
            optimal_io_size: 0,
            read_only: false,
            write_cache: true,
            discard: None,
            write_zeroes: None,
        }
    }

    fn activate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        Ok(())
    }

    fn channel(&self, _: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        Ok(Box::new(self.clone()))
    }
}

impl Channel for MemoryStorage {
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Device);
        let errno = match self.carry_out(&cx.slab[id]) {
            Ok(()) => 0,
            Err(error) if error.kind() == io::ErrorKind::StorageFull => libc::ENOSPC,
            Err(_) => libc::EIO,
        };
        cx.complete(id, errno);
    }

    fn complete(&mut self, _: &mut Cx, _: RequestId, _: u16, _: i32) {}
}
