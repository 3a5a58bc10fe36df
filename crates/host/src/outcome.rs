//! The report on a disk at the end of a server.

use fathom_stack::Injected;
use fathom_trace::Summary;
use serde::Serialize;

/// Statistics of a disk at the end of the server.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Times and counters of the disk's requests.
    #[serde(flatten)]
    pub summary: Summary,
    /// Delays that `--inject` has added.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub injected: Option<Injected>,
}
