//! Converts the trace ring's records to events.

use std::fs;

use fathom_run::{Event, Kind, flags};
use fathom_trace::ring::Entry;
use fathom_trace::{Op, Wire};

/// Returns the thread ids of a server's workers, by worker number. Unknown ids are 0.
pub(super) fn workers(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten();
    let mut workers = Vec::new();
    for task in tasks.flatten() {
        let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let number = name
            .trim()
            .strip_prefix("worker ")
            .and_then(|n| n.parse().ok());
        let tid = task.file_name().to_str().and_then(|tid| tid.parse().ok());
        if let (Some(number), Some(tid)) = (number.filter(|&n: &usize| n < 4096), tid) {
            if workers.len() <= number {
                workers.resize(number + 1, 0);
            }
            workers[number] = tid;
        }
    }
    workers
}

pub(super) fn event(entry: &Entry, workers: &[u32]) -> Event {
    let record = &entry.record;
    let polled = if record.polled { flags::POLLED } else { 0 };
    let (wire, cookie) = match record.wire {
        Wire::None => (0, 0),
        Wire::Came(cookie) => (flags::CAME, cookie),
        Wire::Went(cookie) => (flags::WENT, cookie),
        Wire::Several => (flags::SEVERAL, 0),
    };
    let errno = u16::try_from(record.error).unwrap_or(u16::MAX);
    let [start, stages @ ..] = record.stamps;
    let mut args = [0; 10];
    args[..stages.len()].copy_from_slice(&stages);
    args[6] = record.offset;
    args[7] = record.len;
    args[8] = Event::pack_fathom_rest(record.queue, bits(record.op) | polled | wire, errno);
    args[9] = cookie;
    let tid = workers.get(entry.ring as usize).copied().unwrap_or(0);
    Event::new(start, Kind::FathomRequest, 0, tid, &args)
}

/// Returns the flags of an operation. Writing zeroes is a write and a discard. An operation that
/// moves no data is a flush.
fn bits(op: Op) -> u64 {
    match op {
        Op::Read => 0,
        Op::Write => flags::WRITE,
        Op::Flush | Op::BlockStatus => flags::FLUSH,
        Op::Discard => flags::DISCARD,
        Op::WriteZeroes => flags::WRITE | flags::DISCARD,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_trace::TraceRecord;

    #[test]
    fn a_record_becomes_the_event_that_the_kind_describes() {
        let record = TraceRecord {
            stamps: [10, 11, 12, 13, 14, 15, 16],
            offset: 4096,
            len: 512,
            queue: 3,
            op: Op::Write,
            error: 28,
            polled: true,
            wire: Wire::Went(77),
        };
        let event = event(&Entry { ring: 1, record }, &[70, 71]);
        assert_eq!(
            (event.time, event.tid, event.kind),
            (10, 71, Kind::FathomRequest)
        );
        assert_eq!(event.args[..8], [11, 12, 13, 14, 15, 16, 4096, 512]);
        let flags = flags::WRITE | flags::POLLED | flags::WENT;
        assert_eq!(event.fathom_rest(), (3, flags, 28));
        assert_eq!(event.args[9], 77);
    }
}
