//! Finds the initial data of a mirror: ranges where both disks may differ.

use crate::copy::Copy;
use fathom_core::extents::extents;
use fathom_core::{AlignedBuffer, Changes, Op};
use fathom_stack::{Client, DiskReply, DiskRequest, Job};
use fathom_units::cause;
use std::io;
use std::ops::Range;

/// Maximum bytes per block status query, and size in bytes of its reply buffer.
const ASKED: u64 = 1 << 30;
const ANSWER: usize = 64 << 10;

/// Marks the initial data in `todo`. Returns false if the copy was stopped before all was found.
///
/// If the target holds any data, the whole disk is marked; otherwise only the data of the source.
/// Changes to the source during this call are recorded separately.
pub(super) fn mark(copy: &Copy<'_>, todo: &Changes) -> Result<bool, String> {
    let mut is_empty = true;
    let looked = each_data(copy.job, copy.target, &mut |_| {
        is_empty = false;
        false
    });
    looked.map_err(|error| format!("cannot read the target: {}", cause(error)))?;
    if !is_empty {
        todo.mark(0, todo.size());
        return Ok(true);
    }
    let mut is_complete = true;
    let looked = each_data(copy.job, copy.source, &mut |data| {
        todo.mark(data.start, data.end - data.start);
        is_complete = !(copy.stops)();
        is_complete
    });
    looked.map_err(|error| format!("cannot read the disk: {}", cause(error)))?;
    Ok(is_complete)
}

/// Calls `tell` for each range that may hold data, in order, until `tell` returns false.
fn each_data(job: &Job, disk: &Client, tell: &mut dyn FnMut(Range<u64>) -> bool) -> io::Result<()> {
    let size = disk.info().size;
    let mut at = 0;
    while at < size {
        let asked = ASKED.min(size - at);
        let ask = DiskRequest::new(
            Op::BlockStatus,
            at,
            asked,
            Some(AlignedBuffer::try_new(ANSWER)?),
        );
        let DiskReply { ask, errno, .. } = job.answer_to(disk, ask);
        if errno != 0 {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let pages = ask.pages.expect("it had some");
        let begin = at;
        for (status, len) in extents(pages.bytes()) {
            let part = at..at.saturating_add(len).min(size);
            at = part.end;
            if !status.zero && !part.is_empty() && !tell(part) {
                return Ok(());
            }
        }
        if at == begin {
            return Err(io::Error::other(
                "the image does not report where it has data",
            ));
        }
    }
    Ok(())
}
