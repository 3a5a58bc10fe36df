//! What goes wrong with a file reaches the log, but does not fill it.

use fathom_core::Op;
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Errors of one kind are reported at most so often.
const INTERVAL: Duration = Duration::from_secs(10);

/// One kind of error, and what became of it.
struct Entry {
    op: Op,
    errno: i32,
    reported: Instant,
    suppressed: u64,
}

/// One line per operation and errno, then at most one per [`INTERVAL`].
#[derive(Default)]
pub(crate) struct ErrorLog {
    kinds: Mutex<Vec<Entry>>,
    /// Where the file was last said to end.
    told_end: Mutex<Option<u64>>,
}

impl ErrorLog {
    /// A request has failed; only on the way of failures.
    pub(crate) fn report(&self, path: &Path, op: Op, offset: u64, len: u64, errno: i32) {
        let Some(suppressed) = self.admit(op, errno, Instant::now()) else {
            return;
        };
        let error = io::Error::from_raw_os_error(errno);
        let more = match suppressed {
            0 => String::new(),
            n => format!(" ({n} more like this were not reported)"),
        };
        tracing::error!(
            "{}: {} of {len} bytes at offset {offset} failed: {error}{more}",
            path.display(),
            op.name(),
        );
    }

    /// A read has failed because the file ends at `end`, before the disk's
    /// `size` (both in bytes); said once for each end.
    pub(super) fn report_truncated(&self, path: &Path, end: u64, size: u64) {
        let mut told = self.told_end.lock().unwrap_or_else(|e| e.into_inner());
        if told.replace(end) != Some(end) {
            tracing::error!(
                "{}: was truncated while it was served: it ends at {end} bytes, the disk at \
                 {size}; reads past its end fail until the file is made whole again, or the \
                 disk smaller (fathom resize)",
                path.display(),
            );
        }
    }

    /// Whether to report now, and how many were not since the last report.
    fn admit(&self, op: Op, errno: i32, now: Instant) -> Option<u64> {
        let mut kinds = self.kinds.lock().unwrap_or_else(|e| e.into_inner());
        let known = kinds.iter_mut().find(|k| k.op == op && k.errno == errno);
        let Some(kind) = known else {
            kinds.push(Entry {
                op,
                errno,
                reported: now,
                suppressed: 0,
            });
            return Some(0);
        };
        if now.duration_since(kind.reported) < INTERVAL {
            kind.suppressed += 1;
            return None;
        }
        kind.reported = now;
        Some(std::mem::take(&mut kind.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_reported_once_and_then_rarely() {
        let log = ErrorLog::default();
        let start = Instant::now();
        assert_eq!(log.admit(Op::Read, libc::EIO, start), Some(0));
        assert_eq!(log.admit(Op::Write, libc::EIO, start), Some(0));
        assert_eq!(log.admit(Op::Write, libc::ENOSPC, start), Some(0));
        for _ in 0..3 {
            assert_eq!(log.admit(Op::Read, libc::EIO, start), None);
        }
        let later = start + INTERVAL;
        assert_eq!(log.admit(Op::Read, libc::EIO, later), Some(3));
        assert_eq!(log.admit(Op::Write, libc::EIO, later), Some(0));
    }
}
