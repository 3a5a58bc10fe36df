//! The engine that makes blocking system calls in a pool of threads.

use crate::engine::epoll::Epoll;
use crate::engine::files::Files;
use crate::engine::pool::Pool;
use crate::engine::sockets::Sockets;
use fathom_core::{Completion, Engine, FileId, Io, SocketIo, Token, Wait};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

/// Number of submits after which a busy worker polls its descriptors. Otherwise kicks of sources
/// that were idle would wait until the worker is idle. The poll is the only system call of a submit
/// without I/O.
pub(crate) const BUSY_LOOK: u32 = 16;

/// preadv(2), pwritev2(2) and so on in a pool of threads; works on every kernel.
pub struct Threads {
    pool: Pool,
    epoll: Epoll,
    files: Files,
    sockets: Sockets,
    since_look: u32,
}

impl Threads {
    /// Creates the engine.
    ///
    /// # Errors
    /// If a file descriptor cannot be created.
    pub fn new() -> io::Result<Threads> {
        let (pool, epoll) = (Pool::new()?, Epoll::new()?);
        epoll.watch(pool.event(), Token::ENGINE)?;
        Ok(Threads {
            pool,
            epoll,
            files: Files::default(),
            sockets: Sockets::default(),
            since_look: 0,
        })
    }
}

impl Engine for Threads {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn reserve(&mut self, n: usize) -> io::Result<()> {
        self.pool.reserve(n);
        Ok(())
    }

    fn add_file(&mut self, file: BorrowedFd<'_>) -> io::Result<FileId> {
        Ok(self.files.add(file.as_raw_fd()))
    }

    fn remove_file(&mut self, file: FileId) {
        self.files.remove(file);
    }

    unsafe fn push(&mut self, io: Io, token: Token) {
        // SAFETY: as required of the caller; the file stays open until `remove_file`.
        unsafe { self.pool.push(self.files.get(io.file), io, token) };
    }

    fn add_socket(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.sockets.add(&self.epoll, socket)
    }

    fn remove_socket(&mut self, socket: BorrowedFd<'_>) {
        self.epoll.unwatch(socket.as_raw_fd());
    }

    unsafe fn push_socket(&mut self, io: SocketIo, token: Token) {
        // SAFETY: as required of the caller.
        unsafe { self.sockets.push(io, token) };
    }

    fn cancel_socket(&mut self, token: Token) {
        self.sockets.cancel(token);
    }

    fn watch(&mut self, fd: RawFd, token: Token) -> io::Result<()> {
        self.epoll.watch(fd, token)
    }

    fn unwatch(&mut self, fd: RawFd, _token: Token) {
        self.epoll.unwatch(fd);
    }

    fn submit(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()> {
        let before = out.len();
        self.pool.submit();
        self.sockets.run(out);
        self.pool.reap(out);
        if wait == Wait::No || out.len() > before {
            self.since_look += 1;
            if self.since_look >= BUSY_LOOK {
                self.since_look = 0;
                self.epoll.wait(Wait::No, &mut self.sockets, out)?;
            }
            return Ok(());
        }
        if self.pool.before_sleep() {
            let slept = self.epoll.wait(wait, &mut self.sockets, out);
            self.pool.after_sleep();
            slept?;
        }
        self.sockets.run(out);
        self.pool.reap(out);
        Ok(())
    }

    fn ready(&mut self) -> bool {
        if self.sockets.have_events(&self.epoll) {
            self.since_look = BUSY_LOOK;
            return true;
        }
        self.pool.ready() || self.pool.queued() > 0 || self.sockets.are_due()
    }
}
