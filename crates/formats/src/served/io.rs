//! I/O as the format's code asks for it: by a worker's tasks, which wait, or
//! at once by the thread that opens or closes an image.

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

/// Which of a chain's files.
pub(super) type StorageId = u8;

/// What a write takes its bytes from, or a read puts them into: iovecs, and
/// those of the buffers they name that are not the guest's.
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

/// Each operation starts when its method is called, not when the future is
/// first polled: several can be started and then awaited.
pub(super) trait Io {
    /// One operation without data in memory: zeroes, a discard, a flush.
    fn plain(
        &self,
        storage: StorageId,
        op: Op,
        at: HostOffset,
        len: u64,
    ) -> impl Future<Output = Result<(), Errno>>;

    /// Metadata, into a buffer of `len` bytes.
    fn read(
        &self,
        storage: StorageId,
        at: HostOffset,
        len: usize,
    ) -> impl Future<Output = Result<Buf, Errno>>;

    /// Metadata.
    fn write(
        &self,
        storage: StorageId,
        at: HostOffset,
        buf: Buf,
    ) -> impl Future<Output = Result<(), Errno>>;
}

/// On the thread that calls it. Its futures are ready.
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
