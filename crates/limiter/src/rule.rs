//! The type of a rule.

use fathom_run::evidence::Evidence;

/// A rule: examines the evidence for one kind of limit.
pub struct Rule {
    /// Name in kebab case. Rules for a stronger and a weaker form of the same limit share a name.
    pub name: &'static str,
    pub find: Find,
}

pub type Find = fn(&Evidence) -> Option<Finding>;

/// Result of a rule.
pub struct Finding {
    pub strength: Strength,
    pub subject: Option<String>,
    /// A line that contains numbers.
    pub text: String,
}

/// Weight of a finding for the verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strength {
    /// The finding explains the cell.
    Verdict,
    /// The finding is only mentioned.
    Weak,
    /// The rule might hold, but its evidence is missing: the text names the missing evidence. If no
    /// other rule holds, the limiter is unknown.
    Unseen,
}

impl Finding {
    pub fn verdict(text: String) -> Finding {
        Finding {
            strength: Strength::Verdict,
            subject: None,
            text,
        }
    }

    /// Creates a suspicion that is not sufficient for a verdict.
    pub fn weak(text: String) -> Finding {
        Finding {
            strength: Strength::Weak,
            ..Finding::verdict(text)
        }
    }

    /// Creates a finding about missing evidence: `text` completes the words "not seen:".
    pub fn unseen(text: String) -> Finding {
        Finding {
            strength: Strength::Unseen,
            ..Finding::verdict(text)
        }
    }

    pub fn about(mut self, subject: impl Into<String>) -> Finding {
        self.subject = Some(subject.into());
        self
    }

    /// Returns true if the finding explains the cell.
    pub fn holds(&self) -> bool {
        self.strength == Strength::Verdict
    }
}
