//! The I/O interface of the format code.
//!
//! A worker's tasks await their I/O. The thread that opens or closes an image does it at once.

pub(super) use super::pool::Buf;
use super::storage::Storage;
use crate::HostOffset;
use fathom_core::Op;
use smallvec::SmallVec;
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

/// A positive errno.
pub(super) type Errno = i32;

/// Index of a file in the chain's list of storages.
pub(super) type StorageId = u8;

/// The memory of an operation: the source of a write or the target of a read.
///
/// Holds the iovecs, and those of the named buffers that are not the guest's.
pub(super) struct Payload {
    pub(super) segments: fathom_core::Segments,
    pub(super) keep: SmallVec<[Rc<Buf>; 2]>,
}

impl Payload {
    pub(super) fn of(buf: Rc<Buf>) -> Payload {
        Payload {
            segments: fathom_core::Segments::from_slice(&[buf.iovec()]),
            keep: SmallVec::from_iter([buf]),
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.segments.iter().map(|s| s.iov_len as u64).sum()
    }
}

/// I/O on the files of a chain.
///
/// Each operation starts when its method is called, not when the future is first polled. Several
/// operations can therefore be started and then awaited.
pub(super) trait Io {
    /// Starts an operation without data in memory: zeroes, a discard or a flush.
    fn plain(
        &self,
        storage: StorageId,
        op: Op,
        at: HostOffset,
        len: u64,
    ) -> impl Future<Output = Result<(), Errno>>;

    /// Reads metadata into a new buffer of `len` bytes.
    fn read(
        &self,
        storage: StorageId,
        at: HostOffset,
        len: usize,
    ) -> impl Future<Output = Result<Buf, Errno>>;

    /// Writes metadata.
    fn write(
        &self,
        storage: StorageId,
        at: HostOffset,
        buf: Buf,
    ) -> impl Future<Output = Result<(), Errno>>;
}

/// Blocking I/O on the calling thread. The futures are ready at once.
pub(super) struct BlockingIo<'a>(pub(super) &'a [Arc<dyn Storage>]);

impl BlockingIo<'_> {
    fn storage(&self, id: StorageId) -> &dyn Storage {
        &*self.0[usize::from(id)]
    }
}

impl Io for BlockingIo<'_> {
    fn plain(
        &self,
        storage: StorageId,
        op: Op,
        at: HostOffset,
        len: u64,
    ) -> impl Future<Output = Result<(), Errno>> {
        let storage = self.storage(storage);
        let result = match op {
            Op::Flush => storage.bytes().sync(),
            Op::Discard => storage.bytes().discard(at.0, len),
            _ => write_zeroes(storage, at, len),
        };
        std::future::ready(result.map_err(errno))
    }

    fn read(
        &self,
        storage: StorageId,
        at: HostOffset,
        len: usize,
    ) -> impl Future<Output = Result<Buf, Errno>> {
        let mut buf = Buf::new(len);
        let result = self.storage(storage).bytes().read_at(buf.bytes_mut(), at.0);
        std::future::ready(result.map(|()| buf).map_err(errno))
    }

    fn write(
        &self,
        storage: StorageId,
        at: HostOffset,
        buf: Buf,
    ) -> impl Future<Output = Result<(), Errno>> {
        let result = self.storage(storage).bytes().write_at(buf.bytes(), at.0);
        std::future::ready(result.map_err(errno))
    }
}

fn write_zeroes(storage: &dyn Storage, at: HostOffset, len: u64) -> io::Result<()> {
    let zeroes = [0; 65536];
    let mut done = 0;
    while done < len {
        let n = (len - done).min(zeroes.len() as u64);
        storage
            .bytes()
            .write_at(&zeroes[..n as usize], (at + done).0)?;
        done += n;
    }
    Ok(())
}

pub(super) fn errno(error: io::Error) -> Errno {
    match (error.raw_os_error(), error.kind()) {
        (Some(errno), _) => errno,
        (None, io::ErrorKind::StorageFull) => libc::ENOSPC,
        (None, _) => libc::EIO,
    }
}
