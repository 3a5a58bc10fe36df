//! Parses the server's replies, without trusting any field.

use crate::host::buffers::Buffers;
use crate::port::{Done, Op};
use fathom_nbd::protocol::{
    ChunkHeader, NotAReply, REPLY_FLAG_DONE, Replies, ReplyHeader, chunk, readable, u16_at, u32_at,
    u64_at,
};

/// Size of the receive buffer in bytes, the maximum that one system call reads. The receive buffer
/// exceeds the buffer of a Unix socket and fits into the CPU's cache.
const RECEIVE: usize = 256 << 10;
/// Maximum payload of an error chunk in bytes, including its text.
const MAX_ERROR: u64 = 8 << 10;
/// Number of bits of a cookie that hold the slot. The other bits hold a counter.
const SLOT_BITS: u32 = 16;

/// Description of a protocol violation. After it, the rest of the stream cannot be parsed.
pub type Broken = String;

/// A request in flight.
#[derive(Clone, Copy, Debug)]
struct Flight {
    busy: bool,
    cookie: u64,
    op: Op,
    offset: u64,
    /// Bytes received for a read, as data or as holes.
    received: u32,
    /// Errno of the first error. 0: no error.
    status: i32,
}

/// All requests in flight, indexed by slot.
#[derive(Debug)]
pub struct Flights {
    slots: Vec<Flight>,
    /// Size of every request in bytes.
    len: u32,
    started: u64,
    in_flight: u32,
}

impl Flights {
    pub fn new(depth: u16, len: u32) -> Flights {
        let idle = Flight {
            busy: false,
            cookie: 0,
            op: Op::Read,
            offset: 0,
            received: 0,
            status: 0,
        };
        Flights {
            slots: vec![idle; usize::from(depth)],
            len,
            started: 0,
            in_flight: 0,
        }
    }

    /// Records a new request, and returns its unique cookie.
    #[inline(always)]
    pub fn start(&mut self, slot: u16, op: Op, offset: u64) -> u64 {
        self.started += 1;
        self.in_flight += 1;
        let cookie = self.started << SLOT_BITS | u64::from(slot);
        self.slots[usize::from(slot)] = Flight {
            busy: true,
            cookie,
            op,
            offset,
            received: 0,
            status: 0,
        };
        cookie
    }

    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    #[inline(always)]
    fn find(&mut self, cookie: u64) -> Result<&mut Flight, Broken> {
        let slot = (cookie & ((1 << SLOT_BITS) - 1)) as usize;
        match self.slots.get_mut(slot) {
            Some(flight) if flight.busy && flight.cookie == cookie => Ok(flight),
            _ => Err(format!(
                "a reply has cookie {cookie:#x}, which no request in flight has"
            )),
        }
    }

    /// Records that the reply to a request is complete.
    #[inline(always)]
    fn end(&mut self, cookie: u64) -> Result<Done, Broken> {
        let len = self.len;
        let flight = self.find(cookie)?;
        if flight.op == Op::Read && flight.status == 0 && flight.received != len {
            return Err(format!(
                "a read's reply has {} bytes of {len}",
                flight.received
            ));
        }
        flight.busy = false;
        let status = flight.status;
        self.in_flight -= 1;
        Ok(Done {
            slot: (cookie & ((1 << SLOT_BITS) - 1)) as u16,
            status,
        })
    }

    /// Records `len` bytes at offset `offset` of the disk that were received for a read. Returns
    /// their offset in the read's buffer.
    #[inline(always)]
    fn fill(&mut self, cookie: u64, offset: u64, len: u64) -> Result<usize, Broken> {
        let whole = u64::from(self.len);
        let flight = self.find(cookie)?;
        let at = offset.wrapping_sub(flight.offset);
        if flight.op != Op::Read || at > whole || len > whole - at {
            return Err(format!(
                "{len} bytes at {offset} are no part of the {} of {whole} bytes at {}",
                flight.op.name(),
                flight.offset
            ));
        }
        if len > whole - u64::from(flight.received) {
            return Err("a read's reply has some bytes twice".into());
        }
        flight.received += len as u32;
        Ok(at as usize)
    }

    /// Records that a read is received as a single piece.
    #[inline(always)]
    fn fill_whole(&mut self, cookie: u64) -> Result<(), Broken> {
        let len = self.len;
        self.find(cookie)?.received = len;
        Ok(())
    }
}

/// The rest of a read's data that is being received.
#[derive(Clone, Copy, Debug)]
struct Payload {
    cookie: u64,
    /// Offset of the next byte in the slot's buffer.
    at: usize,
    left: usize,
    /// Whether the reply ends with this data.
    last: bool,
}

/// Receive buffer, with the data that was not parsed yet.
pub struct Receiver {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
    form: Replies,
    payload: Option<Payload>,
    /// Whether the contents of reads are used. If not, the data is not copied to the slots'
    /// buffers.
    keep: bool,
    /// Text of the last error from the server.
    text: String,
}

impl Receiver {
    pub fn new(form: Replies, keep: bool) -> Receiver {
        Receiver {
            bytes: vec![0; RECEIVE].into_boxed_slice(),
            start: 0,
            end: 0,
            form,
            payload: None,
            keep,
            text: String::new(),
        }
    }

    /// Returns the free part of the buffer, which is never empty. The caller receives into it, and
    /// then calls `received`.
    #[inline(always)]
    pub fn room(&mut self) -> &mut [u8] {
        // The unparsed data is shorter than a header or an error, so moving it is cheap.
        self.bytes.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        &mut self.bytes[self.end..]
    }

    #[inline(always)]
    pub fn received(&mut self, len: usize) {
        self.end += len;
    }

    /// Returns the server's text for the last error, or an empty string.
    pub fn error_text(&self) -> &str {
        &self.text
    }

    /// Parses all complete replies, and the available data of incomplete ones.
    #[inline(always)]
    pub fn take(
        &mut self,
        flights: &mut Flights,
        buffers: &Buffers,
        done: &mut Vec<Done>,
    ) -> Result<(), Broken> {
        while self.start < self.end {
            if let Some(payload) = self.payload {
                self.take_payload(payload, flights, buffers, done)?;
            } else if !self.take_header(flights, buffers, done)? {
                break;
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn take_payload(
        &mut self,
        mut payload: Payload,
        flights: &mut Flights,
        buffers: &Buffers,
        done: &mut Vec<Done>,
    ) -> Result<(), Broken> {
        let len = payload.left.min(self.end - self.start);
        if self.keep {
            let slot = payload.cookie as u16;
            buffers.copy_in(slot, payload.at, &self.bytes[self.start..self.start + len]);
        }
        self.start += len;
        payload.at += len;
        payload.left -= len;
        self.payload = (payload.left > 0).then_some(payload);
        if payload.left == 0 && payload.last {
            done.push(flights.end(payload.cookie)?);
        }
        Ok(())
    }

    /// Parses the next header. Returns `false` if it is not complete yet.
    #[inline(always)]
    fn take_header(
        &mut self,
        flights: &mut Flights,
        buffers: &Buffers,
        done: &mut Vec<Done>,
    ) -> Result<bool, Broken> {
        let bytes = &self.bytes[self.start..self.end];
        let header = ReplyHeader::parse(self.form, bytes)
            .map_err(|NotAReply(magic)| format!("{magic:#010x} is no magic number of a reply"))?;
        let Some((header, size)) = header else {
            return Ok(false);
        };
        match header {
            ReplyHeader::Simple { error, cookie } => {
                self.start += size;
                self.take_simple(error, cookie, flights, done)?;
                Ok(true)
            }
            ReplyHeader::Chunk(header) => {
                let flight = flights.find(header.cookie)?;
                if self.form == Replies::Extended && header.offset != flight.offset {
                    return Err("a reply has another offset than its request".into());
                }
                self.take_chunk(header, size, flights, buffers, done)
            }
        }
    }

    #[inline(always)]
    fn take_simple(
        &mut self,
        error: u32,
        cookie: u64,
        flights: &mut Flights,
        done: &mut Vec<Done>,
    ) -> Result<(), Broken> {
        let whole = flights.len as usize;
        let flight = flights.find(cookie)?;
        if error != 0 {
            flight.status = errno(error);
            self.text.clear();
        }
        if flight.op != Op::Read {
            done.push(flights.end(cookie)?);
            return Ok(());
        }
        if self.form != Replies::Simple {
            return Err("a read was answered by a simple reply".into());
        }
        if error != 0 {
            done.push(flights.end(cookie)?);
            return Ok(());
        }
        flights.fill_whole(cookie)?;
        self.payload = Some(Payload {
            cookie,
            at: 0,
            left: whole,
            last: true,
        });
        Ok(())
    }

    #[inline(always)]
    fn take_chunk(
        &mut self,
        header: ChunkHeader,
        header_len: usize,
        flights: &mut Flights,
        buffers: &Buffers,
        done: &mut Vec<Done>,
    ) -> Result<bool, Broken> {
        let ChunkHeader { cookie, len, .. } = header;
        let last = header.flags & REPLY_FLAG_DONE != 0;
        let body = &self.bytes[self.start + header_len..self.end];
        let taken = match header.kind {
            chunk::NONE if len == 0 && last => 0,
            chunk::OFFSET_DATA if len > 8 => {
                if body.len() < 8 {
                    return Ok(false);
                }
                let at = flights.fill(cookie, u64_at(body, 0), len - 8)?;
                self.start += header_len + 8;
                self.payload = Some(Payload {
                    cookie,
                    at,
                    left: (len - 8) as usize,
                    last,
                });
                return Ok(true);
            }
            chunk::OFFSET_HOLE if len == 12 => {
                if body.len() < 12 {
                    return Ok(false);
                }
                let (offset, len) = (u64_at(body, 0), u32_at(body, 8));
                let at = flights.fill(cookie, offset, u64::from(len))?;
                if self.keep {
                    buffers.zero(cookie as u16, at, len as usize);
                }
                12
            }
            kind if kind & chunk::ERROR_BIT != 0 && (4..=MAX_ERROR).contains(&len) => {
                let Some(body) = body.get(..len as usize) else {
                    return Ok(false);
                };
                let (status, text) = error(body)?;
                let flight = flights.find(cookie)?;
                if flight.status == 0 {
                    flight.status = status;
                }
                self.text = text;
                len as usize
            }
            _ => return Err(unexpected(header, last)),
        };
        self.start += header_len + taken;
        if last {
            done.push(flights.end(cookie)?);
        }
        Ok(true)
    }
}

#[cold]
fn unexpected(chunk: ChunkHeader, last: bool) -> Broken {
    let end = if last { " at the end" } else { "" };
    format!(
        "a chunk of type {:#x} has a payload of {} bytes{end}",
        chunk.kind, chunk.len
    )
}

/// Returns the errno and the text of an error chunk, which must have at least four bytes.
#[cold]
fn error(body: &[u8]) -> Result<(i32, String), Broken> {
    let number = u32_at(body, 0);
    if number == 0 {
        return Err("an error chunk has no error".into());
    }
    let text = match body.len() {
        ..6 => &[],
        _ => body[6..]
            .get(..usize::from(u16_at(body, 4)))
            .ok_or("an error's text is longer than its chunk")?,
    };
    Ok((errno(number), readable(text)))
}

/// Converts an NBD error number to an errno. The protocol uses Linux's numbers.
fn errno(error: u32) -> i32 {
    i32::try_from(error).unwrap_or(libc::EIO)
}
