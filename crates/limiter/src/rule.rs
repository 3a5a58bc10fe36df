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
    /// True if the finding explains the cell; otherwise it is only mentioned.
    pub holds: bool,
    pub subject: Option<String>,
    /// A line that contains numbers.
    pub text: String,
}

impl Finding {
    pub fn holds(text: String) -> Finding {
        Finding {
            holds: true,
            subject: None,
            text,
        }
    }

    /// Creates a suspicion that is not sufficient for a verdict.
    pub fn weak(text: String) -> Finding {
        Finding {
            holds: false,
            ..Finding::holds(text)
        }
    }

    pub fn about(mut self, subject: impl Into<String>) -> Finding {
        self.subject = Some(subject.into());
        self
    }
}
