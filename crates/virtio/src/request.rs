//! A descriptor chain as a request (5.2.6), or as the answer that it gets at
//! once. Pure: touches guest memory only to read.

use crate::chain::{Chain, Descriptor, Unusable};
use crate::memory::{GuestMemory, RegionCache, segment};
use fathom_core::{Op, RangeLimits, Request};
use libc::iovec;
use std::ptr::NonNull;

pub const T_IN: u32 = 0;
pub const T_OUT: u32 = 1;
pub const T_FLUSH: u32 = 4;
pub const T_GET_ID: u32 = 8;
pub const T_DISCARD: u32 = 11;
pub const T_WRITE_ZEROES: u32 = 13;

/// The values of the status byte (5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    Ok = 0,
    IoErr = 1,
    Unsupported = 2,
}

impl Status {
    /// The status for a request that ended with `errno`, 0 or positive.
    #[inline]
    pub fn from_errno(errno: i32) -> Status {
        match errno {
            0 => Status::Ok,
            libc::EOPNOTSUPP => Status::Unsupported,
            _ => Status::IoErr,
        }
    }
}

/// Data segments in a request, at most (`seg_max`).
pub const SEG_MAX: usize = 126;
/// Bytes in a segment, at most (`size_max`). Firmware is known not to care,
/// so it is announced and not enforced.
pub const SIZE_MAX: u32 = 4 << 20;
/// Ranges in a discard or write-zeroes request, at most (`max_discard_seg`,
/// `max_write_zeroes_seg`).
pub const MAX_RANGES: usize = 1;
/// Bytes in a read or a write, at most: more than any driver asks for, and
/// less than one system call moves.
pub const MAX_LEN: u64 = 1 << 30;
/// Pieces of memory in a request. Segments may be split where guest memory
/// is, and this many still fit one system call (IOV_MAX).
const MAX_PIECES: usize = 1024;

const SECTOR_SHIFT: u32 = 9;
const SECTOR_MASK: u64 = 511;
const HEADER_LEN: usize = 16;
const RANGE_LEN: usize = 16;
const RANGE_F_UNMAP: u32 = 1;

/// What requests are checked against; computed once a batch.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes.
    pub size: u64,
    pub read_only: bool,
    /// Writes must be durable when they complete.
    pub write_through: bool,
    pub discard: Option<RangeLimits>,
    pub write_zeroes: Option<RangeLimits>,
    /// The driver may use indirect descriptors.
    pub indirect: bool,
}

/// What becomes of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The request is filled in; its status byte goes there.
    Submit(NonNull<u8>),
    /// The driver wants the serial number, in the request's segments.
    Identify(NonNull<u8>),
    /// To be answered with this status.
    Refuse(NonNull<u8>, Status),
    /// No status byte can be written.
    Unanswerable,
}

/// Reads a queue's chains; `memory` is the same for all of them.
pub(crate) struct Parser<'a> {
    pub memory: &'a GuestMemory,
    pub cache: &'a mut RegionCache,
    pub limits: &'a Limits,
}

/// A chain's buffers as they are collected. All data ends up in one list of
/// segments: in a well-formed request only one direction has any.
struct Buffers<'r> {
    segments: &'r mut fathom_core::Segments,
    header: [u8; HEADER_LEN],
    /// Bytes of the header seen so far.
    header_len: usize,
    /// Device-readable bytes after the header.
    readable: u64,
    /// Device-writable bytes, with the status byte.
    writable: u64,
    /// Data descriptors.
    count: usize,
    /// The last writable descriptor: it ends in the status byte, and only
    /// when the chain ends is it known to be the last.
    last_writable: Option<(u64, u32)>,
    /// Something is wrong, but the chain still leads to its status byte.
    malformed: bool,
}

impl Parser<'_> {
    /// Judge `chain` and fill in the parts of `request` that the chain
    /// determines.
    #[inline]
    pub fn parse(&mut self, chain: &mut Chain, request: &mut Request) -> Verdict {
        request.segments.clear();
        let mut buffers = Buffers {
            segments: &mut request.segments,
            header: [0; HEADER_LEN],
            header_len: 0,
            readable: 0,
            writable: 0,
            count: 0,
            last_writable: None,
            malformed: false,
        };
        loop {
            match chain.next(self.cache) {
                Ok(Some(descriptor)) => self.collect(&mut buffers, descriptor),
                Ok(None) => break,
                Err(Unusable) => return Verdict::Unanswerable,
            }
        }
        let Some(status) = self.split_off_status(&mut buffers) else {
            return Verdict::Unanswerable;
        };
        if buffers.malformed || buffers.header_len < HEADER_LEN {
            return Verdict::Refuse(status, Status::IoErr);
        }
        let (header, readable, written) = (buffers.header, buffers.readable, buffers.writable - 1);
        match self.decode(request, header, readable, written) {
            Ok(T_GET_ID) => Verdict::Identify(status),
            Ok(_) => Verdict::Submit(status),
            Err(refusal) => Verdict::Refuse(status, refusal),
        }
    }

    /// Take one descriptor in.
    #[inline(always)]
    fn collect(&mut self, buffers: &mut Buffers, descriptor: Descriptor) {
        let Descriptor { addr, len, .. } = descriptor;
        if descriptor.is_writable() {
            if let Some((addr, len)) = buffers.last_writable.replace((addr, len)) {
                self.push(buffers, addr, u64::from(len));
            }
            buffers.writable += u64::from(len);
            return;
        }
        // Readable ones come first (2.7.4.2).
        buffers.malformed |= len == 0 || buffers.last_writable.is_some();
        if buffers.header_len == 0 && len as usize == HEADER_LEN {
            match self.cache.read(self.memory, addr) {
                Some(bytes) => buffers.header = bytes,
                None => buffers.malformed = true,
            }
            buffers.header_len = HEADER_LEN;
        } else if buffers.header_len < HEADER_LEN {
            self.collect_header(buffers, addr, len);
        } else {
            buffers.readable += u64::from(len);
            self.push(buffers, addr, u64::from(len));
        }
    }

    /// A header that is split over descriptors, or shares one with data
    /// (2.7.4: framing is up to the driver).
    #[cold]
    fn collect_header(&mut self, buffers: &mut Buffers, addr: u64, len: u32) {
        let have = buffers.header_len;
        let part = (HEADER_LEN - have).min(len as usize);
        let into = &mut buffers.header[have..have + part];
        if self.cache.read_pieces(self.memory, addr, into).is_none() {
            buffers.malformed = true;
        }
        buffers.header_len += part;
        let rest = u64::from(len) - part as u64;
        if rest > 0 {
            buffers.readable += rest;
            self.push(buffers, addr.wrapping_add(part as u64), rest);
        }
    }

    /// Add data.
    #[inline(always)]
    fn push(&mut self, buffers: &mut Buffers, addr: u64, len: u64) {
        buffers.count += 1;
        if len == 0 || buffers.count > SEG_MAX || buffers.malformed {
            buffers.malformed = true;
            return;
        }
        match self.cache.translate(self.memory, addr, len) {
            Some(host) => buffers.segments.push(segment(host, len)),
            None => self.push_pieces(buffers, addr, len),
        }
    }

    #[cold]
    fn push_pieces(&mut self, buffers: &mut Buffers, addr: u64, len: u64) {
        let segments = &mut *buffers.segments;
        let mut room = MAX_PIECES.saturating_sub(segments.len());
        let mapped = self.cache.pieces(self.memory, addr, len, |piece| {
            if room > 0 {
                room -= 1;
                segments.push(piece);
            }
        });
        buffers.malformed |= mapped.is_none() || room == 0;
    }

    /// The status byte: the last of the writable bytes. What precedes it in
    /// its descriptor is data.
    #[inline(always)]
    fn split_off_status(&mut self, buffers: &mut Buffers) -> Option<NonNull<u8>> {
        let (addr, len) = buffers.last_writable?;
        let data = u64::from(len.checked_sub(1)?);
        let status = self
            .cache
            .translate(self.memory, addr.checked_add(data)?, 1)?;
        if data > 0 {
            self.push(buffers, addr, data);
        }
        Some(status)
    }

    /// Check what the header asks for against the buffers that came with it.
    /// Returns the type.
    #[inline(always)]
    fn decode(
        &mut self,
        request: &mut Request,
        header: [u8; HEADER_LEN],
        readable: u64,
        written: u64,
    ) -> Result<u32, Status> {
        let bits = u128::from_le_bytes(header);
        let (kind, sector) = (bits as u32, (bits >> 64) as u64);
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

    /// Discard and write zeroes: the payload is a list of ranges.
    #[cold]
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
        let bits = u128::from_le_bytes(copy_payload(&request.segments));
        request.segments.clear();
        let (sector, sectors, flags) = (bits as u64, (bits >> 64) as u32, (bits >> 96) as u32);
        // 5.2.6.2: unknown flags, and unmap on discard, are not supported.
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

/// The byte offset of a range that is whole sectors, not empty, and within
/// the disk.
#[inline(always)]
fn check_range(sector: u64, len: u64, size: u64) -> Result<u64, Status> {
    let fits = len <= size && sector <= (size - len) >> SECTOR_SHIFT;
    if len == 0 || len & SECTOR_MASK != 0 || !fits {
        return Err(Status::IoErr);
    }
    Ok(sector << SECTOR_SHIFT)
}

/// The one range of a payload that was found to be RANGE_LEN bytes long.
fn copy_payload(segments: &[iovec]) -> [u8; RANGE_LEN] {
    let mut bytes = [0; RANGE_LEN];
    let mut done = 0;
    for piece in segments {
        for i in 0..piece.iov_len.min(RANGE_LEN - done) {
            // SAFETY: segments name mapped guest memory.
            bytes[done] = unsafe { piece.iov_base.cast::<u8>().add(i).read_volatile() };
            done += 1;
        }
    }
    bytes
}
