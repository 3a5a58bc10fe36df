//! Serving a request on the worker's own thread, when its data is in memory:
//! a system call and a copy cost less than handing it to an engine.

use super::Shared;
use super::channel::FileChannel;
use super::transfer::{Progress, Transfer, clear, rest_of};
use fathom_core::{Cx, Op, Request, RequestId, Segments, Stage};
use libc::{c_int, iovec};
use std::io;
use std::os::fd::AsRawFd;

/// The longest request served so. Up to here the hand-over to an engine costs
/// more than a fifth of the copy (measured on tmpfs: 64 KiB 13 us inline, 16
/// us by io_uring; 256 KiB 49 and 51 us); longer copies would hold up the
/// worker's other requests for nothing.
const MAX_LEN: u64 = 64 << 10;

/// The most iovecs in one call (UIO_MAXIOV).
const MAX_IOVECS: usize = 1024;

impl FileChannel {
    /// Whether to serve a read or write at once.
    #[inline]
    pub(super) fn is_in_memory(&self, request: &Request) -> bool {
        self.shared.in_memory && request.len <= MAX_LEN
    }

    /// Serve a read or write of a file in memory.
    #[inline]
    pub(super) fn serve(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Device);
        // SAFETY: the source vouches for the request's segments.
        let outcome = unsafe { transfer(&self.shared, &cx.slab[id]) };
        // The next request of the batch starts at this tick, too.
        cx.tick();
        match outcome {
            Ok(()) => self.finish(cx, id, 0),
            Err(errno) => self.fail(cx, id, errno),
        }
    }

    /// Serve a read from the page cache, or by the engine when not all of it
    /// is there.
    pub(super) fn serve_cached(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Device);
        let request = &cx.slab[id];
        // SAFETY: the source vouches for the request's segments.
        let hit =
            request.len <= MAX_LEN && unsafe { read_cached(self.shared.file.as_raw_fd(), request) };
        cx.tick();
        if hit {
            self.finish(cx, id, 0);
        } else {
            self.push_whole(cx, id);
        }
    }
}

/// Read or write the whole request; the error is a positive errno. What lies
/// beyond the end of a growable file reads as zeroes.
///
/// # Safety
/// The request's segments are valid.
#[inline]
unsafe fn transfer(shared: &Shared, request: &Request) -> Result<(), i32> {
    let fd = shared.file.as_raw_fd();
    // SAFETY: as required of the caller.
    let moved = unsafe { call(fd, request.op, &request.segments, request.at) };
    if moved as i64 == request.len as i64 {
        return Ok(());
    }
    // SAFETY: as required of the caller.
    unsafe { rest(shared, request, moved) }
}

/// Read the whole request if all of it is in the page cache. False: it is not,
/// or the file system cannot tell.
///
/// # Safety
/// The request's segments are valid.
#[inline]
unsafe fn read_cached(fd: c_int, request: &Request) -> bool {
    let segments = &request.segments;
    let count = segments.len().min(MAX_IOVECS) as c_int;
    let offset = request.at as i64;
    // SAFETY: as required of the caller.
    let moved = unsafe { libc::preadv2(fd, segments.as_ptr(), count, offset, libc::RWF_NOWAIT) };
    moved as i64 == request.len as i64
}

/// The first call moved `result` bytes or failed with it.
///
/// # Safety
/// The request's segments are valid.
#[cold]
unsafe fn rest(shared: &Shared, request: &Request, mut result: i32) -> Result<(), i32> {
    let fd = shared.file.as_raw_fd();
    let mut transfer = Transfer::new(request.at, request.len);
    let mut segments = Segments::new();
    loop {
        let progress = transfer.advance(result, 1);
        rest_of(&request.segments, transfer.done, &mut segments);
        match progress {
            Progress::Complete => return Ok(()),
            Progress::Ended
                if request.op == Op::Read
                    && shared.may_miss(request.at + transfer.done..request.at + request.len) =>
            {
                // SAFETY: as required of the caller.
                unsafe { clear(&segments) };
                return Ok(());
            }
            Progress::Ended => return Err(libc::EIO),
            Progress::Failed(errno) => return Err(errno),
            Progress::More => {}
        }
        let offset = transfer.offset + transfer.done;
        // SAFETY: as required of the caller.
        result = unsafe { call(fd, request.op, &segments, offset) };
    }
}

/// One system call; bytes moved or a negative errno.
///
/// # Safety
/// The segments are valid.
#[inline]
unsafe fn call(fd: c_int, op: Op, segments: &[iovec], offset: u64) -> i32 {
    let offset = offset as i64;
    let count = segments.len().min(MAX_IOVECS) as c_int;
    // SAFETY: as required of the caller.
    let moved = unsafe {
        match (op, segments) {
            (Op::Read, [one]) => libc::pread(fd, one.iov_base, one.iov_len, offset),
            (Op::Read, _) => libc::preadv(fd, segments.as_ptr(), count, offset),
            (_, [one]) => libc::pwrite(fd, one.iov_base, one.iov_len, offset),
            _ => libc::pwritev(fd, segments.as_ptr(), count, offset),
        }
    };
    if moved < 0 {
        return -io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO);
    }
    moved as i32
}
