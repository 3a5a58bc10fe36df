//! A TLS connection: encrypts what the sender sends, and decrypts data before the receiver sees it.
//! The memory of requests is copied, never encrypted in place, because a guest may be changing it.

use super::receiver::Receiver;
use super::sender::Sender;
use super::table::Table;
use fathom_core::Slab;
use fathom_tls::{Opened, Session};
use libc::{iovec, msghdr};

/// Maximum number of bytes encrypted at a time.
const STAGE: usize = 64 << 10;

pub(super) struct TlsConnection {
    session: Session,
    stage: Vec<u8>,
    to_send: [iovec; 1],
    to_receive: [iovec; 1],
    sending: msghdr,
    receiving: msghdr,
}

impl TlsConnection {
    pub(super) fn new(session: Session) -> Box<TlsConnection> {
        let nothing = iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        // SAFETY: an all-zero header is a message without data.
        let message = || unsafe { std::mem::zeroed() };
        Box::new(TlsConnection {
            session,
            stage: Vec::with_capacity(STAGE),
            to_send: [nothing],
            to_receive: [nothing],
            sending: message(),
            receiving: message(),
        })
    }

    /// Encrypts the sender's messages. Commands of which nothing is left to send are appended to
    /// `gone`. Returns None if there is nothing to send.
    pub(super) fn prepare(
        &mut self,
        sender: &mut Sender,
        table: &mut Table,
        slab: &Slab,
        gone: &mut Vec<u16>,
    ) -> Result<Option<*mut msghdr>, String> {
        while self.session.wants_more() {
            let Some(message) = sender.prepare(table, slab) else {
                break;
            };
            // SAFETY: the sender's message is valid until the sender learns that it was sent.
            unsafe { self.take(message) };
            let encrypted = self.session.encrypt(&self.stage)?;
            sender.sent(encrypted, gone);
        }
        self.session.flush()?;
        let left = self.session.to_send();
        if left.is_empty() {
            return Ok(None);
        }
        self.to_send[0] = iovec {
            iov_base: left.as_ptr().cast_mut().cast(),
            iov_len: left.len(),
        };
        self.sending.msg_iov = self.to_send.as_mut_ptr();
        self.sending.msg_iovlen = 1;
        Ok(Some(&mut self.sending))
    }

    /// Copies the beginning of the message to `stage`.
    ///
    /// # Safety
    /// The message, its iovecs and the memory that they name are valid.
    unsafe fn take(&mut self, message: *mut msghdr) {
        self.stage.clear();
        // SAFETY: as required of the caller.
        let iovecs = unsafe {
            let message = &*message;
            std::slice::from_raw_parts(message.msg_iov, message.msg_iovlen)
        };
        for iovec in iovecs {
            let len = iovec.iov_len.min(STAGE - self.stage.len());
            let at = self.stage.len();
            // SAFETY: as required of the caller; there is room for STAGE bytes, and `at + len` of
            // them have been written.
            unsafe {
                let to = self.stage.as_mut_ptr().add(at);
                iovec.iov_base.cast::<u8>().copy_to_nonoverlapping(to, len);
                self.stage.set_len(at + len);
            }
        }
    }

    pub(super) fn sent(&mut self, bytes: usize) {
        self.session.sent(bytes);
    }

    /// Returns the message of the next receive, or None if received data must be processed first.
    pub(super) fn room(&mut self) -> Option<*mut msghdr> {
        let (at, len) = self.session.room()?;
        self.to_receive[0] = iovec {
            iov_base: at.cast(),
            iov_len: len,
        };
        self.receiving.msg_iov = self.to_receive.as_mut_ptr();
        self.receiving.msg_iovlen = 1;
        Some(&mut self.receiving)
    }

    /// Handles `bytes` of received data: decrypts them and passes them to the receiver.
    pub(super) fn received(
        &mut self,
        bytes: usize,
        receiver: &mut Receiver,
        table: &mut Table,
        slab: &Slab,
        now: u64,
        answered: &mut Vec<u16>,
    ) -> Result<(), String> {
        self.session.received(bytes);
        loop {
            match self.session.open(receiver.room())? {
                Opened::Bytes(bytes) => {
                    receiver.received(bytes);
                    let taken = receiver.take_in(table, slab, now, answered);
                    taken.map_err(|violation| format!("the server {violation}"))?;
                }
                Opened::Nothing => return Ok(()),
                Opened::End => return Err("the server closed the connection".into()),
            }
        }
    }

    /// Returns the session, for a last message.
    pub(super) fn session(&mut self) -> &mut Session {
        &mut self.session
    }
}
