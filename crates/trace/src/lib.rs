//! Operations, stages, timestamps, histograms, slow requests and the trace ring.
//!
//! All crates of the data plane may use this crate, which itself uses only `fathom-sigbus`
//! and `fathom-units`.
//!
//! With `--cfg fathom_unstamped`, nothing is stamped or counted. The option is only for measuring
//! the cost of stamps (tools/bench/stamps.py).

pub mod clock;
pub mod histogram;
pub mod recorder;
pub mod ring;
mod slow;
mod slow_request;
pub mod stage;
pub mod summary;

pub use clock::Clock;
pub use histogram::{BUCKETS, Histogram, Occupied, is_known, middle_of, quantile, range_of};
pub use recorder::{HistogramsState, Recorder, StageHistograms};
pub use ring::{RingFile, RingReader, RingWriter, TraceError, TraceRecord, Wire};
pub use slow_request::{Now, SlowRequest};
pub use stage::{Op, Stage, Stamps};
pub use summary::{Bucket, Merged, OpSummary, StageSummary, Summary};
