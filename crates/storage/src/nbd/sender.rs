//! Commands on their way: all that are waiting go in one system call, their
//! headers from the table and their data from the requests' segments.

use super::segments::gather;
use super::table::{COMMANDS, Table};
use fathom_core::Slab;
use fathom_nbd::protocol::command;
use libc::{iovec, msghdr};
use std::collections::VecDeque;

/// The most iovecs in one call (UIO_MAXIOV).
const MAX_IOVECS: usize = 1024;

/// Bytes of data after which a call takes no more, so that each of them ends
/// in time even on a slow network.
const MAX_DATA: u64 = 4 << 20;

pub(super) struct Sender {
    queue: VecDeque<u16>,
    /// A command whose data did not all fit into the message, and how much of
    /// it did.
    cut: Option<(u16, u64)>,
    iovecs: Vec<iovec>,
    /// Iovecs that have been sent.
    sent: usize,
    /// Commands that have been sent when this message has.
    batch: Vec<u16>,
    /// In a place of its own, since the engine uses it.
    message: Box<msghdr>,
}

impl Sender {
    pub(super) fn new() -> Sender {
        Sender {
            queue: VecDeque::with_capacity(COMMANDS),
            cut: None,
            iovecs: Vec::with_capacity(MAX_IOVECS),
            sent: 0,
            batch: Vec::with_capacity(COMMANDS),
            // SAFETY: all zeroes are a message of nothing.
            message: Box::new(unsafe { std::mem::zeroed() }),
        }
    }

    #[inline]
    pub(super) fn add(&mut self, index: u16) {
        self.queue.push_back(index);
    }

    /// Nothing has been begun that the server waits for the rest of.
    pub(super) fn is_between_commands(&self) -> bool {
        self.iovecs.len() == self.sent && self.cut.is_none()
    }

    /// The message to send next; None: nothing waits.
    pub(super) fn prepare(&mut self, table: &mut Table, slab: &Slab) -> Option<*mut msghdr> {
        if self.sent == self.iovecs.len() {
            self.iovecs.clear();
            self.sent = 0;
            self.fill(table, slab);
        }
        let left = &mut self.iovecs[self.sent..];
        if left.is_empty() {
            return None;
        }
        self.message.msg_iov = left.as_mut_ptr();
        self.message.msg_iovlen = left.len() as _;
        Some(&mut *self.message)
    }

    fn fill(&mut self, table: &mut Table, slab: &Slab) {
        let mut room = MAX_DATA;
        while self.iovecs.len() < MAX_IOVECS && room > 0 {
            let (index, done) = match self.cut.take() {
                Some(cut) => cut,
                None => {
                    let Some(index) = self.queue.pop_front() else {
                        return;
                    };
                    let header = table.header(index);
                    self.iovecs.push(iovec {
                        iov_base: header.as_mut_ptr().cast(),
                        iov_len: header.len(),
                    });
                    (index, 0)
                }
            };
            let ask = table.get(index).ask;
            if ask.command == command::WRITE {
                let (len, start) = (ask.len - done, ask.start + done);
                let segments = &slab[ask.id].segments;
                let part = gather(segments, start, len.min(room), MAX_IOVECS, &mut self.iovecs);
                room -= part;
                if part < len {
                    self.cut = Some((index, done + part));
                    return;
                }
            }
            self.batch.push(index);
        }
    }

    /// So many bytes of the message have been sent. When that is all, the
    /// commands in it are appended to `gone`.
    pub(super) fn sent(&mut self, mut bytes: usize, gone: &mut Vec<u16>) {
        while bytes > 0 {
            let first = &mut self.iovecs[self.sent];
            let part = bytes.min(first.iov_len);
            first.iov_base = first.iov_base.wrapping_byte_add(part);
            first.iov_len -= part;
            bytes -= part;
            if first.iov_len == 0 {
                self.sent += 1;
            }
        }
        if self.sent == self.iovecs.len() {
            gone.append(&mut self.batch);
        }
    }
}
