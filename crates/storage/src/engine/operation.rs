//! Converts operations to io_uring submission entries.

use crate::engine::pinned::Pinned;
use fathom_core::{Io, IoKind, SocketIo, SocketIoKind};
use io_uring::types::{Fd, FsyncFlags};
use io_uring::{opcode, squeue};

/// Maximum length of one operation in bytes (the kernel's MAX_RW_COUNT). Longer operations give a
/// short result, as they do in the kernel.
const MAX_LEN: usize = 0x7fff_f000;

/// Maximum number of iovecs in one operation (UIO_MAXIOV).
const MAX_IOVECS: u32 = 1024;

/// # Safety
/// As for [`Engine::push`](fathom_core::Engine::push).
#[inline]
pub(crate) unsafe fn entry(io: &Io, fd: Fd, pinned: Option<&Pinned>) -> squeue::Entry {
    match io.kind {
        // SAFETY: as required of the caller.
        IoKind::Read => unsafe { read(io, fd, pinned) },
        // SAFETY: as required of the caller.
        IoKind::Write { dsync } => unsafe { write(io, fd, dsync, pinned) },
        IoKind::Sync => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
        IoKind::Allocate { mode } => opcode::Fallocate::new(fd, io.len)
            .offset(io.offset)
            .mode(mode)
            .build(),
    }
}

/// Makes the entry of a read. A single segment uses an opcode that imports no iovecs.
///
/// # Safety
/// As for [`entry`].
#[inline]
unsafe fn read(io: &Io, fd: Fd, pinned: Option<&Pinned>) -> squeue::Entry {
    // SAFETY: as required of the caller.
    let (iovecs, number) = unsafe { segments(io, pinned) };
    let (iov, iov_len) = (io.iov, iovecs.len() as u32);
    match (iovecs, number) {
        ([one], None) => opcode::Read::new(fd, one.iov_base.cast(), len(one))
            .offset(io.offset)
            .build(),
        ([one], Some(number)) => opcode::ReadFixed::new(fd, one.iov_base.cast(), len(one), number)
            .offset(io.offset)
            .build(),
        (_, None) => opcode::Readv::new(fd, iov, iov_len)
            .offset(io.offset)
            .build(),
        (_, Some(number)) => opcode::ReadvFixed::new(fd, iov, iov_len, number)
            .offset(io.offset)
            .build(),
    }
}

/// # Safety
/// As for [`entry`].
#[inline]
unsafe fn write(io: &Io, fd: Fd, dsync: bool, pinned: Option<&Pinned>) -> squeue::Entry {
    let flags = if dsync { libc::RWF_DSYNC } else { 0 };
    // SAFETY: as required of the caller.
    let (iovecs, number) = unsafe { segments(io, pinned) };
    let (iov, iov_len) = (io.iov, iovecs.len() as u32);
    match (iovecs, number) {
        ([one], None) => opcode::Write::new(fd, one.iov_base.cast(), len(one))
            .offset(io.offset)
            .rw_flags(flags)
            .build(),
        ([one], Some(number)) => opcode::WriteFixed::new(fd, one.iov_base.cast(), len(one), number)
            .offset(io.offset)
            .rw_flags(flags)
            .build(),
        (_, None) => opcode::Writev::new(fd, iov, iov_len)
            .offset(io.offset)
            .rw_flags(flags)
            .build(),
        (_, Some(number)) => opcode::WritevFixed::new(fd, iov, iov_len, number)
            .offset(io.offset)
            .rw_flags(flags)
            .build(),
    }
}

/// Makes the entry of a socket operation. A single iovec needs no message header.
///
/// # Safety
/// As for [`Engine::push_socket`](fathom_core::Engine::push_socket).
pub(crate) unsafe fn socket_entry(io: &SocketIo) -> squeue::Entry {
    let fd = Fd(io.socket);
    // The kernel continues a partial send by itself.
    let send = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
    // SAFETY: the caller vouches for a message with that many iovecs.
    let iovecs = unsafe {
        let message = &*io.message;
        std::slice::from_raw_parts(message.msg_iov, message.msg_iovlen as _)
    };
    match (io.kind, iovecs) {
        (SocketIoKind::Receive, [one]) => {
            opcode::Recv::new(fd, one.iov_base.cast(), len(one)).build()
        }
        (SocketIoKind::Receive, _) => opcode::RecvMsg::new(fd, io.message).build(),
        (SocketIoKind::Send, [one]) => opcode::Send::new(fd, one.iov_base.cast(), len(one))
            .flags(send)
            .build(),
        (SocketIoKind::Send, _) => opcode::SendMsg::new(fd, io.message)
            .flags(send as u32)
            .build(),
    }
}

fn len(segment: &libc::iovec) -> u32 {
    segment.iov_len.min(MAX_LEN) as u32
}

/// Returns the iovecs that the kernel accepts at once, and the number of the registered buffer that
/// contains them all, if one does.
///
/// # Safety
/// As for [`entry`].
#[inline]
unsafe fn segments<'a>(io: &'a Io, pinned: Option<&Pinned>) -> (&'a [libc::iovec], Option<u16>) {
    let count = io.iov_len.min(MAX_IOVECS) as usize;
    if count == 0 {
        return (&[], None);
    }
    // SAFETY: the caller vouches for that many iovecs.
    let iovecs = unsafe { std::slice::from_raw_parts(io.iov, count) };
    (iovecs, pinned.and_then(|pinned| pinned.find(iovecs)))
}
