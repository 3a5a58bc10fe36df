//! Sends kept writes again, on a blocking transport.

use super::answers::Answers;
use super::unflushed::Kept;
use fathom_core::Op;
use fathom_nbd::client::Export;
use fathom_nbd::protocol::{Replies, RequestHeader, command, command_flag};
use fathom_nbd::transport::Transport;
use fathom_units::cause;
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// Maximum number of commands in flight, and the bytes of data after which no more are added. The
/// replies to that number of commands fit into any socket's buffer, so that client and server never
/// block each other.
const WINDOW: usize = 64;
const WINDOW_BYTES: u64 = 4 << 20;

/// Replays writes to an export.
pub(super) struct Replay<'a> {
    transport: &'a mut Transport,
    export: &'a Export,
    /// Timeout for one window, after which the server counts as failed.
    patience: Duration,
    /// Returns false when the replay must stop.
    goes_on: &'a dyn Fn() -> bool,
    out: Vec<u8>,
    /// Ranges of the commands that the server has not answered.
    window: Vec<(u64, u64)>,
    bytes: u64,
    /// Cookie of the first command in the window.
    cookie: u64,
}

impl<'a> Replay<'a> {
    pub(super) fn new(
        transport: &'a mut Transport,
        export: &'a Export,
        patience: Duration,
        goes_on: &'a dyn Fn() -> bool,
    ) -> Replay<'a> {
        Replay {
            transport,
            export,
            patience,
            goes_on,
            out: Vec::new(),
            window: Vec::with_capacity(WINDOW),
            bytes: 0,
            cookie: 0,
        }
    }

    /// Sends these writes in this order, and then a flush. All are done when this function returns.
    pub(super) fn run<'k>(
        &mut self,
        writes: impl IntoIterator<Item = Kept<'k>>,
    ) -> Result<(), String> {
        for write in writes {
            self.write(write).map_err(told)?;
        }
        self.finish().map_err(told)?;
        self.put(command::FLUSH, 0, 0, 0, &[]);
        self.window.push((0, 0));
        self.finish().map_err(told)
    }

    fn write(&mut self, write: Kept<'_>) -> io::Result<()> {
        let payload = self.export.maximum_payload().into();
        let (command, flags, longest) = match write.op {
            Op::Write => (command::WRITE, 0, payload),
            Op::WriteZeroes if write.unmap => (command::WRITE_ZEROES, 0, payload),
            Op::WriteZeroes => (command::WRITE_ZEROES, command_flag::NO_HOLE, payload),
            Op::Discard => (command::TRIM, 0, super::requests::MAX_TRIM),
            Op::Read | Op::Flush | Op::BlockStatus => return Ok(()),
        };
        let mut done = 0;
        while done < write.len {
            let len = (write.len - done).min(longest);
            let (at, end) = (write.at + done, write.at + done + len);
            let overlaps = self
                .window
                .iter()
                .any(|other| at < other.1 && other.0 < end);
            // A server may execute concurrent commands in any order.
            if overlaps || self.window.len() == WINDOW || self.bytes >= WINDOW_BYTES {
                self.finish()?;
            }
            let data = match write.op {
                Op::Write => &write.data[done as usize..(done + len) as usize],
                _ => &[],
            };
            self.put(command, flags, at, len, data);
            self.window.push((at, end));
            self.bytes += data.len() as u64;
            done += len;
        }
        Ok(())
    }

    fn put(&mut self, command: u16, mut flags: u16, offset: u64, len: u64, data: &[u8]) {
        if self.export.replies == Replies::Extended && command == command::WRITE {
            flags |= command_flag::PAYLOAD_LEN;
        }
        let header = RequestHeader {
            flags,
            command,
            cookie: self.cookie + self.window.len() as u64,
            offset,
            len,
        };
        header.put(self.export.replies, &mut self.out);
        self.out.extend_from_slice(data);
    }

    /// Sends the window, and waits until the server has executed all of it.
    fn finish(&mut self) -> io::Result<()> {
        if !(self.goes_on)() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        self.transport.set_deadline(Instant::now() + self.patience);
        self.transport.write_all(&self.out)?;
        self.out.clear();
        let mut left: Vec<bool> = vec![true; self.window.len()];
        while left.contains(&true) {
            let done = Answers::new(self.transport, self.export.replies).done()?;
            let index = done.wrapping_sub(self.cookie);
            let awaited = usize::try_from(index).ok().and_then(|n| left.get_mut(n));
            match awaited.filter(|awaited| **awaited) {
                Some(awaited) => *awaited = false,
                None => return Err(io::Error::other("replied to another request")),
            }
        }
        self.cookie += self.window.len() as u64;
        self.window.clear();
        self.bytes = 0;
        Ok(())
    }
}

fn told(error: io::Error) -> String {
    match error.kind() {
        io::ErrorKind::TimedOut => "the server no longer responds".into(),
        io::ErrorKind::Interrupted => "the disk is no longer in use".into(),
        io::ErrorKind::UnexpectedEof => "the server closed the connection".into(),
        _ => format!(
            "cannot repeat the writes that were not flushed: {}",
            cause(error)
        ),
    }
}
