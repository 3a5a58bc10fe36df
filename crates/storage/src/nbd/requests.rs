//! From requests to commands, and back.

use super::channel::NbdChannel;
use super::table::Ask;
use crate::file::report::report;
use fathom_core::{Cx, Op, RequestId, Stage};
use fathom_nbd::protocol::{command, command_flag, export_flag};

/// The longest trim, and the longest write zeroes of one request.
pub(super) const MAX_TRIM: u64 = 1 << 30;

/// The longest block status: what 32 bits can say, in whole blocks.
const MAX_STATUS: u64 = (4 << 30) - (64 << 10);

/// How far a request has come.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    /// Bytes that the server has been asked for.
    asked: u64,
    /// Commands that it has not answered.
    commands: u32,
    /// 0, or the first errno.
    errno: i32,
    /// The server is asked for a flush: as such, or after the rest.
    flush: Flush,
    /// It waits in `waiting`.
    waits: bool,
}

/// A request's flush.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Flush {
    /// There is none.
    #[default]
    None,
    /// When everything else has been answered.
    After,
    /// It is to be asked for.
    Due,
    /// It has been, by this number.
    Asked(u64),
}

impl NbdChannel {
    /// Take a request on.
    pub(super) fn begin(&mut self, cx: &mut Cx, id: RequestId) {
        let index = id.0 as usize;
        if index >= self.progress.len() {
            let capacity = cx.slab.capacity().max(index + 1);
            self.progress.resize(capacity, Progress::default());
            self.waiting.reserve(capacity);
        }
        let request = &cx.slab[id];
        let export = &self.shared.export;
        let by_itself = !export.has(export_flag::SEND_FUA) && export.has(export_flag::SEND_FLUSH);
        let flush = match request.op {
            Op::Flush => Flush::Due,
            Op::Write | Op::Discard | Op::WriteZeroes if by_itself && self.is_durable(cx, id) => {
                Flush::After
            }
            _ => Flush::None,
        };
        self.progress[index] = Progress {
            flush,
            waits: true,
            ..Progress::default()
        };
        self.waiting.push_back(id);
    }

    /// Whether it must be durable when it completes.
    fn is_durable(&self, cx: &Cx, id: RequestId) -> bool {
        let request = &cx.slab[id];
        let writes = matches!(request.op, Op::Write | Op::Discard | Op::WriteZeroes);
        request.fua || self.shared.options.writethrough && writes
    }

    /// Hand commands to the sender, as many as there is room for.
    pub(super) fn ask(&mut self, cx: &mut Cx) {
        while let Some(&id) = self.waiting.front() {
            let progress = &mut self.progress[id.0 as usize];
            if progress.flush == Flush::Due && self.shared.flush_has_failed() {
                progress.errno = libc::EIO;
            }
            if self.is_asked(cx, id) {
                self.waiting.pop_front();
                self.progress[id.0 as usize].waits = false;
                self.settle_request(cx, id);
            } else if self.line.table.is_full() {
                return;
            } else {
                let ask = self.next(cx, id);
                cx.enter(id, Stage::Device);
                let index = self.line.table.add(ask);
                self.line.sender.add(index);
            }
        }
    }

    /// Everything has been asked, or there is no point in asking more.
    fn is_asked(&self, cx: &Cx, id: RequestId) -> bool {
        let progress = &self.progress[id.0 as usize];
        let (request, asked) = (&cx.slab[id], progress.asked);
        let whole = match request.op {
            Op::Flush => true,
            // An answer need not be about all of it.
            Op::BlockStatus => asked > 0,
            _ => asked == request.len,
        };
        progress.errno != 0 || whole && progress.flush != Flush::Due
    }

    /// The next command for a request.
    fn next(&mut self, cx: &Cx, id: RequestId) -> Ask {
        let durable = self.is_durable(cx, id);
        let progress = &mut self.progress[id.0 as usize];
        let (request, export) = (&cx.slab[id], &self.shared.export);
        progress.commands += 1;
        if progress.flush == Flush::Due {
            progress.flush = Flush::Asked(self.shared.begin_flush());
            return Ask {
                id,
                flags: 0,
                command: command::FLUSH,
                offset: 0,
                len: 0,
                start: 0,
            };
        }
        let payload = u64::from(export.maximum_payload());
        let (command, limit) = match request.op {
            Op::Read => (command::READ, payload),
            Op::Write => (command::WRITE, payload),
            Op::Discard => (command::TRIM, MAX_TRIM),
            // Servers that do it by writing may have the limit of writes.
            Op::WriteZeroes => (command::WRITE_ZEROES, payload),
            Op::BlockStatus => (command::BLOCK_STATUS, MAX_STATUS),
            Op::Flush => unreachable!("a flush has no other part"),
        };
        let mut flags = 0;
        if durable && export.has(export_flag::SEND_FUA) {
            flags |= command_flag::FUA;
        }
        if request.op == Op::WriteZeroes && !request.unmap {
            flags |= command_flag::NO_HOLE;
        }
        let start = progress.asked;
        let len = (request.len - start).min(limit);
        progress.asked += len;
        Ask {
            id,
            flags,
            command,
            offset: request.at + start,
            len: len as u32,
            start,
        }
    }

    /// The server has answered a command, and the engine has sent it.
    pub(super) fn command_done(&mut self, cx: &mut Cx, index: u16) {
        let errno = self.line.table.get(index).errno;
        let ask = self.line.table.remove(index);
        self.command_ended(cx, ask.id, errno);
    }

    /// One command less for the request.
    pub(super) fn command_ended(&mut self, cx: &mut Cx, id: RequestId, errno: i32) {
        let progress = &mut self.progress[id.0 as usize];
        progress.commands -= 1;
        if progress.errno == 0 {
            progress.errno = errno;
        }
        self.settle_request(cx, id);
    }

    /// Complete the request if nothing of it is left.
    fn settle_request(&mut self, cx: &mut Cx, id: RequestId) {
        let progress = &mut self.progress[id.0 as usize];
        if progress.commands > 0 || progress.waits {
            return;
        }
        if progress.flush == Flush::After && progress.errno == 0 {
            progress.flush = Flush::Due;
            progress.waits = true;
            return self.waiting.push_back(id);
        }
        let (mut errno, flush) = (progress.errno, progress.flush);
        match flush {
            _ if errno != 0 => {}
            Flush::Asked(_) if self.shared.flush_has_failed() => errno = libc::EIO,
            Flush::Asked(number) => self.shared.flushed(number),
            _ => self.note_write(cx, id),
        }
        self.complete_request(cx, id, errno);
    }

    /// What a flush must make durable.
    #[inline]
    fn note_write(&self, cx: &Cx, id: RequestId) {
        let writes = matches!(cx.slab[id].op, Op::Write | Op::Discard | Op::WriteZeroes);
        if writes && !self.is_durable(cx, id) && self.shared.export.has(export_flag::SEND_FLUSH) {
            self.shared.wrote(&self.mark);
        }
    }

    fn complete_request(&self, cx: &mut Cx, id: RequestId, errno: i32) {
        if errno != 0 {
            let request = &cx.slab[id];
            let (op, at, len) = (request.op, request.at, request.len);
            report(&self.shared.name(), op, at, len, errno);
        }
        cx.complete(id, errno);
    }

    /// The connection is gone, and nothing is in flight: what the server has
    /// been asked for fails. What it has not heard of waits on.
    pub(super) fn fail_asked(&mut self, cx: &mut Cx) {
        let mut lost = std::mem::take(&mut self.ended);
        lost.clear();
        lost.extend(self.line.table.indexes());
        for index in lost.drain(..) {
            let ask = self.line.table.remove(index);
            self.command_ended(cx, ask.id, libc::EIO);
        }
        self.ended = lost;
        let failed = |progress: &Progress| progress.errno != 0 || progress.asked > 0;
        self.fail_waiting(cx, |_, progress, _| failed(progress));
    }

    /// Requests that wait and that `fails` picks end with EIO.
    pub(super) fn fail_waiting(
        &mut self,
        cx: &mut Cx,
        fails: impl Fn(&Cx, &Progress, RequestId) -> bool,
    ) {
        for _ in 0..self.waiting.len() {
            let Some(id) = self.waiting.pop_front() else {
                break;
            };
            let progress = &mut self.progress[id.0 as usize];
            if progress.commands == 0 && fails(cx, progress, id) {
                progress.waits = false;
                self.complete_request(cx, id, libc::EIO);
            } else {
                self.waiting.push_back(id);
            }
        }
    }
}
