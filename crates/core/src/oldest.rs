//! What a worker says of its oldest request.

use fathom_trace::{Stage, TraceRecord};

/// A request that is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Oldest {
    /// As if it were answered now.
    pub record: TraceRecord,
    /// Where it is.
    pub stage: Stage,
}
