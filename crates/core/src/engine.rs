//! How a worker does I/O and where it sleeps.

use crate::token::Token;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::Duration;

/// A file as its worker's engine knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(pub u32);

/// What to do with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoKind {
    /// preadv2(2): `iov`, `offset`.
    Read,
    /// pwritev2(2): `iov`, `offset`; `dsync` adds RWF_DSYNC.
    Write { dsync: bool },
    /// fdatasync(2).
    Sync,
    /// fallocate(2) with this mode: `offset`, `len`. (Discarding and zeroing
    /// work on block devices, too, by fallocate.)
    Allocate { mode: i32 },
}

/// One I/O operation.
#[derive(Clone, Copy, Debug)]
pub struct Io {
    pub kind: IoKind,
    pub file: FileId,
    /// Bytes from the start of the file.
    pub offset: u64,
    /// Bytes; for reads and writes, what the iovecs add up to.
    pub len: u64,
    pub iov: *const libc::iovec,
    pub iov_len: u32,
}

/// Which way the bytes of a socket go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketIoKind {
    /// recvmsg(2): completes as soon as there are some bytes, with 0 at the
    /// end of the stream.
    Receive,
    /// sendmsg(2): completes with the bytes sent, which may be fewer than all
    /// and are not 0.
    Send,
}

/// One operation on a connected stream socket.
#[derive(Clone, Copy, Debug)]
pub struct SocketIo {
    pub kind: SocketIoKind,
    pub socket: RawFd,
    /// Its iovecs, one at least and 1024 at most (UIO_MAXIOV), none of them
    /// empty; nothing else in it is set.
    pub message: *mut libc::msghdr,
}

/// Memory that a source's requests point to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Where it is mapped.
    pub addr: usize,
    /// Bytes.
    pub len: usize,
}

/// The outcome of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    pub token: Token,
    /// Bytes moved, or a negative errno.
    pub result: i32,
}

/// How long [`Engine::submit`] may wait for a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    No,
    /// Until something completes, however long that takes.
    Forever,
    /// Until something completes or the time is over.
    For(Duration),
}

/// One worker's way to the kernel; made and used on that worker's thread.
pub trait Engine {
    /// "io_uring", "native" or "threads".
    fn name(&self) -> &'static str;

    /// Room for `n` operations in flight; called before they can be.
    fn reserve(&mut self, n: usize) -> io::Result<()>;

    /// Make a file known. It stays open at least until `remove_file`.
    fn add_file(&mut self, file: BorrowedFd<'_>) -> io::Result<FileId>;

    fn remove_file(&mut self, file: FileId);

    /// From now on, register memory that is added with the kernel, at the
    /// price that the engine documents. False: this engine cannot.
    fn pin_memory(&mut self) -> bool {
        false
    }

    /// A source is about to attach whose requests point into this memory. An
    /// engine may make such memory cheaper to use; it need not. Memory can be
    /// added several times, by several sources.
    ///
    /// # Safety
    /// Until the same memory is removed as often as it was added, it stays
    /// mapped and nothing else is mapped there.
    unsafe fn add_memory(&mut self, _memory: &[Buffer]) {}

    /// The source is gone, and nothing of it is in flight.
    fn remove_memory(&mut self, _memory: &[Buffer]) {}

    /// Queue one operation. It cannot fail: what goes wrong is the result of
    /// its completion. Nothing need reach the kernel before `submit`.
    ///
    /// # Safety
    /// The iovecs and the memory that they name stay valid until the
    /// operation's completion has been seen.
    unsafe fn push(&mut self, io: Io, token: Token);

    /// Make a socket known, which is not set to non-blocking (O_NONBLOCK): an
    /// operation waits for it, though not the caller. It stays open at least
    /// until `remove_socket`.
    fn add_socket(&mut self, _socket: BorrowedFd<'_>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Nothing of it is in flight.
    fn remove_socket(&mut self, _socket: BorrowedFd<'_>) {}

    /// Queue one operation on a socket, as `push` does; of each kind, at most
    /// one of a socket may be in flight.
    ///
    /// # Safety
    /// The message, its iovecs and the memory that they name stay valid until
    /// the operation's completion has been seen. Nobody else uses the message.
    unsafe fn push_socket(&mut self, _io: SocketIo, _token: Token) {
        unreachable!("it has no sockets");
    }

    /// End an operation on a socket, if it is in flight. It is tried once
    /// before, if it has not been yet, and completes with what it has moved
    /// or with -ECANCELED.
    fn cancel_socket(&mut self, _token: Token) {}

    /// Complete with `token` each time that `fd` (an eventfd) is signalled,
    /// once at least for signals from before this call. Reading the fd is
    /// neither needed nor done.
    fn watch(&mut self, fd: RawFd, token: Token) -> io::Result<()>;

    /// Stop watching. Completions under way may still arrive.
    fn unwatch(&mut self, fd: RawFd, token: Token);

    /// Hand everything queued to the kernel and append what has completed to
    /// `out`. With nothing queued, nothing completed and `Wait::No` it makes
    /// no system call. With a wait it returns when anything has completed
    /// (even if nothing could be appended, for example after a signal).
    fn submit(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()>;

    /// Whether `submit` would find a completion; no system call, unless an
    /// engine without a ring waits for sockets.
    fn ready(&mut self) -> bool;
}
