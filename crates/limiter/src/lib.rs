//! What held a cell back: from what was seen around its work ([`Evidence`]) to the suspected
//! limiter, by rules that can be argued with.
//!
//! ```text
//! Evidence ──► rules in rank order ──► the first that holds is the verdict
//!                                      the others, and weaker suspects, stand behind it
//! ```
//!
//! A rule is one file in `rules/`, and the list there says why it stands where it stands. A rule
//! uses only what was seen: where its evidence is missing it does not hold. So "unknown" is an
//! answer, and comes with what was seen. Evidence may be damaged or made up: no value of it makes
//! a rule fail, and text of it is shown without control characters.

mod figures;
mod rule;
mod rules;
#[cfg(test)]
mod tests;
mod unknown;

use std::fmt;

use fathom_run::evidence::Evidence;
use serde::Serialize;

pub use rules::CPU_CAP;

/// What is suspected to have limited a cell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// `None`: unknown.
    pub limiter: Option<Limiter>,
    /// One line, with the evidence in numbers.
    pub text: String,
    /// Other rules that hold, and weaker suspects: a line each.
    pub also: Vec<String>,
}

/// The rule that holds, and for whom.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Limiter {
    /// One of [`names`].
    pub rule: &'static str,
    /// The thread, filter, lock, control group, device or layer, where it is about one.
    pub subject: Option<String>,
}

/// Judges a cell by its evidence, and by nothing else.
pub fn judge(evidence: &Evidence) -> Verdict {
    let mut limiter = None;
    let mut text = String::new();
    let mut also = Vec::new();
    for rule in rules::RULES {
        let Some(finding) = (rule.find)(evidence) else {
            continue;
        };
        if finding.holds && limiter.is_none() {
            text = finding.text;
            limiter = Some(Limiter {
                rule: rule.name,
                subject: finding.subject,
            });
        } else {
            also.push(finding.text);
        }
    }
    if limiter.is_none() {
        text = unknown::seen(evidence);
    }
    Verdict {
        limiter,
        text,
        also,
    }
}

/// The rules' names, in rank order.
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
    /// The name of the rule that holds.
    pub fn rule(&self) -> Option<&'static str> {
        self.limiter.as_ref().map(|limiter| limiter.rule)
    }

    /// For whom it holds.
    pub fn subject(&self) -> Option<&str> {
        self.limiter.as_ref()?.subject.as_deref()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
