//! Sends commands: all that wait go in one system call, with their headers from the table and their
//! data from the requests' segments.

use super::segments::gather;
use super::table::{COMMANDS, Table};
use fathom_core::Slab;
use fathom_nbd::protocol::command;
use libc::{iovec, msghdr};
use std::collections::VecDeque;

/// Maximum number of iovecs in one call (UIO_MAXIOV).
const MAX_IOVECS: usize = 1024;

/// Number of data bytes after which a message takes no further commands, so that each send ends in
/// time even on a slow network.
const MAX_DATA: u64 = 4 << 20;

pub(super) struct Sender {
    queue: VecDeque<u16>,
    /// A command whose data did not all fit into the message, and the number of its bytes that did.
    cut: Option<(u16, u64)>,
    iovecs: Vec<iovec>,
    /// Number of iovecs that have been sent.
    sent: usize,
    /// Commands that are sent completely when this message is.
    batch: Vec<u16>,
    /// Boxed, because the engine uses its address.
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
            // SAFETY: an all-zero header is a message without data.
            message: Box::new(unsafe { std::mem::zeroed() }),
        }
    }

    #[inline]
    pub(super) fn add(&mut self, index: u16) {
        self.queue.push_back(index);
    }

    /// Returns whether no command has been sent partly.
    pub(super) fn is_between_commands(&self) -> bool {
        self.iovecs.len() == self.sent && self.cut.is_none()
    }

    /// Returns the message to send next, or None if nothing waits.
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

    /// Records that `bytes` of the message have been sent. Once the whole message is sent, its
    /// commands are appended to `gone`.
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
