//! A connection by TLS: what the sender would send is encrypted first, and what comes is decrypted before the
//! receiver sees it. Requests' memory is copied, never encrypted in place: a guest may be changing it.

use super::receiver::Receiver;
use super::sender::Sender;
use super::table::Table;
use fathom_core::Slab;
use fathom_tls::{Opened, Session};
use libc::{iovec, msghdr};

/// Encrypted at once, at most.
const STAGE: usize = 64 << 10;

pub(super) struct Sealed {
    session: Session,
    stage: Vec<u8>,
    to_send: [iovec; 1],
    to_receive: [iovec; 1],
    sending: msghdr,
    receiving: msghdr,
}

impl Sealed {
    pub(super) fn new(session: Session) -> Box<Sealed> {
        let nothing = iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        // SAFETY: all zeroes are a message of nothing.
        let message = || unsafe { std::mem::zeroed() };
        Box::new(Sealed {
            session,
            stage: Vec::with_capacity(STAGE),
            to_send: [nothing],
            to_receive: [nothing],
            sending: message(),
            receiving: message(),
        })
    }

    /// Encrypts what the sender has, and appends to `gone` the commands of which nothing is left. None:
    /// nothing is to be sent.
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
            // SAFETY: the sender's message is valid until it is told that it has been sent.
            unsafe { self.take(message) };
            let sealed = self.session.seal(&self.stage)?;
            sender.sent(sealed, gone);
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

    /// Copies what the message begins with.
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
            // SAFETY: likewise; there is room for STAGE bytes, and so many of them have been written then.
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

    /// The message of the next receive; None: all must be taken in first.
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

    /// So many bytes have come; the receiver takes in what they say.
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

    /// For a last word.
    pub(super) fn session(&mut self) -> &mut Session {
        &mut self.session
    }
}
