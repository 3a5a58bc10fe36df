//! Table of a connection's commands in flight.

use super::check::Kind;
use super::pool::Span;
use fathom_nbd::protocol::ErrorCode;
use std::ops::{Index, IndexMut};

/// The first error of a command, and its offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub code: ErrorCode,
    pub offset: u64,
}

/// A command of the client. A long command is executed as several requests and answered once.
#[derive(Debug)]
pub(super) struct Command {
    pub kind: Kind,
    pub fua: bool,
    /// The command is executed in pieces.
    pub split: bool,
    pub cookie: u64,
    pub offset: u64,
    pub len: u64,
    /// Bytes from `offset` on that have been issued as requests.
    pub issued: u64,
    /// Number of requests in flight.
    pub pending: u32,
    pub failure: Option<Failure>,
    /// The connection ended before the client sent all of the payload, so the command gets no
    /// reply.
    pub is_unanswerable: bool,
    /// Buffers of a read in one piece, in order; all but the last are whole blocks.
    pub spans: Vec<Span>,
}

impl Command {
    fn new() -> Command {
        Command {
            kind: Kind::Flush,
            fua: false,
            split: false,
            cookie: 0,
            offset: 0,
            len: 0,
            issued: 0,
            pending: 0,
            failure: None,
            is_unanswerable: false,
            spans: Vec::new(),
        }
    }

    pub(super) fn fail(&mut self, code: ErrorCode, offset: u64) {
        self.failure.get_or_insert(Failure { code, offset });
    }

    /// Returns true if all of the command has been issued and completed.
    pub(super) fn is_over(&self) -> bool {
        self.pending == 0 && self.issued == self.len
    }
}

/// Commands by index; the index is the tag of the command's requests.
pub(super) struct Table {
    commands: Vec<Command>,
    free: Vec<u16>,
}

impl Table {
    pub(super) fn new(n: usize) -> Table {
        Table {
            commands: std::iter::repeat_with(Command::new).take(n).collect(),
            free: (0..n as u16).rev().collect(),
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Returns the number of commands in flight.
    pub(super) fn used(&self) -> usize {
        self.commands.len() - self.free.len()
    }

    pub(super) fn capacity(&self) -> usize {
        self.commands.len()
    }

    /// Takes a free command and resets its progress. The command's other fields still hold the
    /// values of the previous command. The table must not be full.
    #[inline]
    pub(super) fn take(&mut self) -> u16 {
        let index = self.free.pop().expect("room for a command");
        let command = &mut self[index];
        command.split = false;
        command.issued = 0;
        command.pending = 0;
        command.failure = None;
        command.is_unanswerable = false;
        debug_assert!(command.spans.is_empty());
        index
    }

    #[inline]
    pub(super) fn put(&mut self, index: u16) {
        self.free.push(index);
    }

    pub(super) fn in_use(&self) -> Vec<u16> {
        let all = 0..self.commands.len() as u16;
        all.filter(|index| !self.free.contains(index)).collect()
    }

    /// Returns the commands that are not fully issued.
    pub(super) fn unissued(&self) -> Vec<u16> {
        let mut all = self.in_use();
        all.retain(|index| self[*index].issued < self[*index].len);
        all
    }

    /// Returns the number of requests in flight.
    pub(super) fn in_flight(&self) -> u32 {
        let pending = |index: &u16| self[*index].pending;
        self.in_use().iter().map(pending).sum()
    }
}

impl Index<u16> for Table {
    type Output = Command;

    #[inline]
    fn index(&self, index: u16) -> &Command {
        &self.commands[usize::from(index)]
    }
}

impl IndexMut<u16> for Table {
    #[inline]
    fn index_mut(&mut self, index: u16) -> &mut Command {
        &mut self.commands[usize::from(index)]
    }
}
