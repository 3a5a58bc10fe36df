//! Buffer of received bytes that are not parsed yet.

use super::pool::{BLOCK, Pool, Span};
use std::io;

/// Longest payload in bytes that is used where it was received; larger payloads are received into
/// pages of their own.
pub(super) const IN_PLACE: usize = 16 << 10;

/// Least free bytes in the block. A block with less room that cannot be emptied is replaced, so
/// that a header with a payload of [`IN_PLACE`] bytes always fits.
const MIN_ROOM: usize = IN_PLACE + 64;

/// Smallest size of a receive in bytes.
const MIN_WINDOW: usize = 4096;

/// A block of the pool that receives bytes. While requests use data in the block, it is not reused.
pub(super) struct Inbox {
    span: Span,
    base: *mut u8,
    start: usize,
    end: usize,
    /// Maximum size of the next receive in bytes. A large window needs fewer system calls; a small
    /// one leaves less of a large payload here, from where it must be copied.
    window: usize,
    /// Number of requests whose data lies in each block of the pool.
    users: Vec<u16>,
}

// SAFETY: `base` points into the pool, which moves together with this value.
unsafe impl Send for Inbox {}

impl Inbox {
    /// Creates an inbox that begins with bytes received earlier.
    ///
    /// # Errors
    /// EMSGSIZE if the pool has no free block or `read_ahead` is longer than a block.
    pub(super) fn new(pool: &mut Pool, read_ahead: &[u8]) -> io::Result<Inbox> {
        let span = pool.take(BLOCK).filter(|_| read_ahead.len() <= BLOCK);
        let span = span.ok_or_else(|| io::Error::from_raw_os_error(libc::EMSGSIZE))?;
        let inbox = Inbox {
            span,
            base: pool.at(span),
            start: 0,
            end: read_ahead.len(),
            window: MIN_WINDOW,
            users: vec![0; pool.blocks()],
        };
        // SAFETY: the bytes fit into the block, which the pool has given to this inbox alone.
        unsafe {
            inbox
                .base
                .copy_from_nonoverlapping(read_ahead.as_ptr(), read_ahead.len())
        };
        Ok(inbox)
    }

    pub(super) fn len(&self) -> usize {
        self.end - self.start
    }

    /// Returns the next `len` bytes without consuming them, if they have been received.
    #[inline]
    pub(super) fn peek(&self, len: usize) -> Option<&[u8]> {
        // SAFETY: these are received bytes of our block, which `users` keeps from being reused.
        (len <= self.len())
            .then(|| unsafe { std::slice::from_raw_parts(self.base.add(self.start), len) })
    }

    #[inline]
    pub(super) fn consume(&mut self, len: usize) {
        debug_assert!(len <= self.len());
        self.start += len;
    }

    /// Lends the next `len` bytes to a request, in place, until [`Inbox::release`]. The bytes must
    /// have been received. Returns their address and block.
    #[inline]
    pub(super) fn lend(&mut self, len: usize) -> (*mut u8, usize) {
        let block = self.span.block();
        self.users[block] += 1;
        // SAFETY: `start` lies within the block.
        let at = unsafe { self.base.add(self.start) };
        self.consume(len);
        (at, block)
    }

    #[inline]
    pub(super) fn release(&mut self, block: usize, pool: &mut Pool) {
        self.users[block] -= 1;
        if self.users[block] == 0 && block != self.span.block() {
            pool.put(Span::whole(block));
        }
    }

    /// Moves up to `len` of the next bytes to `to`. Returns the number of bytes moved.
    ///
    /// # Safety
    /// `to` has room for `len` bytes.
    pub(super) unsafe fn copy_out(&mut self, to: *mut u8, len: usize) -> usize {
        let len = len.min(self.len());
        // SAFETY: these are received bytes; the caller guarantees that `to` has room and lies
        // elsewhere.
        unsafe { to.copy_from_nonoverlapping(self.base.add(self.start), len) };
        self.consume(len);
        len
    }

    /// Returns where to receive and at most how many bytes; None if the pool has no free block.
    pub(super) fn room(&mut self, pool: &mut Pool) -> Option<(*mut u8, usize)> {
        if self.users[self.span.block()] == 0 {
            if self.start == self.end {
                (self.start, self.end) = (0, 0);
            } else if BLOCK - self.end < self.window.max(MIN_ROOM) {
                self.move_to(self.span, self.base);
            }
        } else if BLOCK - self.end < MIN_ROOM {
            let span = pool.take(BLOCK)?;
            self.move_to(span, pool.at(span));
        }
        // SAFETY: `end` lies within the block.
        let at = unsafe { self.base.add(self.end) };
        Some((at, self.window.min(BLOCK - self.end)))
    }

    /// Moves the unparsed bytes to the start of a block and continues there.
    fn move_to(&mut self, span: Span, base: *mut u8) {
        // SAFETY: both are whole blocks, and the overwritten bytes have been consumed.
        unsafe { base.copy_from(self.base.add(self.start), self.len()) };
        (self.start, self.end) = (0, self.len());
        (self.span, self.base) = (span, base);
    }

    /// Accounts for `len` received bytes. If they filled `room`, the next receive is larger.
    pub(super) fn received(&mut self, len: usize, room: usize) {
        self.end += len;
        if len == room {
            self.window = (self.window * 4).min(BLOCK);
        }
    }

    /// Shrinks the window when a large payload begins, since more large payloads may follow.
    pub(super) fn narrow(&mut self) {
        self.window = MIN_WINDOW;
    }

    /// Drops all unparsed bytes.
    pub(super) fn clear(&mut self) {
        self.start = self.end;
    }
}
