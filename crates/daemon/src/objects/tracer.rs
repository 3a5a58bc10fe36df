//! A trace that is being written.

use fathom_core::WorkerHandle;
use fathom_files::gate::{self, Wanted};
use fathom_trace::{TraceError, ring::RingFile};
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Records in each worker's trace ring: 3 MiB.
const TRACE_RECORDS: usize = 1 << 15;
/// How often a trace gets the better value of the clock's frequency.
pub const CALIBRATE_EVERY: Duration = Duration::from_secs(10);

/// A new file for the traces of so many workers.
pub fn prepare_trace(path: &Path, disk: &str, workers: usize) -> Result<File, TraceError> {
    RingFile::prepare(path, disk, workers, TRACE_RECORDS)
}

fn prepare(path: &Path, disk: &str, workers: usize) -> Result<File, TraceError> {
    let Some(gate) = gate::other() else {
        return prepare_trace(path, disk, workers);
    };
    let wanted = Wanted::Trace {
        path: path.to_owned(),
        disk: disk.to_owned(),
        rings: workers,
    };
    let got = gate.get(&wanted, None);
    let got = got.map_err(|no| TraceError::Unusable {
        path: path.to_owned(),
        problem: no.text,
    });
    got.map(|got| got.file.into())
}

/// One disk's.
pub struct Tracer {
    path: PathBuf,
    file: RingFile,
    calibrated: Instant,
}

impl Tracer {
    /// Trace what `workers` do from when they have looked next.
    pub fn start(path: &Path, disk: &str, workers: &[WorkerHandle]) -> Result<Tracer, TraceError> {
        let mut file = RingFile::of(path, prepare(path, disk, workers.len())?)?;
        for (ring, worker) in workers.iter().enumerate() {
            worker.trace(Some(file.writer(ring)));
        }
        Ok(Tracer {
            path: path.to_owned(),
            file,
            calibrated: Instant::now(),
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Readable when another process has truncated the file.
    pub fn cut_event(&self) -> BorrowedFd<'_> {
        self.file.cut_event()
    }

    pub fn calibrate(&mut self) {
        if self.calibrated.elapsed() >= CALIBRATE_EVERY {
            self.file.calibrate();
            self.calibrated = Instant::now();
        }
    }
}
