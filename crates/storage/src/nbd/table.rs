//! Commands that have been sent, or are about to be, and have not been answered.

use super::coverage::Coverage;
use fathom_core::RequestId;
use fathom_nbd::protocol::{Replies, RequestHeader, command};

/// Maximum number of commands of a connection.
pub(super) const COMMANDS: usize = 1 << GENERATION_SHIFT;

// Layout of a cookie, from the top: 24 bits of the connection, 32 bits of the command's generation,
// and its index.
const SALT: u64 = !0 << 40;
const GENERATION_SHIFT: u32 = 8;

/// A command for the server: a request, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ask {
    /// The request, or `NOBODY` for the channel's own flush.
    pub(super) id: RequestId,
    pub(super) flags: u16,
    /// See [`command`].
    pub(super) command: u16,
    /// Offset on the export in bytes.
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Offset in the request's segments of its first byte.
    pub(super) start: u64,
}

impl Ask {
    /// Returns the length of a read, which is at most that of a payload.
    #[inline]
    pub(super) fn read_len(&self) -> u32 {
        self.len as u32
    }
}

/// A command in flight.
#[derive(Debug)]
pub(super) struct Command {
    pub(super) ask: Ask,
    header: [u8; RequestHeader::EXTENDED_LEN],
    /// Parts of a read that have arrived.
    pub(super) coverage: Coverage,
    /// Time, in ticks, of the server's last message about it, or of its sending.
    pub(super) touched: u64,
    /// The errno that the server has reported, or 0.
    pub(super) errno: i32,
    /// Whether the engine may still be sending it.
    pub(super) in_send: bool,
    /// Whether the server has answered it.
    pub(super) answered: bool,
    in_use: bool,
    /// Distinguishes this command from earlier ones in the same place.
    generation: u32,
}

/// A fixed number of commands. The commands do not move, because headers are sent from here.
pub(super) struct Table {
    commands: Box<[Command]>,
    /// The upper 24 bits of all cookies, which differ from those of other connections. If both
    /// hosts are traced, a cookie identifies the request.
    salt: u64,
    replies: Replies,
    free: Vec<u16>,
    /// Number of bytes of the reads in flight.
    read_bytes: u64,
}

impl Table {
    /// Makes the table of a connection with these negotiated properties.
    pub(super) fn new(replies: Replies, salt: u64) -> Table {
        let empty = || Command {
            ask: Ask {
                id: RequestId::NOBODY,
                flags: 0,
                command: 0,
                offset: 0,
                len: 0,
                start: 0,
            },
            header: [0; RequestHeader::EXTENDED_LEN],
            coverage: Coverage::default(),
            touched: 0,
            errno: 0,
            in_send: false,
            answered: false,
            in_use: false,
            generation: 0,
        };
        Table {
            commands: std::iter::repeat_with(empty).take(COMMANDS).collect(),
            salt: salt & SALT,
            replies,
            free: (0..COMMANDS as u16).rev().collect(),
            read_bytes: 0,
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    pub(super) fn used(&self) -> usize {
        COMMANDS - self.free.len()
    }

    /// Average number of data bytes of the awaited replies.
    #[inline]
    pub(super) fn awaited(&self) -> u64 {
        self.read_bytes / self.used().max(1) as u64
    }

    /// Adds a command; there must be a free place.
    #[inline]
    pub(super) fn add(&mut self, ask: Ask) -> u16 {
        let index = self.free.pop().expect("the caller has looked");
        let command = &mut self.commands[usize::from(index)];
        command.generation = command.generation.wrapping_add(1);
        let cookie = self.cookie(index);
        let command = &mut self.commands[usize::from(index)];
        command.ask = ask;
        let header = RequestHeader {
            flags: ask.flags,
            command: ask.command,
            cookie,
            offset: ask.offset,
            len: ask.len,
        };
        match self.replies {
            Replies::Extended => command.header = header.extended(),
            _ => command.header[..RequestHeader::COMPACT_LEN].copy_from_slice(&header.compact()),
        }
        command.coverage.clear();
        command.touched = 0;
        command.errno = 0;
        command.in_send = true;
        command.answered = false;
        command.in_use = true;
        if ask.command == command::READ {
            self.read_bytes += ask.len;
        }
        index
    }

    /// Returns the cookie of the command in a place, or of the last one there.
    #[inline]
    pub(super) fn cookie(&self, index: u16) -> u64 {
        let generation = self.commands[usize::from(index)].generation;
        self.salt | u64::from(generation) << GENERATION_SHIFT | u64::from(index)
    }

    /// Returns the command with this cookie, if it awaits a reply.
    #[inline]
    pub(super) fn find(&self, cookie: u64) -> Option<u16> {
        let index = (cookie % COMMANDS as u64) as u16;
        let command = &self.commands[usize::from(index)];
        let awaits = command.in_use && !command.answered;
        (awaits && self.cookie(index) == cookie).then_some(index)
    }

    #[inline]
    pub(super) fn get(&mut self, index: u16) -> &mut Command {
        &mut self.commands[usize::from(index)]
    }

    /// Returns the header to send, without data.
    #[inline]
    pub(super) fn header(&mut self, index: u16) -> &mut [u8] {
        let len = self.replies.request_len();
        &mut self.commands[usize::from(index)].header[..len]
    }

    pub(super) fn ask(&self, index: u16) -> Ask {
        self.commands[usize::from(index)].ask
    }

    /// Removes a command that neither the server nor the engine uses any more.
    #[inline]
    pub(super) fn remove(&mut self, index: u16) -> Ask {
        let command = &mut self.commands[usize::from(index)];
        command.in_use = false;
        let ask = command.ask;
        if ask.command == command::READ {
            self.read_bytes -= ask.len;
        }
        self.free.push(index);
        ask
    }

    /// Returns the indices of all commands.
    pub(super) fn indexes(&self) -> impl Iterator<Item = u16> + use<'_> {
        let used = self.commands.iter().enumerate();
        used.filter_map(|(index, command)| command.in_use.then_some(index as u16))
    }

    /// Returns whether a command has been sent and had no reply since this time.
    pub(super) fn has_stale(&self, since: u64) -> bool {
        let is_stale = |command: &Command| !command.in_send && command.touched < since;
        self.commands.iter().any(|c| c.in_use && is_stale(c))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_nbd::protocol::u64_at;

    #[test]
    fn a_cookie_is_good_once() {
        let salt = 0xabcd_efff_ffff_ffff;
        let mut table = Table::new(Replies::Structured, salt);
        let ask = |command| Ask {
            id: RequestId(1),
            flags: 0,
            command,
            offset: 0,
            len: 512,
            start: 0,
        };
        let cookie = |table: &mut Table, index| u64_at(table.header(index), 8);
        let first = table.add(ask(command::READ));
        let old = cookie(&mut table, first);
        assert_eq!(table.find(old), Some(first));
        assert_eq!(table.awaited(), 512);
        for wrong in [old + 1, old + (1 << 8), old + (1 << 40), 0, u64::MAX] {
            assert_eq!(table.find(wrong), None);
        }
        assert_eq!(old >> 40, 0x00ab_cdef);
        table.get(first).answered = true;
        assert_eq!(table.find(old), None);
        table.remove(first);
        let second = table.add(ask(command::WRITE));
        assert_eq!(second, first);
        assert_eq!(table.find(old), None);
        assert_eq!((table.used(), table.awaited()), (1, 0));
        for _ in 1..COMMANDS {
            table.add(ask(command::WRITE));
        }
        assert!(table.is_full());
    }
}
