//! Finds where a different backing image would change the disk.

use fathom_core::extents::extents;
use fathom_core::{AlignedBuffer, Op, Status};
use fathom_stack::{Client, DiskReply, DiskRequest, Job};
use fathom_units::cause;
use std::io;
use std::ops::Range;

/// Bytes per comparison, and so the unit in which differing data is copied into the image.
const BLOCK: u64 = 64 << 10;

/// Maximum bytes per block status query, and size in bytes of its reply buffer.
const ASKED: u64 = 1 << 30;
const ANSWER: usize = 4 << 10;

pub(super) struct Compare<'a> {
    pub(super) job: &'a Job,
    /// The disk as users see it.
    pub(super) ours: Side<'a>,
    /// The disk with the other backing image.
    pub(super) theirs: Side<'a>,
}

impl Compare<'_> {
    /// Returns whether both sides differ from the start of `range` on, and where that ends.
    ///
    /// Returns `None` as soon as `stop` returns true. The error is a message for the user.
    pub(super) fn look(
        &self,
        range: Range<u64>,
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<(bool, u64)>, String> {
        match self.try_look(range, stop) {
            Ok(found) => Ok(Some(found)),
            Err(Halt::Stopped) => Ok(None),
            Err(Halt::Problem(what, error)) => Err(format!("cannot read {what}: {}", cause(error))),
        }
    }

    fn try_look(&self, range: Range<u64>, stop: &dyn Fn() -> bool) -> Result<(bool, u64), Halt> {
        let (is_zero, ours_end) = self.zero(&self.ours, range.clone(), stop)?;
        if is_zero {
            let (is_zero, end) = self.zero(&self.theirs, range.start..ours_end, stop)?;
            if is_zero {
                return Ok((false, end));
            }
        }
        let end = range.end.min((range.start / BLOCK + 1) * BLOCK);
        let range = range.start..end;
        let ours = self.read(&self.ours, range.clone(), stop)?;
        let theirs = self.read(&self.theirs, range.clone(), stop)?;
        let len = (end - range.start) as usize;
        Ok((ours.bytes()[..len] != theirs.bytes()[..len], end))
    }

    /// Returns whether one side is known to be zero from the start of `range`, and where that ends.
    fn zero(
        &self,
        side: &Side<'_>,
        range: Range<u64>,
        stop: &dyn Fn() -> bool,
    ) -> Result<(bool, u64), Halt> {
        let size = side.disk.info().size;
        if range.start >= size {
            return Ok((true, range.end));
        }
        let end = range.end.min(range.start + ASKED).min(size);
        let pages = Some(AlignedBuffer::try_new(ANSWER).map_err(|error| side.failed(error))?);
        let ask = DiskRequest::new(Op::BlockStatus, range.start, end - range.start, pages);
        let pages = self.answered(side, ask, stop)?;
        let first = extents(pages.bytes()).next();
        let (Status { zero, .. }, len) = first.unwrap_or((Status::DATA, end - range.start));
        Ok((zero, range.start.saturating_add(len).min(end)))
    }

    /// Reads a range of one side. Data beyond the end of the side is zero.
    fn read(
        &self,
        side: &Side<'_>,
        range: Range<u64>,
        stop: &dyn Fn() -> bool,
    ) -> Result<AlignedBuffer, Halt> {
        // New pages are zeroed.
        let pages = AlignedBuffer::try_new(BLOCK as usize).map_err(|error| side.failed(error))?;
        let end = range.end.min(side.disk.info().size);
        if range.start >= end {
            return Ok(pages);
        }
        let ask = DiskRequest::new(Op::Read, range.start, end - range.start, Some(pages));
        self.answered(side, ask, stop)
    }

    fn answered(
        &self,
        side: &Side<'_>,
        ask: DiskRequest,
        stop: &dyn Fn() -> bool,
    ) -> Result<AlignedBuffer, Halt> {
        let answer = self.job.answer_unless(side.disk, ask, stop);
        match answer.ok_or(Halt::Stopped)? {
            DiskReply { ask, errno: 0, .. } => Ok(ask.pages.expect("it had some")),
            DiskReply { errno, .. } => Err(side.failed(io::Error::from_raw_os_error(errno))),
        }
    }
}

/// A side of a comparison, and its name in messages.
pub(super) struct Side<'a> {
    pub(super) disk: &'a Client,
    pub(super) name: &'static str,
}

impl Side<'_> {
    fn failed(&self, error: io::Error) -> Halt {
        Halt::Problem(self.name, error)
    }
}

/// Why a comparison has no result.
enum Halt {
    Stopped,
    Problem(&'static str, io::Error),
}
