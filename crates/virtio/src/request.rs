//! Parses a descriptor chain into a request (5.2.6), or into an immediate reply. Only reads guest
//! memory.

use crate::chain::{Chain, ChainContext, Unusable};
use crate::descriptor::Descriptor;
use crate::memory::{pair_of, segment};
use crate::ring::Ring;
use fathom_core::{Op, RangeLimits, Request, Segments};
use libc::iovec;
use std::ptr::NonNull;

pub const T_IN: u32 = 0;
pub const T_OUT: u32 = 1;
pub const T_FLUSH: u32 = 4;
pub const T_GET_ID: u32 = 8;
pub const T_DISCARD: u32 = 11;
pub const T_WRITE_ZEROES: u32 = 13;

/// Values of the status byte (5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    Ok = 0,
    IoErr = 1,
    Unsupported = 2,
}

impl Status {
    /// Returns the status of a request that ended with `errno`, which is 0 or positive.
    #[inline]
    pub fn from_errno(errno: i32) -> Status {
        match errno {
            0 => Status::Ok,
            libc::EOPNOTSUPP => Status::Unsupported,
            _ => Status::IoErr,
        }
    }
}

/// Maximum number of data segments of a request (`seg_max`).
pub const SEG_MAX: usize = 126;
/// Maximum number of bytes of a segment (`size_max`). Some firmware ignores the limit, so it is
/// announced but not enforced.
pub const SIZE_MAX: u32 = 4 << 20;
/// Maximum number of ranges in a discard or write-zeroes request (`max_discard_seg`,
/// `max_write_zeroes_seg`).
pub const MAX_RANGES: usize = 1;
/// Maximum number of bytes of a read or a write: more than any driver requests, and less than one
/// system call moves.
pub const MAX_LEN: u64 = 1 << 30;
/// Maximum number of memory pieces of a request. Segments may be split at the boundaries of guest
/// memory regions, and this many pieces still fit into one system call (IOV_MAX).
const MAX_PIECES: usize = 1024;

const SECTOR_SHIFT: u32 = 9;
const SECTOR_MASK: u64 = 511;
const HEADER_LEN: usize = 16;
const RANGE_LEN: usize = 16;
const RANGE_F_UNMAP: u32 = 1;

/// Limits against which requests are checked; computed once per batch.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Size of the disk, in bytes.
    pub size: u64,
    pub read_only: bool,
    /// Writes must be durable when they complete.
    pub write_through: bool,
    pub discard: Option<RangeLimits>,
    pub write_zeroes: Option<RangeLimits>,
}

/// The result of parsing a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The request is complete and goes to the disk; its status byte goes to this address.
    Submit(NonNull<u8>),
    /// The driver requests the serial number, to be written to the request's segments.
    Identify(NonNull<u8>),
    /// The request is answered with this status at once.
    Refuse(NonNull<u8>, Status),
}

/// Parses the chains of a queue.
pub(crate) struct Parser<'a, R> {
    pub chains: ChainContext<'a, R>,
    pub limits: &'a Limits,
}

/// A chain whose header has been read.
struct Headed {
    kind: u32,
    sector: u64,
    /// The first descriptor after the header.
    next: Option<Descriptor>,
    /// Number of data bytes that shared a descriptor with the header.
    data: u64,
    ok: bool,
}

impl<R: Ring> Parser<'_, R> {
    /// Parses the chain that begins with `first`, and fills in the fields of `request` that it
    /// determines. All data is added to the request's segments, since a well-formed request has
    /// data in one direction only.
    ///
    /// A malformed chain (not `ok`) is still followed to its end to find its status byte. A chain
    /// without a status byte is Unusable.
    pub fn parse(&mut self, first: Descriptor, request: &mut Request) -> Result<Verdict, Unusable> {
        let segments = &mut request.segments;
        segments.clear();
        let (mut chain, headed) = self.header(first, segments)?;
        let (mut ok, mut current) = (headed.ok, headed.next);
        let (mut readable, mut writable) = (headed.data, 0);
        let mut count = 0;
        // Device-readable data comes first, then device-writable data (2.7.4.2).
        while let Some(data) = current
            && !data.is_writable()
        {
            readable += u64::from(data.len());
            count += 1;
            ok = ok && count <= SEG_MAX && self.push(segments, data.addr(), data.len());
            current = chain.after(&mut self.chains, data)?;
        }
        // The last writable byte is the status. The descriptor of that byte is known only at the
        // end of the chain.
        let mut last = current.ok_or(Unusable)?;
        while let Some(next) = chain.after(&mut self.chains, last)? {
            writable += u64::from(last.len());
            count += 1;
            ok = ok && count <= SEG_MAX && self.push(segments, last.addr(), last.len());
            ok = ok && next.is_writable();
            last = next;
        }
        let data = last.len().checked_sub(1).ok_or(Unusable)?;
        if data > 0 {
            writable += u64::from(data);
            ok = ok && count < SEG_MAX && self.push(segments, last.addr(), data);
        }
        let status = self.status(last, data).ok_or(Unusable)?;
        if !ok {
            return Ok(Verdict::Refuse(status, Status::IoErr));
        }
        let Headed { kind, sector, .. } = headed;
        match self.decode(request, kind, sector, readable, writable) {
            Ok(T_GET_ID) => Ok(Verdict::Identify(status)),
            Ok(_) => Ok(Verdict::Submit(status)),
            Err(refusal) => Ok(Verdict::Refuse(status, refusal)),
        }
    }

    /// Returns the address of the status byte, which is `data` bytes into the last descriptor.
    #[inline(always)]
    fn status(&mut self, last: Descriptor, data: u32) -> Option<NonNull<u8>> {
        if !last.is_writable() {
            return None;
        }
        let at = last.addr().checked_add(u64::from(data))?;
        self.chains.translate(at, 1)
    }

    /// Reads the header. Drivers give it a descriptor of its own.
    #[inline(always)]
    fn header(
        &mut self,
        first: Descriptor,
        segments: &mut Segments,
    ) -> Result<(Chain, Headed), Unusable> {
        let (mut chain, first) = Chain::begin(&mut self.chains, first)?;
        if first.is_writable() || first.len() as usize != HEADER_LEN {
            return self.split_header(chain, first, segments);
        }
        let (ok, kind, sector) = match self.chains.read_pair(first.addr()) {
            Some([kind, sector]) => (true, kind as u32, sector),
            None => (false, 0, 0),
        };
        let next = chain.after(&mut self.chains, first)?;
        let headed = Headed {
            kind,
            sector,
            next,
            data: 0,
            ok,
        };
        Ok((chain, headed))
    }

    /// Reads a header that is split over descriptors or shares one with data (2.7.4: framing is up
    /// to the driver).
    #[cold]
    #[inline(never)]
    fn split_header(
        &mut self,
        mut chain: Chain,
        first: Descriptor,
        segments: &mut Segments,
    ) -> Result<(Chain, Headed), Unusable> {
        let mut bytes = [0; HEADER_LEN];
        let mut have = 0;
        let mut headed = Headed {
            kind: 0,
            sector: 0,
            next: Some(first),
            data: 0,
            ok: true,
        };
        while have < HEADER_LEN
            && let Some(part) = headed.next
            && !part.is_writable()
        {
            let len = (HEADER_LEN - have).min(part.len() as usize);
            let into = &mut bytes[have..have + len];
            let chains = &mut self.chains;
            let mapped = chains.cache.read(chains.memory, part.addr(), into);
            headed.ok &= len > 0 && mapped.is_some();
            have += len;
            let rest = part.len() - len as u32;
            if rest > 0 {
                headed.data = u64::from(rest);
                let at = part.addr().wrapping_add(len as u64);
                headed.ok = headed.ok && self.push(segments, at, rest);
            }
            headed.next = chain.after(&mut self.chains, part)?;
        }
        headed.ok &= have == HEADER_LEN;
        let [kind, sector] = pair_of(bytes);
        (headed.kind, headed.sector) = (kind as u32, sector);
        Ok((chain, headed))
    }

    /// Adds data. Returns false if the data is empty or not entirely in memory.
    #[inline(always)]
    fn push(&mut self, segments: &mut Segments, addr: u64, len: u32) -> bool {
        let len = u64::from(len);
        match self.chains.translate(addr, len) {
            _ if len == 0 => false,
            Some(host) => {
                segments.push(segment(host, len));
                true
            }
            None => self.push_pieces(segments, addr, len),
        }
    }

    /// Adds data that spans regions.
    #[cold]
    #[inline(never)]
    fn push_pieces(&mut self, segments: &mut Segments, addr: u64, len: u64) -> bool {
        let mut room = MAX_PIECES.saturating_sub(segments.len());
        let chains = &mut self.chains;
        let mapped = chains.cache.pieces(chains.memory, addr, len, |piece| {
            if room > 0 {
                room -= 1;
                segments.push(piece);
            }
        });
        mapped.is_some() && room > 0
    }

    /// Checks the operation in the header against the buffers of the request. Returns the type.
    #[inline(always)]
    fn decode(
        &mut self,
        request: &mut Request,
        kind: u32,
        sector: u64,
        readable: u64,
        written: u64,
    ) -> Result<u32, Status> {
        let limits = self.limits;
        let (op, len) = match kind {
            T_IN if readable == 0 => (Op::Read, written),
            T_OUT if limits.read_only => return Err(Status::IoErr),
            T_OUT if written == 0 => (Op::Write, readable),
            T_FLUSH if readable == 0 && written == 0 => {
                fill(request, Op::Flush, 0, 0);
                return Ok(kind);
            }
            T_GET_ID if readable == 0 && written > 0 => return Ok(kind),
            T_DISCARD | T_WRITE_ZEROES if written == 0 => {
                return self.decode_range(request, kind, readable);
            }
            T_IN | T_OUT | T_FLUSH | T_GET_ID | T_DISCARD | T_WRITE_ZEROES => {
                return Err(Status::IoErr);
            }
            _ => return Err(Status::Unsupported),
        };
        if len > MAX_LEN {
            return Err(Status::IoErr);
        }
        let offset = check_range(sector, len, limits.size)?;
        fill(request, op, offset, len);
        request.fua = op == Op::Write && limits.write_through;
        Ok(kind)
    }

    /// Decodes a discard or write-zeroes request, whose payload is a list of ranges.
    #[cold]
    #[inline(never)]
    fn decode_range(
        &mut self,
        request: &mut Request,
        kind: u32,
        payload: u64,
    ) -> Result<u32, Status> {
        let limits = self.limits;
        let (op, range_limits) = match kind {
            T_DISCARD => (Op::Discard, limits.discard),
            _ => (Op::WriteZeroes, limits.write_zeroes),
        };
        if limits.read_only || payload == 0 || !payload.is_multiple_of(RANGE_LEN as u64) {
            return Err(Status::IoErr);
        }
        let range_limits = range_limits.ok_or(Status::Unsupported)?;
        if payload > (RANGE_LEN * MAX_RANGES) as u64 {
            return Err(Status::Unsupported);
        }
        let [sector, rest] = pair_of(copy_payload(&request.segments));
        request.segments.clear();
        let (sectors, flags) = (rest as u32, (rest >> 32) as u32);
        // Unknown flags, and unmap on discard, are not supported (5.2.6.2).
        let known = if op == Op::WriteZeroes {
            RANGE_F_UNMAP
        } else {
            0
        };
        if flags & !known != 0 {
            return Err(Status::Unsupported);
        }
        if sectors > crate::config::max_sectors(range_limits) {
            return Err(Status::IoErr);
        }
        let len = u64::from(sectors) << SECTOR_SHIFT;
        let offset = check_range(sector, len, limits.size)?;
        fill(request, op, offset, len);
        request.unmap = flags & RANGE_F_UNMAP != 0;
        request.fua = limits.write_through;
        Ok(kind)
    }
}

#[inline(always)]
fn fill(request: &mut Request, op: Op, offset: u64, len: u64) {
    request.op = op;
    request.offset = offset;
    request.len = len;
    request.fua = false;
    request.unmap = false;
}

/// Returns the byte offset of a range. The range must consist of whole sectors, must not be empty,
/// and must lie within the disk.
#[inline(always)]
fn check_range(sector: u64, len: u64, size: u64) -> Result<u64, Status> {
    let fits = len <= size && sector <= (size - len) >> SECTOR_SHIFT;
    if len == 0 || len & SECTOR_MASK != 0 || !fits {
        return Err(Status::IoErr);
    }
    Ok(sector << SECTOR_SHIFT)
}

/// Reads the only range of a payload whose length is RANGE_LEN.
fn copy_payload(segments: &[iovec]) -> [u8; RANGE_LEN] {
    let mut bytes = [0; RANGE_LEN];
    let mut done = 0;
    for piece in segments {
        for i in 0..piece.iov_len.min(RANGE_LEN - done) {
            // SAFETY: segments refer to mapped guest memory.
            bytes[done] = unsafe { piece.iov_base.cast::<u8>().add(i).read_volatile() };
            done += 1;
        }
    }
    bytes
}
