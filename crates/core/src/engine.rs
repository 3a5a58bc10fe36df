//! The interface by which a worker does I/O and sleeps.

use crate::token::Token;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::Duration;

/// Identifies a file within its worker's engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(pub u32);

/// Operation on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoKind {
    /// preadv2(2): `iov`, `offset`.
    Read,
    /// pwritev2(2): `iov`, `offset`.
    Write {
        /// Whether the write has the flag RWF_DSYNC: it completes only when its data is durable.
        dsync: bool,
    },
    /// fdatasync(2).
    Sync,
    /// fallocate(2): `offset`, `len`. On block devices, too, fallocate discards and writes zeroes.
    Allocate {
        /// Flags of fallocate(2), such as `FALLOC_FL_PUNCH_HOLE`.
        mode: i32,
    },
}

/// An I/O operation.
#[derive(Clone, Copy, Debug)]
pub struct Io {
    /// Operation to carry out.
    pub kind: IoKind,
    /// File on which the operation works, from [`Engine::add_file`].
    pub file: FileId,
    /// Bytes from the start of the file.
    pub offset: u64,
    /// Length in bytes; for reads and writes, the sum of the iovecs.
    pub len: u64,
    /// Array of `iov_len` iovecs with the data; ignored by operations without data.
    pub iov: *const libc::iovec,
    /// Number of iovecs in that array.
    pub iov_len: u32,
}

/// Direction of an operation on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketIoKind {
    /// recvmsg(2): completes as soon as some bytes have arrived, or with 0 at the end of the
    /// stream.
    Receive,
    /// sendmsg(2): completes with the number of bytes sent, at least 1 and possibly fewer than
    /// requested.
    Send,
}

/// An operation on a connected stream socket.
#[derive(Clone, Copy, Debug)]
pub struct SocketIo {
    /// Direction of the operation.
    pub kind: SocketIoKind,
    /// Socket on which the operation works, registered by [`Engine::add_socket`].
    pub socket: RawFd,
    /// Message with 1 to 1024 iovecs (UIO_MAXIOV), none of them empty. No other field is set.
    pub message: *mut libc::msghdr,
}

/// Memory that the requests of a source refer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Address of the mapping.
    pub addr: usize,
    /// Length in bytes.
    pub len: usize,
}

/// The outcome of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Token that was passed with the operation, or with the eventfd that was signalled.
    pub token: Token,
    /// Number of bytes moved, or a negative errno.
    pub result: i32,
}

/// How long [`Engine::submit`] may wait for a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Returns at once.
    No,
    /// Until something completes, however long that takes.
    Forever,
    /// Until something completes or the time is over.
    For(Duration),
}

/// A worker's interface to the kernel, created and used on that worker's thread.
pub trait Engine {
    /// Returns the engine's name: "io_uring", "native" or "threads".
    fn name(&self) -> &'static str;

    /// Makes room for `n` operations in flight; called before that number is reached.
    fn reserve(&mut self, n: usize) -> io::Result<()>;

    /// Registers a file, which stays open at least until `remove_file`.
    fn add_file(&mut self, file: BorrowedFd<'_>) -> io::Result<FileId>;

    /// Unregisters a file that no operation in flight uses. The id becomes invalid.
    fn remove_file(&mut self, file: FileId);

    /// Enables registration of added memory with the kernel, at the cost that the engine documents.
    /// Returns false if the engine does not support it.
    fn pin_memory(&mut self) -> bool {
        false
    }

    /// Adds memory that the requests of a source are about to use. An engine may make such memory
    /// cheaper to use, but need not. Several sources can add the same memory.
    ///
    /// # Safety
    /// The memory stays mapped, and nothing else is mapped there, until it is removed as often as
    /// it was added.
    unsafe fn add_memory(&mut self, _memory: &[Buffer]) {}

    /// Removes memory of a source that has gone and has nothing in flight.
    fn remove_memory(&mut self, _memory: &[Buffer]) {}

    /// Queues one operation. This cannot fail: an error is the result of its completion. The
    /// operation may reach the kernel only at the next `submit`.
    ///
    /// # Safety
    /// The iovecs and the memory that they refer to stay valid until the operation's completion has
    /// been seen.
    unsafe fn push(&mut self, io: Io, token: Token);

    /// Registers a socket, which must be in blocking mode (no O_NONBLOCK). An operation waits for
    /// the socket, but the caller does not. The socket stays open at least until `remove_socket`.
    fn add_socket(&mut self, _socket: BorrowedFd<'_>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Removes a socket that has nothing in flight.
    fn remove_socket(&mut self, _socket: BorrowedFd<'_>) {}

    /// Queues one operation on a socket, as `push` does. At most one operation of each kind may be
    /// in flight on a socket.
    ///
    /// # Safety
    /// The message, its iovecs and the memory that they refer to stay valid until the operation's
    /// completion has been seen. No other code uses the message meanwhile.
    unsafe fn push_socket(&mut self, _io: SocketIo, _token: Token) {
        unreachable!("it has no sockets");
    }

    /// Ends an operation on a socket, if it is in flight. The engine first attempts an operation
    /// that it has not attempted yet. The operation completes with the number of bytes moved or
    /// with -ECANCELED.
    fn cancel_socket(&mut self, _token: Token) {}

    /// Produces a completion with `token` each time that `fd` (an eventfd) is signalled, and at
    /// least one for signals from before this call. The engine does not read the eventfd, and no
    /// other code needs to.
    fn watch(&mut self, fd: RawFd, token: Token) -> io::Result<()>;

    /// Stops watching. Completions in flight may still arrive.
    fn unwatch(&mut self, fd: RawFd, token: Token);

    /// Submits all queued operations to the kernel and appends completions to `out`. Makes no
    /// system call if nothing is queued, nothing has completed and `wait` is `Wait::No`. With a
    /// wait, returns when something has completed, even if nothing was appended, for example after
    /// a signal.
    fn submit(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()>;

    /// Returns whether `submit` would find a completion. Makes no system call, except in an engine
    /// without a ring that waits for sockets.
    fn ready(&mut self) -> bool;
}
