//! A trace that is being written.

use fathom_core::{PartState, WorkerHandle};
use fathom_files::gate::{self, Wanted};
use fathom_host::prepare_trace;
use fathom_trace::{TraceError, ring::RingFile};
use serde_json::json;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Interval at which the measured frequency of the clock is written to a trace again. The
/// measurement improves with time.
pub const CALIBRATE_EVERY: Duration = Duration::from_secs(10);

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

/// The trace of one disk.
pub struct Tracer {
    path: PathBuf,
    file: RingFile,
    /// Time of the last calibration. None: the file may still belong to a predecessor.
    calibrated: Option<Instant>,
    /// Whether no worker writes to the file yet.
    is_new: bool,
}

impl Tracer {
    /// Creates the file at `path`, and begins to trace `workers`. See [`Tracer::begin`].
    pub fn start(path: &Path, disk: &str, workers: &[WorkerHandle]) -> Result<Tracer, TraceError> {
        let file = RingFile::of(path, prepare(path, disk, workers.len())?)?;
        let mut tracer = Tracer {
            path: path.to_owned(),
            file,
            calibrated: Some(Instant::now()),
            is_new: true,
        };
        tracer.begin(workers);
        Ok(tracer)
    }

    /// Opens the file that a predecessor shares, for this number of workers. The workers are traced
    /// from [`Tracer::begin`] on.
    pub fn resume(mut early_state: PartState, workers: usize) -> Result<Tracer, String> {
        let path = PathBuf::from(early_state.values["path"].as_str().unwrap_or_default());
        let file = RingFile::resumed(&path, early_state.take_file()?.into());
        let file = file.map_err(|error| error.to_string())?;
        match file.rings() >= workers {
            true => Ok(Tracer {
                path,
                file,
                calibrated: None,
                is_new: true,
            }),
            false => Err(format!(
                "{}: the trace has room for {} workers, and the disk would have {workers}; stop \
                 the trace first ('fathom trace --off')",
                path.display(),
                file.rings()
            )),
        }
    }

    /// Returns the trace's file and path for a successor.
    pub fn early_state(&self) -> io::Result<PartState> {
        Ok(PartState {
            values: json!({ "path": self.path }),
            files: vec![self.file.file().try_clone_to_owned()?],
            is_needed: false,
        })
    }

    /// Begins to trace `workers`, unless they are traced already. A predecessor's workers must have
    /// stopped.
    ///
    /// Requests are in the trace for certain once the workers have looked ([`WorkerHandle::look`]).
    pub fn begin(&mut self, workers: &[WorkerHandle]) {
        if std::mem::take(&mut self.is_new) {
            for (ring, worker) in workers.iter().enumerate() {
                worker.trace(Some(self.file.writer(ring)));
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a file descriptor that is readable after another process has truncated the file.
    pub fn cut_event(&self) -> BorrowedFd<'_> {
        self.file.cut_event()
    }

    pub fn calibrate(&mut self) {
        if self.calibrated.is_none() {
            self.file.own();
        }
        if self
            .calibrated
            .is_none_or(|before| before.elapsed() >= CALIBRATE_EVERY)
        {
            self.file.calibrate();
            self.calibrated = Some(Instant::now());
        }
    }
}
