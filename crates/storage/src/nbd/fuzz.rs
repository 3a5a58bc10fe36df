//! Feeds a client with a server's replies that are made from bytes: the body of a fuzz target and
//! of a test.

use super::receiver::Receiver;
use super::rules::{Context, Tells};
use super::table::{Ask, Table};
use fathom_core::{Op, RequestId, Slab};
use fathom_nbd::protocol::{ChunkHeader, Replies, chunk, command, u64_at};
use libc::{iovec, msghdr};

/// Number of concurrent commands; each has a region of memory.
const SLOTS: usize = 6;
const REGION: usize = 8192;
/// Value of the bytes that must not be written to.
const GUARD: u8 = 0xee;
/// The ID of base:allocation.
const ALLOCATION: u32 = 7;
const CONTEXT: Context = Context {
    id: ALLOCATION,
    tells: Tells::Allocation,
};

/// The fuzzer's input; reads as zeroes after its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    fn number(&mut self, below: usize) -> usize {
        let number = usize::from(self.byte()) << 8 | usize::from(self.byte());
        number % below
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.byte()).collect()
    }
}

/// A command that the server has received.
struct Asked {
    slot: usize,
    index: u16,
    /// Bytes of a read that an honest server has left to send.
    left: std::ops::Range<u32>,
    /// Whether a part of it has been sent as a hole.
    holes: bool,
}

struct Case {
    replies: Replies,
    memory: Vec<u8>,
    slab: Slab,
    ids: Vec<RequestId>,
    table: Table,
    receiver: Receiver,
    asked: Vec<Asked>,
    stream: Vec<u8>,
    /// Whether the server has lied, so that the results of reads are unknown.
    lied: bool,
}

/// The byte of an honest server's data at this offset.
fn content(offset: u64) -> u8 {
    (offset ^ offset >> 7) as u8 | 1
}

/// Simulates a server that replies as the input says.
///
/// # Panics
/// If bytes are written outside their place, or an honest reply is not understood.
pub fn replies(input: &[u8]) {
    let mut input = Input(input);
    let replies = match input.byte() % 3 {
        0 => Replies::Simple,
        1 => Replies::Structured,
        _ => Replies::Extended,
    };
    let mut slab = Slab::default();
    slab.grow(SLOTS);
    let mut case = Case {
        replies,
        memory: vec![GUARD; (SLOTS + 1) * REGION],
        ids: (0..SLOTS).map(|_| slab.take().expect("grown")).collect(),
        slab,
        table: Table::new(replies, 0),
        receiver: Receiver::new(replies, (replies != Replies::Simple).then_some(CONTEXT)),
        asked: Vec::new(),
        stream: Vec::new(),
        lied: false,
    };
    while !input.0.is_empty() {
        match input.byte() % 8 {
            0..3 => case.ask(&mut input),
            3..6 => case.answer(&mut input),
            6 => case.lie(&mut input),
            _ => {
                case.lied = true;
                let len = input.number(64);
                let bytes = input.bytes(len);
                case.stream.extend(bytes);
            }
        }
        if !case.deliver(&mut input) {
            return;
        }
    }
}

impl Case {
    fn is_chunked(&self) -> bool {
        self.replies != Replies::Simple
    }

    fn ask(&mut self, input: &mut Input<'_>) {
        let free = |slot: &usize| self.asked.iter().all(|asked| asked.slot != *slot);
        let Some(slot) = (0..SLOTS).find(free) else {
            return;
        };
        let (op, command) = match input.byte() % 5 {
            0..3 => (Op::Read, command::READ),
            3 => (Op::Write, command::WRITE),
            _ if self.is_chunked() => (Op::BlockStatus, command::BLOCK_STATUS),
            _ => (Op::Flush, command::FLUSH),
        };
        let len = 1 + input.number(4096) as u32;
        let request = &mut self.slab[self.ids[slot]];
        // The command may be a part of its request.
        let lead = input.number(100) as u32;
        request.op = op;
        request.len = len.into();
        request.segments.clear();
        let mut left = match op {
            Op::BlockStatus => 8 * (1 + input.number(4)),
            _ => (lead + len) as usize + input.number(100),
        };
        let mut at = slot * REGION + 16;
        while left > 0 {
            let part = match op {
                Op::BlockStatus => left,
                _ => left.min(1 + input.number(2000).max(left / 64)),
            };
            request.segments.push(iovec {
                iov_base: self.memory.as_mut_ptr().wrapping_add(at).cast(),
                iov_len: part,
            });
            at += part + 5;
            left -= part;
        }
        let ask = Ask {
            id: self.ids[slot],
            flags: 0,
            command,
            offset: input.number(1 << 16) as u64,
            len: len.into(),
            start: lead.into(),
        };
        self.asked.push(Asked {
            slot,
            index: self.table.add(ask),
            left: 0..len,
            holes: false,
        });
    }

    fn cookie(&mut self, which: usize) -> u64 {
        let index = self.asked[which].index;
        u64_at(self.table.header(index), 8)
    }

    /// Sends an honest reply to one command, or a part of one.
    fn answer(&mut self, input: &mut Input<'_>) {
        if self.asked.is_empty() {
            return;
        }
        let (is_chunked, is_extended) = (self.is_chunked(), self.replies == Replies::Extended);
        let which = input.number(self.asked.len());
        let cookie = self.cookie(which);
        let asked = &mut self.asked[which];
        let ask = self.table.get(asked.index).ask;
        let fails = input.byte().is_multiple_of(8) && (is_chunked || ask.command != command::READ);
        if !is_chunked {
            self.stream.extend(0x6744_6698u32.to_be_bytes());
            self.stream.extend(u32::from(fails).to_be_bytes());
            self.stream.extend(cookie.to_be_bytes());
            if ask.command == command::READ && !fails {
                let all = ask.offset..ask.offset + ask.len;
                self.stream.extend(all.map(content));
            }
            return;
        }
        let mut body = Vec::new();
        let (mut last, mut kind) = (true, chunk::NONE);
        if fails {
            kind = chunk::ERROR;
            body.extend([0, 0, 0, 5, 0, 2, b'n', b'o']);
        } else if ask.command == command::READ {
            // Sends the front or the back of the remaining bytes.
            let left = asked.left.clone();
            let part = 1 + input.number(left.len().max(1)) as u32;
            let range = match input.byte() & 1 {
                0 => left.start..(left.start + part).min(left.end),
                _ => left.end.saturating_sub(part).max(left.start)..left.end,
            };
            asked.left = match range.start == left.start {
                true => range.end..left.end,
                false => left.start..range.start,
            };
            last = asked.left.is_empty();
            body.extend((ask.offset + u64::from(range.start)).to_be_bytes());
            if input.byte().is_multiple_of(4) {
                kind = chunk::OFFSET_HOLE;
                asked.holes = true;
                body.extend((range.len() as u32).to_be_bytes());
            } else {
                kind = chunk::OFFSET_DATA;
                let offsets = range.map(|at| ask.offset + u64::from(at));
                body.extend(offsets.map(content));
            }
        } else if ask.command == command::BLOCK_STATUS {
            body.extend(ALLOCATION.to_be_bytes());
            let count = 1 + input.number(6);
            kind = chunk::BLOCK_STATUS;
            if is_extended {
                kind = chunk::BLOCK_STATUS_EXT;
                body.extend((count as u32).to_be_bytes());
            }
            for _ in 0..count {
                let (len, flags) = (1 + input.number(4096) as u32, input.number(4) as u32);
                match is_extended {
                    true => body.extend(
                        [len.into(), u64::from(flags)]
                            .map(u64::to_be_bytes)
                            .concat(),
                    ),
                    false => body.extend([len, flags].map(u32::to_be_bytes).concat()),
                }
            }
        }
        self.chunk(last.into(), kind, cookie, ask.offset, &body);
    }

    fn chunk(&mut self, flags: u16, kind: u16, cookie: u64, offset: u64, body: &[u8]) {
        let header = ChunkHeader {
            flags,
            kind,
            cookie,
            offset,
            len: body.len() as u64,
        };
        match self.replies {
            Replies::Extended => self.stream.extend(header.extended()),
            _ => self.stream.extend(header.structured()),
        }
        self.stream.extend(body);
    }

    /// Sends an arbitrary chunk, often about an existing command.
    fn lie(&mut self, input: &mut Input<'_>) {
        self.lied = true;
        let (cookie, ask) = match self.asked.len() {
            n if n > 0 && !input.byte().is_multiple_of(4) => {
                let which = input.number(n);
                let ask = self.table.get(self.asked[which].index).ask;
                (self.cookie(which), Some(ask))
            }
            _ => (input.number(1 << 16) as u64, None),
        };
        const KINDS: [u16; 8] = [0, 1, 2, 5, 6, 0x8001, 0x8002, 9];
        let kind = KINDS[input.number(KINDS.len())];
        let len = input.number(48);
        let mut body = input.bytes(len);
        // Often at an end of the requested range, or across it.
        if let (Some(ask), Some(start)) = (ask, body.first_chunk_mut()) {
            let range = ask.offset..ask.offset + ask.len;
            let near = match input.byte() % 3 {
                0 => range.start,
                1 => range.end,
                _ => range.end.saturating_sub(len as u64 - 8),
            };
            let offset = (near + 1).saturating_sub(u64::from(input.byte() % 3));
            *start = offset.to_be_bytes();
        }
        let offset = ask.map_or(0, |ask| ask.offset);
        let offset = offset + u64::from(input.byte().is_multiple_of(8));
        self.chunk(u16::from(input.byte()) & 1, kind, cookie, offset, &body);
    }

    /// Delivers the sent bytes to the client in pieces. Returns false if the client hangs up.
    fn deliver(&mut self, input: &mut Input<'_>) -> bool {
        let stream = std::mem::take(&mut self.stream);
        let mut rest = &stream[..];
        while !rest.is_empty() {
            let message = self.receiver.prepare(&self.table, &self.slab);
            let most = match input.byte() {
                0..100 => rest.len(),
                n => usize::from(n),
            };
            // SAFETY: the message of `prepare` is valid for receiving.
            let taken = unsafe { receive(message, &rest[..most.min(rest.len())]) };
            rest = &rest[taken..];
            self.receiver.received(taken);
            let mut answered = Vec::new();
            let (table, slab) = (&mut self.table, &self.slab);
            let taken_in = self.receiver.take_in(table, slab, 0, &mut answered);
            self.check_guards();
            if let Err(violation) = taken_in {
                assert!(self.lied, "{violation}");
                return false;
            }
            answered.into_iter().for_each(|index| self.done(index));
        }
        true
    }

    fn done(&mut self, index: u16) {
        let place = self.asked.iter().position(|asked| asked.index == index);
        let asked = self.asked.remove(place.expect("answered once"));
        let failed = self.table.get(index).errno != 0;
        let ask = self.table.remove(index);
        if ask.command == command::READ && !failed && !self.lied {
            self.check_content(&ask, asked.holes);
        }
        let region = asked.slot * REGION..(asked.slot + 1) * REGION;
        self.memory[region].fill(GUARD);
    }

    /// Returns the indices in `memory` of the command's bytes.
    fn places(&self, ask: &Ask) -> impl Iterator<Item = usize> {
        let base = self.memory.as_ptr() as usize;
        let segments = self.slab[ask.id].segments.iter();
        let all = segments.flat_map(move |segment| {
            let start = segment.iov_base as usize - base;
            start..start + segment.iov_len
        });
        all.skip(ask.start as usize).take(ask.len as usize)
    }

    fn check_content(&self, ask: &Ask, holes: bool) {
        for (offset, place) in (ask.offset..).zip(self.places(ask)) {
            let byte = self.memory[place];
            let is_right = byte == content(offset) || holes && byte == 0;
            assert!(is_right, "{byte:#x} at offset {offset}");
        }
    }

    /// Checks that only requested bytes have been written.
    fn check_guards(&mut self) {
        let mut guards = vec![true; self.memory.len()];
        for asked in &self.asked {
            let ask = self.table.get(asked.index).ask;
            match self.slab[ask.id].op {
                Op::Read => self.places(&ask).for_each(|place| guards[place] = false),
                Op::BlockStatus => {
                    let segment = self.slab[ask.id].segments[0];
                    let start = segment.iov_base as usize - self.memory.as_ptr() as usize;
                    guards[start..start + segment.iov_len].fill(false);
                }
                _ => {}
            }
        }
        let mut touched = guards.iter().zip(&self.memory);
        let stray = touched.position(|(guard, byte)| *guard && *byte != GUARD);
        assert_eq!(stray, None, "written to what nobody asked for");
    }
}

/// Emulates recvmsg(2) on bytes.
///
/// # Safety
/// The message's iovecs are valid.
unsafe fn receive(message: *mut msghdr, bytes: &[u8]) -> usize {
    let mut rest = bytes;
    // SAFETY: as required of the caller.
    let iovecs =
        unsafe { std::slice::from_raw_parts((*message).msg_iov, (*message).msg_iovlen as _) };
    for iov in iovecs {
        assert!(iov.iov_len > 0);
        let (now, later) = rest.split_at(iov.iov_len.min(rest.len()));
        // SAFETY: the bytes fit into the iovec.
        unsafe {
            iov.iov_base.cast::<u8>().copy_from(now.as_ptr(), now.len());
        }
        rest = later;
    }
    bytes.len() - rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn whatever_a_server_sends_stays_where_it_belongs(
            input in prop::collection::vec(any::<u8>(), 0..600)
        ) {
            replies(&input);
        }

        /// Without lies, every reply is understood, however the stream is split.
        #[test]
        fn honest_replies_are_understood_in_any_pieces(
            form in 0..3u8,
            steps in prop::collection::vec((0..6u8, prop::collection::vec(any::<u8>(), 8..24)), 0..60)
        ) {
            let mut input = vec![form];
            for (step, rest) in steps {
                input.push(step);
                input.extend(rest);
            }
            replies(&input);
        }
    }
}
