//! What a rule is.

use fathom_run::evidence::Evidence;

/// A rule: looks at the evidence for one thing.
pub struct Rule {
    /// In kebab case. Two rules that see more and less of the same have one name.
    pub name: &'static str,
    pub find: Find,
}

pub type Find = fn(&Evidence) -> Option<Finding>;

/// What a rule has found.
pub struct Finding {
    /// Whether it explains the cell. Else it is only worth a line.
    pub holds: bool,
    pub subject: Option<String>,
    /// One line, with numbers.
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

    /// A suspicion that is no verdict.
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
