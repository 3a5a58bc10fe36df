//! A change that is offered.

use crate::change::Change;

/// A change that may help, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The change.
    pub change: Change,
    /// The evidence for the change, in one sentence without a full stop.
    pub why: String,
}
