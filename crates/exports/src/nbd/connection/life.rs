//! Receives, sends, and ends a connection.

use super::{Ending, NbdSource, RECEIVE, SEND};
use fathom_core::{Cx, SocketIo, SocketIoKind};
use fathom_tls::Opened;
use fathom_units::cause;
use libc::{iovec, msghdr};
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// The receive operation: its bytes go to the rest of a large payload, then to the inbox.
pub(super) struct Receive {
    message: msghdr,
    iovecs: [iovec; 2],
    count: usize,
    /// Bytes of the message that belong to a payload.
    for_payload: usize,
    pub(super) in_flight: bool,
    cancelled: bool,
}

// SAFETY: the pointers lead into this box and into memory that moves together with it.
unsafe impl Send for Receive {}

impl Receive {
    pub(super) fn new() -> Box<Receive> {
        let nothing = iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        Box::new(Receive {
            // SAFETY: an all-zero msghdr is an empty message.
            message: unsafe { std::mem::zeroed() },
            iovecs: [nothing; 2],
            count: 0,
            for_payload: 0,
            in_flight: false,
            cancelled: false,
        })
    }

    fn add(&mut self, (at, len): (*mut u8, usize)) {
        if len > 0 {
            self.iovecs[self.count] = iovec {
                iov_base: at.cast(),
                iov_len: len,
            };
            self.count += 1;
        }
    }

    /// Allows receives again after a cancellation.
    pub(super) fn forget_cancel(&mut self) {
        self.cancelled = false;
    }

    /// Returns the size of the last iovec.
    fn last_room(&self) -> usize {
        self.iovecs[self.count - 1].iov_len
    }
}

impl NbdSource {
    /// Starts a receive, unless one is in flight or the connection is not served.
    pub(super) fn receive(&mut self, cx: &mut Cx) {
        let Some(id) = self.id.filter(|_| self.serving && !self.receive.in_flight) else {
            return;
        };
        self.receive.count = 0;
        self.receive.for_payload = 0;
        if let Some(tls) = &mut self.tls {
            tls.room()
                .into_iter()
                .for_each(|room| self.receive.add(room));
        } else {
            let target = self.payload.as_ref().and_then(|payload| payload.target());
            if let Some((span, filled, len)) = target {
                // SAFETY: the address lies within the span.
                let at = unsafe { self.pool.at(span).add(filled) };
                self.receive.for_payload = len;
                self.receive.add((at, len));
            }
            let room = self.inbox.room(&mut self.pool);
            room.into_iter().for_each(|room| self.receive.add(room));
        }
        if self.receive.count == 0 {
            return; // the connection waits for memory
        }
        self.receive.message.msg_iov = self.receive.iovecs.as_mut_ptr();
        self.receive.message.msg_iovlen = self.receive.count as _;
        let io = SocketIo {
            kind: SocketIoKind::Receive,
            socket: self.socket.as_raw_fd(),
            message: &mut self.receive.message,
        };
        // SAFETY: the box, the pages and the inbox stay until the completion: the source is not
        // given back before, and no other receive is in flight.
        unsafe { cx.engine.push_socket(io, id.token(RECEIVE)) };
        self.receive.in_flight = true;
    }

    pub(super) fn received(&mut self, result: i32) {
        self.receive.in_flight = false;
        match result {
            ..0 if self.receive.cancelled => {}
            // The next receive returns the same result once the connection resumes.
            ..=0 if self.held => {}
            ..0 => self.lost(-result),
            0 => self.leave(Ending::Vanished {
                unanswered: self.table.used(),
            }),
            bytes if self.serving || self.held => self.received_bytes(bytes as usize),
            _ => {}
        }
    }

    fn received_bytes(&mut self, bytes: usize) {
        if let Some(tls) = &mut self.tls {
            return tls.received(bytes);
        }
        let direct = bytes.min(self.receive.for_payload);
        if let Some(payload) = self.payload.as_mut().filter(|_| direct > 0) {
            payload.filled(direct);
        }
        let rest = bytes - direct;
        if rest > 0 {
            self.inbox.received(rest, self.receive.last_room());
        }
    }

    /// Decrypts received TLS records into the payload or the inbox. Does nothing without TLS.
    pub(super) fn decrypt(&mut self) -> Result<(), String> {
        while let Some(tls) = &mut self.tls {
            let target = self.payload.as_ref().and_then(|payload| payload.target());
            let direct = target.is_some_and(|(_, _, len)| len > 0);
            let room = match target {
                // SAFETY: the address lies within the span.
                Some((span, filled, len)) if direct => unsafe {
                    Some((self.pool.at(span).add(filled), len))
                },
                _ => self.inbox.room(&mut self.pool),
            };
            let Some((at, len)) = room.filter(|(_, len)| *len > 0) else {
                return Ok(());
            };
            // SAFETY: this memory belongs to the connection, no other code uses it meanwhile, and
            // the kernel has initialised it.
            match tls.open(unsafe { std::slice::from_raw_parts_mut(at, len) })? {
                Opened::Nothing => return Ok(()),
                Opened::Bytes(bytes) if direct => {
                    self.payload.iter_mut().for_each(|p| p.filled(bytes));
                }
                Opened::Bytes(bytes) => self.inbox.received(bytes, len),
                Opened::End => {
                    let unanswered = self.table.used();
                    self.leave(Ending::Vanished { unanswered });
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Handles a failed socket: no more replies reach the client.
    pub(super) fn lost(&mut self, errno: i32) {
        self.mute = true;
        let unanswered = self.table.used();
        self.leave(match errno {
            libc::EPIPE | libc::ECONNRESET => Ending::Vanished { unanswered },
            _ => Ending::Failed(cause(io::Error::from_raw_os_error(errno))),
        });
    }

    /// Stops accepting commands. Only the first reason is recorded.
    pub(super) fn leave(&mut self, ending: Ending) {
        if !std::mem::take(&mut self.serving) {
            return;
        }
        if ending != Ending::Disconnected {
            self.abandon();
        }
        self.inbox.clear();
        self.ending = ending;
    }

    /// Sends the pending replies.
    pub(super) fn send(&mut self, cx: &mut Cx) {
        if self.held {
            return;
        }
        if self.mute && !self.outbox.in_flight() {
            self.outbox.give_up(&mut self.pool);
            return;
        }
        let Some(id) = self.id else { return };
        let (socket, token) = (self.socket.as_raw_fd(), id.token(SEND));
        let (outbox, tls) = (&mut self.outbox, self.tls.as_mut());
        if let Err(why) = outbox.start(cx, socket, token, tls, &mut self.pool) {
            self.mute = true;
            self.leave(Ending::Failed(why));
        }
    }

    pub(super) fn sent(&mut self, result: i32) {
        let bytes = usize::try_from(result).unwrap_or(0);
        self.outbox.sent(bytes, self.tls.as_mut(), &mut self.pool);
        if result <= 0 && !self.held {
            self.lost(-result);
        }
    }

    /// Once the connection is not served, cancels the receive, and reports the end when nothing is
    /// in flight.
    pub(super) fn settle(&mut self, cx: &mut Cx) {
        let Some(id) = self.id.filter(|_| !self.serving) else {
            return;
        };
        if self.receive.in_flight && !std::mem::replace(&mut self.receive.cancelled, true) {
            cx.engine.cancel_socket(id.token(RECEIVE));
        }
        if self.held {
            return self.settle_held(cx, id);
        }
        if self.table.used() > 0 {
            return;
        }
        if self.outbox.is_empty(self.tls.as_ref()) && !self.mute {
            let goodbye = self.tls.as_mut().is_some_and(|tls| tls.close());
            if goodbye {
                self.send(cx);
            }
        }
        if self.outbox.in_flight() && self.stopping {
            // Bytes that the client has not accepted by now are lost.
            self.mute = true;
            cx.engine.cancel_socket(id.token(SEND));
        }
        let silent = self.mute || self.outbox.is_empty(self.tls.as_ref());
        if self.receive.in_flight || self.outbox.in_flight() || !silent {
            return;
        }
        if self.stopping {
            cx.engine.remove_socket(self.socket.as_fd());
            self.stopped = true;
        } else if let Some(on_end) = self.on_end.take() {
            on_end();
        }
    }
}
