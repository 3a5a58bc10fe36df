//! Derives changes of a disk in use from evidence, and judges trials of these changes.
//!
//! ```text
//! Evidence ──► rules in rank order ──► at most three changes, or the reason why nothing helps
//! rounds without and with a change ──► effects with intervals ──► better, worse, or neither
//! ```
//!
//! Only options that can change while guests and clients use the disk are offered. No change
//! weakens durability: the cache mode is never changed. The crate does no input and output.

mod advice;
mod change;
mod effect;
mod evidence;
mod rules;
mod silence;
#[cfg(test)]
mod tests;
mod trial;

pub use advice::Advice;
pub use change::Change;
pub use effect::{Effect, effect};
pub use evidence::{
    Engine, Evidence, Filter, Host, OwnThreads, Polling, Pool, SharedThreads, Storage, Tables,
    Threads, Verdict,
};
pub use trial::{Judgement, Measure, Pair, Round, effects, judge, worse};

use rules::RULES;

/// Maximum number of changes that are offered.
pub const MOST: usize = 3;

/// The result for a disk: changes, or the reason why no change helps.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// From one to [`MOST`] changes, the most promising first.
    Changes(Vec<Advice>),
    /// No change of the disk will help, for this reason: one sentence without a full stop.
    Nothing(String),
}

/// Returns the changes that the evidence supports.
pub fn advise(evidence: &Evidence) -> Outcome {
    let mut all: Vec<Advice> = RULES.iter().flat_map(|rule| rule(evidence)).collect();
    all.truncate(MOST);
    match all.is_empty() {
        true => Outcome::Nothing(silence::reason(evidence)),
        false => Outcome::Changes(all),
    }
}
