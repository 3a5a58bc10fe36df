//! Socket operations for the engines without a ring. An operation is tried when it is pushed and
//! whenever epoll reports that its socket is ready.

use crate::engine::epoll::Epoll;
use fathom_core::token::Target;
use fathom_core::{Completion, SocketIo, SocketIoKind, Token};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

struct Pending {
    io: SocketIo,
    token: Token,
    /// Whether the socket was not ready, so that the operation waits for epoll.
    parked: bool,
    cancelled: bool,
}

/// A worker's pending socket operations.
#[derive(Default)]
pub(crate) struct Sockets {
    pending: Vec<Pending>,
    /// Number of operations to try.
    due: usize,
}

/// Flag in the epoll data of a socket, which also carries its descriptor. The data of the engine's
/// own eventfds is [`Token::ENGINE`] without it.
const SOCKET: u64 = 1 << 32;

impl Sockets {
    pub(crate) fn add(&mut self, epoll: &Epoll, socket: BorrowedFd<'_>) -> io::Result<()> {
        let data = Token::ENGINE.to_u64() | SOCKET | socket.as_raw_fd() as u64;
        epoll.watch_socket(socket, data)
    }

    /// # Safety
    /// As for [`Engine::push_socket`](fathom_core::Engine::push_socket).
    pub(crate) unsafe fn push(&mut self, io: SocketIo, token: Token) {
        self.pending.push(Pending {
            io,
            token,
            parked: false,
            cancelled: false,
        });
        self.due += 1;
    }

    pub(crate) fn cancel(&mut self, token: Token) {
        if let Some(known) = self.pending.iter_mut().find(|p| p.token == token) {
            self.due += usize::from(std::mem::take(&mut known.parked));
            known.cancelled = true;
        }
    }

    /// Returns whether any operation is to be tried.
    #[inline]
    pub(crate) fn are_due(&self) -> bool {
        self.due > 0
    }

    /// Returns whether operations wait for their sockets and epoll has events. Makes a system call
    /// only if operations wait.
    #[inline]
    pub(crate) fn have_events(&self, epoll: &Epoll) -> bool {
        self.pending.len() > self.due && epoll.has_events()
    }

    /// Handles an event of epoll. Returns false if it does not belong to a socket.
    pub(crate) fn wake(&mut self, data: u64) -> bool {
        let is_engine = Token::from_u64(data).target() == Target::Engine;
        if !is_engine || data & SOCKET == 0 {
            return false;
        }
        let socket = data as u32 as RawFd;
        for known in self.pending.iter_mut().filter(|p| p.io.socket == socket) {
            self.due += usize::from(std::mem::take(&mut known.parked));
        }
        true
    }

    /// Tries the operations that are due.
    #[inline]
    pub(crate) fn run(&mut self, out: &mut Vec<Completion>) {
        if self.due > 0 {
            self.run_due(out);
        }
    }

    fn run_due(&mut self, out: &mut Vec<Completion>) {
        self.due = 0;
        self.pending.retain_mut(|pending| {
            if pending.parked {
                return true;
            }
            let result = pending.attempt();
            let token = pending.token;
            out.extend(result.map(|result| Completion { token, result }));
            pending.parked = result.is_none();
            result.is_none()
        });
    }
}

impl Pending {
    /// Returns the result, or None if the socket is not ready.
    fn attempt(&mut self) -> Option<i32> {
        let (socket, message) = (self.io.socket, self.io.message);
        loop {
            // SAFETY: the caller of `push` vouches for the message.
            let result = unsafe {
                match self.io.kind {
                    SocketIoKind::Receive => libc::recvmsg(socket, message, libc::MSG_DONTWAIT),
                    SocketIoKind::Send => {
                        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
                        libc::sendmsg(socket, message, flags)
                    }
                }
            };
            if result >= 0 {
                return Some(result as i32);
            }
            let errno = io::Error::last_os_error().raw_os_error();
            match errno.unwrap_or(libc::EIO) {
                libc::EINTR => {}
                libc::EAGAIN if self.cancelled => return Some(-libc::ECANCELED),
                libc::EAGAIN => return None,
                errno => return Some(-errno),
            }
        }
    }
}
