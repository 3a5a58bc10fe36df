//! Queue of replies. A single system call sends all replies that are ready, with headers and data
//! in place.

use super::pool::{Pool, Span};
use fathom_core::{Cx, SocketIo, SocketIoKind, Token};
use fathom_tls::Session;
use libc::{iovec, msghdr};
use std::os::fd::RawFd;

/// Maximum number of iovecs in one call (UIO_MAXIOV).
const MAX_IOVECS: usize = 1024;

/// Bytes of waiting headers from which no command is accepted, since the client does not read its
/// replies.
const FULL: usize = 128 << 10;

/// Replies that are sent together.
#[derive(Default)]
struct Batch {
    /// Headers and other small parts.
    bytes: Vec<u8>,
    /// Parts in order. While `bytes` may grow, the address of a part in `bytes` is its offset.
    iovecs: Vec<iovec>,
    /// For each iovec, the pages to release once it is sent.
    spans: Vec<Option<Span>>,
    /// Indices of the iovecs that point into `bytes`.
    of_bytes: Vec<u32>,
    /// Number of iovecs that have been sent.
    sent: usize,
}

pub(super) struct Outbox {
    building: Batch,
    sending: Batch,
    message: Box<msghdr>,
    /// With TLS, the encrypted bytes that are being sent: at most one iovec.
    encrypted: [iovec; 1],
    in_flight: bool,
    /// Bytes of data waiting to be sent.
    data: usize,
}

// SAFETY: the pointers lead into the batches, and into the pool, which moves together with this
// value.
unsafe impl Send for Outbox {}

impl Outbox {
    pub(super) fn new() -> Outbox {
        Outbox {
            building: Batch::default(),
            sending: Batch::default(),
            // SAFETY: an all-zero msghdr is an empty message.
            message: Box::new(unsafe { std::mem::zeroed() }),
            encrypted: [NOTHING],
            in_flight: false,
            data: 0,
        }
    }

    /// Appends a copy of `bytes`.
    #[inline]
    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.building.push_bytes(bytes);
    }

    /// Appends `len` bytes at `at`, the start of `span`, which is released once they are sent.
    #[inline]
    pub(super) fn data(&mut self, at: *mut u8, len: usize, span: Span) {
        let iov = iovec {
            iov_base: at.cast(),
            iov_len: len,
        };
        self.building.iovecs.push(iov);
        self.building.spans.push(Some(span));
        self.data += len;
    }

    pub(super) fn is_full(&self) -> bool {
        self.building.bytes.len() >= FULL
    }

    /// Returns the number of bytes of data waiting to be sent.
    pub(super) fn waiting(&self) -> usize {
        self.data
    }

    pub(super) fn in_flight(&self) -> bool {
        self.in_flight
    }

    /// Returns true if nothing waits and nothing is being sent.
    pub(super) fn is_empty(&self, tls: Option<&Session>) -> bool {
        let plain = self.building.iovecs.is_empty() && self.sending.is_sent();
        !self.in_flight && plain && tls.is_none_or(Session::is_sent)
    }

    /// Starts a send of everything that waits, unless a send is in flight.
    ///
    /// # Errors
    /// The TLS session failed.
    pub(super) fn start(
        &mut self,
        cx: &mut Cx,
        socket: RawFd,
        token: Token,
        tls: Option<&mut Session>,
        pool: &mut Pool,
    ) -> Result<(), String> {
        if self.in_flight {
            return Ok(());
        }
        let iovecs = match tls {
            None => self.plain(),
            Some(tls) => self.encrypted(tls, pool)?,
        };
        if let Some((first, count)) = iovecs {
            self.message.msg_iov = first;
            self.message.msg_iovlen = count as _;
            let message: *mut msghdr = &mut *self.message;
            let io = SocketIo {
                kind: SocketIoKind::Send,
                socket,
                message,
            };
            // SAFETY: `sending`, `message` and the pages stay until `sent` has been called, since
            // the source is not given back before.
            unsafe { cx.engine.push_socket(io, token) };
            self.in_flight = true;
        }
        Ok(())
    }

    /// Returns the next iovecs to send: their address and number.
    fn plain(&mut self) -> Option<(*mut iovec, usize)> {
        self.next_batch();
        let left = &mut self.sending.iovecs[self.sending.sent..];
        (!left.is_empty()).then(|| (left.as_mut_ptr(), left.len().min(MAX_IOVECS)))
    }

    /// Encrypts the waiting bytes and returns the iovec of the encrypted bytes.
    fn encrypted(
        &mut self,
        tls: &mut Session,
        pool: &mut Pool,
    ) -> Result<Option<(*mut iovec, usize)>, String> {
        while tls.wants_more() {
            self.next_batch();
            let Some(first) = self.sending.iovecs.get(self.sending.sent) else {
                break;
            };
            // SAFETY: iovecs of the outbox are valid until they have been sent.
            let plain = unsafe { std::slice::from_raw_parts(first.iov_base.cast(), first.iov_len) };
            let len = tls.encrypt(plain)?;
            self.advance(len, pool);
        }
        tls.flush()?;
        let left = tls.to_send();
        self.encrypted[0] = iovec {
            iov_base: left.as_ptr().cast_mut().cast(),
            iov_len: left.len(),
        };
        Ok((!left.is_empty()).then_some((self.encrypted.as_mut_ptr(), 1)))
    }

    fn next_batch(&mut self) {
        if self.sending.is_sent() {
            self.sending.clear();
            std::mem::swap(&mut self.building, &mut self.sending);
            self.sending.set_addresses();
        }
    }

    /// Returns a copy of all bytes that are still to be sent. No send may be in flight.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut all = Vec::new();
        for batch in [&self.sending, &self.building] {
            for (index, iov) in batch.iovecs.iter().enumerate().skip(batch.sent) {
                if batch.of_bytes.contains(&(index as u32)) {
                    let at = iov.iov_base as usize;
                    all.extend_from_slice(&batch.bytes[at..at + iov.iov_len]);
                } else {
                    let at = iov.iov_base.cast::<u8>();
                    // SAFETY: the iovec leads into pages of the pool or encrypted bytes, which stay
                    // until they are sent.
                    all.extend(unsafe { std::slice::from_raw_parts(at, iov.iov_len) });
                }
            }
        }
        all
    }

    /// Accounts for a completed send of `bytes` bytes; with TLS, of encrypted bytes.
    pub(super) fn sent(&mut self, bytes: usize, tls: Option<&mut Session>, pool: &mut Pool) {
        self.in_flight = false;
        match tls {
            None => self.advance(bytes, pool),
            Some(tls) => tls.sent(bytes),
        }
    }

    fn advance(&mut self, mut bytes: usize, pool: &mut Pool) {
        while bytes > 0 {
            let at = self.sending.sent;
            let first = &mut self.sending.iovecs[at];
            let part = bytes.min(first.iov_len);
            let whole = part == first.iov_len;
            first.iov_base = first.iov_base.wrapping_byte_add(part);
            first.iov_len -= part;
            bytes -= part;
            let span = self.sending.spans[at];
            self.data -= if span.is_some() { part } else { 0 };
            if whole {
                span.into_iter().for_each(|span| pool.put(span));
                self.sending.sent += 1;
            }
        }
    }

    /// Drops all replies, since the client no longer reads. No send may be in flight.
    pub(super) fn give_up(&mut self, pool: &mut Pool) {
        for batch in [&mut self.sending, &mut self.building] {
            let spans = batch.spans[batch.sent..].iter().flatten();
            spans.for_each(|span| pool.put(*span));
            batch.clear();
        }
        self.data = 0;
    }
}

const NOTHING: iovec = iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

impl Batch {
    #[inline]
    fn push_bytes(&mut self, bytes: &[u8]) {
        let at = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        let last = self.iovecs.len().wrapping_sub(1);
        if self.of_bytes.last() == Some(&(last as u32)) {
            self.iovecs[last].iov_len += bytes.len();
            return;
        }
        self.of_bytes.push(self.iovecs.len() as u32);
        self.iovecs.push(iovec {
            iov_base: std::ptr::without_provenance_mut(at),
            iov_len: bytes.len(),
        });
        self.spans.push(None);
    }

    /// Turns offsets into addresses once `bytes` no longer grows.
    fn set_addresses(&mut self) {
        let base = self.bytes.as_mut_ptr();
        for index in self.of_bytes.drain(..) {
            let iov = &mut self.iovecs[index as usize];
            iov.iov_base = base.wrapping_add(iov.iov_base as usize).cast();
        }
    }

    fn is_sent(&self) -> bool {
        self.sent == self.iovecs.len()
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.iovecs.clear();
        self.spans.clear();
        self.of_bytes.clear();
        self.sent = 0;
    }
}
