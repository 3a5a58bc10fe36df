//! Reports the parts of the sandbox that are in force, and those that are missing.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A part of the sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Name of the part, such as `network` or `capabilities`.
    pub name: String,
    /// Whether the part is in force; otherwise the part is missing.
    pub in_force: bool,
    /// Effect of the part, or why it is missing; a text for the user.
    pub why: String,
}

/// All parts of the sandbox, in the order in which they were set up.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// `off`, `log` or `on`.
    pub mode: String,
    /// Parts that are in force or missing.
    pub parts: Vec<Part>,
}

impl Report {
    pub(crate) fn new(mode: crate::Mode) -> Report {
        Report {
            mode: mode.name().into(),
            parts: Vec::new(),
        }
    }

    pub(crate) fn in_force(&mut self, name: &str, what: impl Into<String>) {
        self.add(name, true, what.into());
    }

    pub(crate) fn missing(&mut self, name: &str, why: impl fmt::Display) {
        self.add(name, false, why.to_string());
    }

    /// Adds a part: in force with the effect `what`, or missing because of the error.
    pub(crate) fn add_outcome<E: fmt::Display>(
        &mut self,
        name: &str,
        what: &str,
        outcome: Result<(), E>,
    ) {
        match outcome {
            Ok(()) => self.in_force(name, what),
            Err(error) => self.missing(name, error),
        }
    }

    fn add(&mut self, name: &str, in_force: bool, why: String) {
        self.parts.push(Part {
            name: name.into(),
            in_force,
            why,
        });
    }

    /// Returns whether a part of this name is in force.
    pub fn has(&self, name: &str) -> bool {
        self.parts.iter().any(|p| p.name == name && p.in_force)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.mode)?;
        for part in &self.parts {
            let not = if part.in_force { "" } else { "NOT " };
            write!(f, "\n  {}{}: {}", not, part.name, part.why)?;
        }
        Ok(())
    }
}
