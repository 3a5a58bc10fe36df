//! Where another image below would make a difference.

use fathom_core::extents::extents;
use fathom_core::{Op, Status};
use fathom_stack::{Answer, Ask, Client, Job, Pages};
use std::io;
use std::ops::Range;

/// Bytes that are compared at once: of what differs anywhere, so much becomes the image's own.
const BLOCK: u64 = 64 << 10;

/// So many bytes are asked about at once, and memory for the answer.
const ASKED: u64 = 1 << 30;
const ANSWER: usize = 4 << 10;

pub(super) struct Compare<'a> {
    pub(super) job: &'a Job,
    /// The disk as users see it.
    pub(super) ours: &'a Client,
    /// As the other image has it.
    pub(super) theirs: &'a Client,
}

impl Compare<'_> {
    /// Whether they differ from the start of `range` on, and where that ends. The error is for the user.
    pub(super) fn look(&self, range: Range<u64>) -> Result<(bool, u64), String> {
        let failed = |what: &'static str| move |error| format!("{what} cannot be read: {error}");
        let (is_zero, ours_end) = self
            .zero(self.ours, range.clone())
            .map_err(failed("the disk"))?;
        if is_zero {
            let (is_zero, end) = self
                .zero(self.theirs, range.start..ours_end)
                .map_err(failed("the other image"))?;
            if is_zero {
                return Ok((false, end));
            }
        }
        let end = range.end.min((range.start / BLOCK + 1) * BLOCK);
        let range = range.start..end;
        let ours = self
            .read(self.ours, range.clone())
            .map_err(failed("the disk"))?;
        let theirs = self
            .read(self.theirs, range.clone())
            .map_err(failed("the other image"))?;
        let len = (end - range.start) as usize;
        Ok((ours.bytes()[..len] != theirs.bytes()[..len], end))
    }

    /// Whether it is known to be zeroes there, and where that ends.
    fn zero(&self, disk: &Client, range: Range<u64>) -> io::Result<(bool, u64)> {
        let size = disk.info().size;
        if range.start >= size {
            return Ok((true, range.end));
        }
        let end = range.end.min(range.start + ASKED).min(size);
        let pages = Some(Pages::new(ANSWER)?);
        let ask = Ask::new(Op::BlockStatus, range.start, end - range.start, pages);
        let ask = self.answered(disk, ask)?;
        let pages = ask.pages.expect("it had some");
        let first = extents(pages.bytes()).next();
        let (Status { zero, .. }, len) = first.unwrap_or((Status::DATA, end - range.start));
        Ok((zero, range.start.saturating_add(len).min(end)))
    }

    /// Zeroes behind its end.
    fn read(&self, disk: &Client, range: Range<u64>) -> io::Result<Pages> {
        // (New pages are zeroes.)
        let mut pages = Pages::new(BLOCK as usize)?;
        let end = range.end.min(disk.info().size);
        if range.start < end {
            let ask = Ask::new(Op::Read, range.start, end - range.start, Some(pages));
            pages = self.answered(disk, ask)?.pages.expect("it had some");
        }
        Ok(pages)
    }

    fn answered(&self, disk: &Client, ask: Ask) -> io::Result<Ask> {
        let Answer { ask, errno, .. } = self.job.answer_to(disk, ask);
        match errno {
            0 => Ok(ask),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}
