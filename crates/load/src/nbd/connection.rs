//! An NBD connection as a [`Port`]. A batch of requests needs one system call, and so does a batch
//! of replies.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

use crate::error::{Error, Result};
use crate::host::buffers::Buffers;
use crate::host::status::describe_status;
use crate::memory::Buffer;
use crate::nbd::replies::{Broken, Flights, Receiver};
use crate::options::{Load, Wait};
use crate::port::{Counters, Done, Op, Port};
use fathom_nbd::protocol::{Replies, RequestHeader, command, command_flag};

/// Maximum sleep of a worker, after which it checks whether the phase has changed.
pub const TICK: Duration = Duration::from_millis(100);
/// Maximum number of pieces of memory sent by one system call.
const PIECES: usize = 128;

/// A piece of the data to send.
#[derive(Clone, Copy, Debug)]
enum Piece {
    /// Request headers of this many bytes.
    Headers(usize),
    /// Data of this slot, from this byte on.
    Data(u16, usize),
}

/// Queued data that the kernel has not accepted yet.
#[derive(Debug, Default)]
struct Outbox {
    headers: Vec<u8>,
    /// Number of bytes of `headers` that were sent.
    sent: usize,
    pieces: Vec<Piece>,
    /// Number of pieces that were sent.
    first: usize,
}

impl Outbox {
    #[inline(always)]
    fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Records a header of `len` bytes that was appended to `headers`.
    #[inline(always)]
    fn push_header(&mut self, len: usize) {
        match self.pieces.last_mut() {
            Some(Piece::Headers(n)) => *n += len,
            _ => self.pieces.push(Piece::Headers(len)),
        }
    }

    /// Fills `out` with the next data to send, and returns the number of slices.
    #[inline(always)]
    fn slices<'a>(&'a self, buffers: &'a Buffers, out: &mut [IoSlice<'a>; PIECES]) -> usize {
        let mut at = self.sent;
        let waiting = &self.pieces[self.first..];
        for (piece, out) in waiting.iter().zip(out.iter_mut()) {
            *out = IoSlice::new(match *piece {
                Piece::Headers(len) => {
                    at += len;
                    &self.headers[at - len..at]
                }
                Piece::Data(slot, from) => &buffers.bytes(slot)[from..],
            });
        }
        waiting.len().min(PIECES)
    }

    /// Records that the kernel has accepted the next `len` bytes. `bs` is the data length of a
    /// request.
    #[inline(always)]
    fn advance(&mut self, mut len: usize, bs: usize) {
        while len > 0 {
            let piece = &mut self.pieces[self.first];
            let left = match piece {
                Piece::Headers(n) => *n,
                Piece::Data(_, from) => bs - *from,
            };
            let taken = left.min(len);
            len -= taken;
            match piece {
                Piece::Headers(n) => {
                    *n -= taken;
                    self.sent += taken;
                }
                Piece::Data(_, from) => *from += taken,
            }
            self.first += usize::from(taken == left);
        }
        if self.first == self.pieces.len() {
            self.pieces.clear();
            self.headers.clear();
            (self.first, self.sent) = (0, 0);
        }
    }

    /// Removes the sent data when some data remains unsent, which is rare.
    fn compact(&mut self) {
        self.pieces.drain(..self.first);
        self.headers.drain(..self.sent);
        (self.first, self.sent) = (0, 0);
    }
}

#[inline(always)]
fn request(form: Replies, op: Op, cookie: u64, offset: u64, len: u32) -> RequestHeader {
    let command = match op {
        Op::Read => command::READ,
        Op::Write => command::WRITE,
        Op::Flush => command::FLUSH,
        Op::Discard => command::TRIM,
        Op::WriteZeroes => command::WRITE_ZEROES,
    };
    let says_so = form == Replies::Extended && op == Op::Write;
    RequestHeader {
        flags: if says_so {
            command_flag::PAYLOAD_LEN
        } else {
            0
        },
        command,
        cookie,
        offset,
        len: len.into(),
    }
}

/// A connection in the transmission phase, used by one worker.
pub struct Connection {
    socket: OwnedFd,
    index: usize,
    form: Replies,
    len: u32,
    wait: Wait,
    buffers: Buffers,
    flights: Flights,
    outbox: Outbox,
    receiver: Receiver,
    counters: Counters,
}

impl Connection {
    /// Creates a port on `socket`, which has completed the handshake. Reads from the socket must
    /// time out after [`TICK`].
    pub fn new(
        socket: OwnedFd,
        index: usize,
        form: Replies,
        wait: Wait,
        load: &Load,
    ) -> Result<Connection> {
        Ok(Connection {
            socket,
            index,
            form,
            len: load.bs,
            wait,
            buffers: Buffers::new(load)?,
            flights: Flights::new(load.iodepth, load.bs),
            outbox: Outbox::default(),
            receiver: Receiver::new(form, load.verify),
            counters: Counters::default(),
        })
    }

    /// Sends queued data, as much as the socket accepts.
    #[inline(always)]
    fn send(&mut self) -> Result<()> {
        while !self.outbox.is_empty() {
            let mut slices = [IoSlice::new(&[]); PIECES];
            let count = self.outbox.slices(&self.buffers, &mut slices);
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let mut none = SendAncillaryBuffer::default();
            self.counters.kicks += 1;
            match sendmsg(&self.socket, &slices[..count], &mut none, flags) {
                Ok(len) => self.outbox.advance(len, self.len as usize),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.outbox.compact();
                    break;
                }
                Err(e) => return Err(self.lost(e)),
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn receive(&mut self, flags: RecvFlags) -> Result<()> {
        self.counters.calls += 1;
        match recv(&self.socket, self.receiver.room(), flags) {
            Ok((_, 0)) => Err(self.lost(Errno::CONNRESET)),
            Ok((_, len)) => {
                self.receiver.received(len);
                Ok(())
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(e) => Err(self.lost(e)),
        }
    }

    /// Sleeps until the socket is readable or writable, for at most [`TICK`].
    fn sleep_both(&mut self) -> Result<()> {
        let events = PollFlags::IN | PollFlags::OUT;
        let mut fds = [PollFd::new(&self.socket, events)];
        let tick = Timespec::try_from(TICK).expect("a short time");
        match poll(&mut fds, Some(&tick)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(Error::os("polling the socket", e)),
        }
    }

    #[cold]
    fn lost(&self, e: Errno) -> Error {
        let in_flight = self.flights.in_flight();
        Error::Gone(match e {
            Errno::CONNRESET | Errno::PIPE => format!(
                "connection {}: the server closed it with {in_flight} requests in flight",
                self.index
            ),
            e => format!("connection {}: {e}", self.index),
        })
    }

    #[cold]
    fn broken(&self, what: Broken) -> Error {
        Error::Connection {
            connection: self.index,
            what,
        }
    }
}

impl Port for Connection {
    fn buffer(&self, slot: u16) -> Buffer {
        self.buffers.get(slot)
    }

    #[inline(always)]
    fn queue(&mut self, slot: u16, op: Op, offset: u64) {
        let (offset, len) = match op {
            Op::Flush => (0, 0),
            _ => (offset, self.len),
        };
        let cookie = self.flights.start(slot, op, offset);
        let headers = &mut self.outbox.headers;
        let before = headers.len();
        request(self.form, op, cookie, offset, len).put(self.form, headers);
        let len = headers.len() - before;
        self.outbox.push_header(len);
        if op == Op::Write {
            self.outbox.pieces.push(Piece::Data(slot, 0));
        }
    }

    #[inline(always)]
    fn submit(&mut self) -> Result<()> {
        self.send()
    }

    #[inline(always)]
    fn reap(&mut self, done: &mut Vec<Done>) -> Result<()> {
        let taken = self.receiver.take(&mut self.flights, &self.buffers, done);
        taken.map_err(|what| self.broken(what))
    }

    fn wait(&mut self) -> Result<()> {
        if self.wait == Wait::Poll {
            self.send()?;
            return self.receive(RecvFlags::DONTWAIT);
        }
        if self.outbox.is_empty() {
            return self.receive(RecvFlags::empty());
        }
        self.sleep_both()?;
        self.send()?;
        self.receive(RecvFlags::DONTWAIT)
    }

    fn counters(&mut self) -> Counters {
        self.counters
    }

    fn describe_status(&self, status: i32) -> String {
        let errno = describe_status(status);
        match self.receiver.error_text() {
            "" => errno,
            text => format!("{errno}: {text}"),
        }
    }
}

impl Drop for Connection {
    /// Sends a disconnect request if no request is in flight, because a server may log clients that
    /// send none.
    fn drop(&mut self) {
        if !self.outbox.is_empty() || self.flights.in_flight() > 0 {
            return;
        }
        let mut goodbye = Vec::with_capacity(self.form.request_len());
        RequestHeader {
            flags: 0,
            command: command::DISC,
            cookie: 0,
            offset: 0,
            len: 0,
        }
        .put(self.form, &mut goodbye);
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let _ = rustix::net::send(&self.socket, &goodbye, flags);
    }
}
