//!
//! The ground floor: every other crate may use it, it uses none of them.
//!
//! Built with `--cfg fathom_unstamped`, nothing is stamped or counted: only
//! for measuring what stamps cost (tools/bench/stamps.py).

pub mod clock;
pub mod histogram;
pub mod recorder;
pub mod ring;
mod slow;
mod slow_request;
pub mod stage;
pub mod summary;

pub use clock::Clock;
pub use histogram::{BUCKETS, Histogram, Occupied, middle_of, quantile, range_of};
pub use recorder::{HistogramsState, Recorder, StageHistograms};
pub use ring::{RingFile, RingReader, RingWriter, TraceError, TraceRecord, Wire};
pub use slow_request::{Now, SlowRequest};
pub use stage::{Op, Stage, Stamps};
pub use summary::{Bucket, Merged, OpSummary, StageSummary, Summary};
