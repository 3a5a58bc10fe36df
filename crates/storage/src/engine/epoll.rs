//! Sleeps on epoll(7), for the engines without a ring.

use crate::engine::sockets::Sockets;
use fathom_core::{Completion, Token, Wait};
use fathom_units::cause;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::BorrowedFd;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{OwnedFd, RawFd};
use std::time::Duration;

/// Maximum number of events taken in one call; further ones wait for the next call.
const EVENTS: usize = 64;

/// Eventfds and sockets, watched edge-triggered so that eventfds need not be read.
pub(crate) struct Epoll {
    epoll: OwnedFd,
    buffer: [MaybeUninit<epoll::Event>; EVENTS],
}

impl Epoll {
    pub(crate) fn new() -> io::Result<Epoll> {
        Ok(Epoll {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            buffer: [const { MaybeUninit::uninit() }; EVENTS],
        })
    }

    /// Watches an eventfd. `fd` stays open until `unwatch`, or until this value is dropped.
    pub(crate) fn watch(&self, fd: RawFd, token: Token) -> io::Result<()> {
        // SAFETY: the descriptor is open, as required of the caller.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let data = EventData::new_u64(token.to_u64());
        epoll::add(&self.epoll, fd, data, EventFlags::IN | EventFlags::ET)?;
        Ok(())
    }

    pub(crate) fn unwatch(&self, fd: RawFd) {
        // SAFETY: the descriptor is still open, as required of the caller of `watch`.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        if let Err(error) = epoll::delete(&self.epoll, fd) {
            tracing::warn!("epoll: cannot remove a file descriptor: {}", cause(error));
        }
    }

    /// Watches a socket for becoming readable or writable. The socket stays open until `unwatch`.
    pub(crate) fn watch_socket(&self, socket: BorrowedFd<'_>, data: u64) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&self.epoll, socket, EventData::new_u64(data), flags)?;
        Ok(())
    }

    /// Returns whether `wait` would return at once.
    pub(crate) fn has_events(&self) -> bool {
        let mut polled = [PollFd::new(&self.epoll, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec::default())).is_ok_and(|n| n > 0)
    }

    /// Appends the tokens of signalled descriptors to `out`, except the engine's own, and wakes
    /// sockets that are ready. Returns false if the time was over or a signal arrived.
    pub(crate) fn wait(
        &mut self,
        wait: Wait,
        sockets: &mut Sockets,
        out: &mut Vec<Completion>,
    ) -> io::Result<bool> {
        let timeout = match wait {
            Wait::No => Some(Duration::ZERO),
            Wait::Forever => None,
            Wait::For(timeout) => Some(timeout),
        };
        let timeout = timeout.map(|t| Timespec {
            tv_sec: t.as_secs().min(i64::MAX as u64) as i64,
            tv_nsec: t.subsec_nanos().into(),
        });
        let events = match epoll::wait(&self.epoll, &mut self.buffer, timeout.as_ref()) {
            Ok((events, _)) => events,
            Err(rustix::io::Errno::INTR) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let any = !events.is_empty();
        for event in &*events {
            let data = event.data.u64();
            let token = Token::from_u64(data);
            if token != Token::ENGINE && !sockets.wake(data) {
                out.push(Completion { token, result: 0 });
            }
        }
        Ok(any)
    }
}
