//! Serving a request on the worker's own thread, when its data is in memory:
//! a system call and a copy cost less than handing it to an engine.

use super::transfer::{Progress, Transfer, rest_of};
use fathom_core::{Op, Request, Segments};
use libc::{c_int, iovec};
use std::io;

/// The longest request served so: it holds up the worker's other requests
/// while it is copied.
pub(super) const MAX_LEN: u64 = 256 << 10;

/// The most iovecs in one call (UIO_MAXIOV).
const MAX_IOVECS: usize = 1024;

/// Read or write the whole request; the error is a positive errno.
///
/// # Safety
/// The request's segments are valid.
#[inline]
pub(super) unsafe fn transfer(fd: c_int, request: &Request) -> Result<(), i32> {
    // SAFETY: as required of the caller.
    let moved = unsafe { call(fd, request.op, &request.segments, request.offset) };
    if moved as i64 == request.len as i64 {
        return Ok(());
    }
    // SAFETY: as required of the caller.
    unsafe { rest(fd, request, moved) }
}

/// The first call moved `result` bytes or failed with it.
///
/// # Safety
/// The request's segments are valid.
#[cold]
unsafe fn rest(fd: c_int, request: &Request, mut result: i32) -> Result<(), i32> {
    let mut transfer = Transfer::new(request.offset, request.len);
    let mut segments = Segments::new();
    loop {
        match transfer.advance(result, 1) {
            Progress::Complete => return Ok(()),
            Progress::Failed(errno) => return Err(errno),
            Progress::More => {}
        }
        rest_of(&request.segments, transfer.done, &mut segments);
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
