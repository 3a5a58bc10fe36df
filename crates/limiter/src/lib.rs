//! Finds the suspected limiter of a cell from the [`Evidence`] around it, by rules that can be
//! examined one by one.
//!
//! ```text
//! Evidence ──► rules in rank order ──► the first that holds is the verdict
//!                                      the others, and weaker suspicions, are listed after it
//! ```
//!
//! Each rule is a file in `rules/`, and the list there explains the order. A rule uses measured
//! evidence only and does not hold where its evidence is missing. No later rule is the verdict only
//! because the evidence of an earlier one is missing: a rule holds by what was seen, and otherwise
//! the verdict is "unknown", which names what was not seen and lists the available evidence.
//!
//! Each rule states its formula with units. A share is never above 100 %. No verdict depends on the
//! unit of time: evidence with all times doubled has the same limiter. Evidence may be damaged or
//! forged: no value makes a rule panic, and its text is shown without control characters.

mod device_part;
mod figures;
pub mod layers;
mod rule;
mod rules;
mod slices;
#[cfg(test)]
mod tests;
mod unknown;
mod words;

use std::fmt;

use fathom_run::evidence::Evidence;
use serde::Serialize;

use rule::Strength;

pub use rules::{CPU_CAP, IO_CAP};
pub use words::{UNKNOWN, WORDS, Words, named, words_for};

/// The suspected limiter of a cell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// `None` if the limiter is unknown.
    pub limiter: Option<Limiter>,
    /// A line that contains the evidence in numbers.
    pub text: String,
    /// Other rules that hold, and weaker suspicions, one line each.
    pub also: Vec<String>,
}

/// The rule that holds, and its subject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Limiter {
    /// The rule's name, from [`names`].
    pub rule: &'static str,
    /// The thread, filter, lock, control group, device or layer, if the rule is about one.
    pub subject: Option<String>,
}

/// Judges a cell by its evidence only.
pub fn judge(evidence: &Evidence) -> Verdict {
    let mut limiter = None;
    let mut text = String::new();
    let mut also = Vec::new();
    let mut unseen = Vec::new();
    for rule in rules::RULES {
        let Some(finding) = (rule.find)(evidence) else {
            continue;
        };
        match finding.strength {
            Strength::Verdict if limiter.is_none() => {
                text = finding.text;
                limiter = Some(Limiter {
                    rule: rule.name,
                    subject: finding.subject,
                });
            }
            Strength::Verdict | Strength::Weak => also.push(finding.text),
            Strength::Unseen => unseen.push(finding.text),
        }
    }
    match limiter {
        Some(_) => also.extend(unseen.iter().map(|what| format!("not seen: {what}"))),
        None => text = unknown::text(evidence, &unseen),
    }
    Verdict {
        limiter,
        text,
        also,
    }
}

/// Returns the names of the rules in rank order.
pub fn names() -> Vec<&'static str> {
    let mut names: Vec<&str> = Vec::new();
    for rule in rules::RULES {
        if !names.contains(&rule.name) {
            names.push(rule.name);
        }
    }
    names
}

impl Verdict {
    /// Returns the name of the rule that holds.
    pub fn rule(&self) -> Option<&'static str> {
        self.limiter.as_ref().map(|limiter| limiter.rule)
    }

    /// Returns the name of the rule that holds and the evidence, in a line for display.
    pub fn line(&self) -> String {
        named(self.rule().unwrap_or(UNKNOWN), &self.text)
    }

    /// Returns the subject of the rule that holds.
    pub fn subject(&self) -> Option<&str> {
        self.limiter.as_ref()?.subject.as_deref()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
