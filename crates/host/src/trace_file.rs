//! Files for traces.

use fathom_trace::{TraceError, ring::RingFile};
use std::fs::File;
use std::path::Path;

/// Number of records in each worker's ring: 3 MiB.
const TRACE_RECORDS: usize = 1 << 15;

/// Creates a file for the traces of a disk with `workers` workers.
pub fn prepare_trace(path: &Path, disk: &str, workers: usize) -> Result<File, TraceError> {
    RingFile::prepare(path, disk, workers, TRACE_RECORDS)
}
