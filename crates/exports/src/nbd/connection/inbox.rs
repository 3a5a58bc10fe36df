//! What has been received and not yet been understood.

use super::pool::{BLOCK, Pool, Span};
use std::io;

/// A payload up to this length is used where it was received; a larger one is
/// received into pages of its own.
pub(super) const IN_PLACE: usize = 16 << 10;

/// When a block has less room than this, and cannot be emptied, another one
/// takes its place: there is always room for a header with such a payload.
const MIN_ROOM: usize = IN_PLACE + 64;

/// The least that is received at once.
const MIN_WINDOW: usize = 4096;

/// A block of the pool that bytes are received into. Requests whose data is
/// in it keep it from being used again until they are done.
pub(super) struct Inbox {
    span: Span,
    base: *mut u8,
    start: usize,
    end: usize,
    /// How much to receive at once at most: the more, the fewer calls; the
    /// less, the less of a large payload ends up here and must be copied.
    window: usize,
    /// Requests with data in each block of the pool.
    users: Vec<u16>,
}

// SAFETY: `base` points into the pool that goes wherever this goes.
unsafe impl Send for Inbox {}

impl Inbox {
    /// With something that has been received already.
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
        // SAFETY: it fits into the block, which nobody else uses.
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

    /// The next `len` bytes, if they are here.
    #[inline]
    pub(super) fn peek(&self, len: usize) -> Option<&[u8]> {
        // SAFETY: received bytes of our block; `users` keeps others' hands off.
        (len <= self.len())
            .then(|| unsafe { std::slice::from_raw_parts(self.base.add(self.start), len) })
    }

    #[inline]
    pub(super) fn consume(&mut self, len: usize) {
        debug_assert!(len <= self.len());
        self.start += len;
    }

    /// Use the next `len` bytes, which are here, in place until
    /// [`Inbox::release`].
    #[inline]
    pub(super) fn lend(&mut self, len: usize) -> (*mut u8, usize) {
        let block = self.span.block();
        self.users[block] += 1;
        // SAFETY: within the block.
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

    /// Move up to `len` of the next bytes to `to`. Returns how many.
    ///
    /// # Safety
    /// There is room for `len` bytes.
    pub(super) unsafe fn copy_out(&mut self, to: *mut u8, len: usize) -> usize {
        let len = len.min(self.len());
        // SAFETY: received bytes; `to` is somewhere else, says the caller.
        unsafe { to.copy_from_nonoverlapping(self.base.add(self.start), len) };
        self.consume(len);
        len
    }

    /// Where to receive, and how much at most; None: there is no memory now.
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
        // SAFETY: within the block.
        let at = unsafe { self.base.add(self.end) };
        Some((at, self.window.min(BLOCK - self.end)))
    }

    /// Move what is here to the start of a block.
    fn move_to(&mut self, span: Span, base: *mut u8) {
        // SAFETY: both are whole blocks; what is overwritten was consumed.
        unsafe { base.copy_from(self.base.add(self.start), self.len()) };
        (self.start, self.end) = (0, self.len());
        (self.span, self.base) = (span, base);
    }

    /// So many bytes have been received where there was room for `room`.
    pub(super) fn received(&mut self, len: usize, room: usize) {
        self.end += len;
        if len == room {
            self.window = (self.window * 4).min(BLOCK);
        }
    }

    /// A large payload begins: more of them may follow.
    pub(super) fn narrow(&mut self) {
        self.window = MIN_WINDOW;
    }

    /// Give back everything but what requests use.
    pub(super) fn clear(&mut self) {
        self.start = self.end;
    }
}
