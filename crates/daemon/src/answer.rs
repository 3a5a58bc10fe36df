//! What comes of a command.

use fathom_units::nearest;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;

/// An object in JSON, or why there is none.
pub type Answer = Result<Value, Refusal>;

/// Why a command was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    pub kind: Kind,
    /// One line for the user, which says what to do.
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// It cannot be understood, or contradicts itself.
    Invalid,
    /// There is no such object.
    Unknown,
    /// The object is not in a state for that: it is there already, in use, or about to come or go.
    Conflict,
    /// It was tried, and did not succeed.
    Failed,
    /// It takes longer than it should, and goes on.
    Late,
    /// The object is not as the request expects it (If-Match).
    Changed,
    /// The object exists already, which the request rules out (If-None-Match).
    Exists,
}

impl Kind {
    /// For programs.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Invalid => "invalid",
            Kind::Unknown => "unknown",
            Kind::Conflict => "conflict",
            Kind::Failed => "failed",
            Kind::Late => "late",
            Kind::Changed => "changed",
            Kind::Exists => "exists",
        }
    }

    pub fn because(self, text: impl Into<String>) -> Refusal {
        let text = text.into();
        Refusal { kind: self, text }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Takes the answer to who wants it.
pub type Asker = Box<dyn FnOnce(Answer) + Send>;

/// Number of names that a message about an unknown one lists.
const MAX_NAMED: usize = 5;

/// There is no disk of that name, only of these.
pub fn unknown_disk(name: &str, names: &[String]) -> Refusal {
    unknown("disk", name, names)
}

/// There is no such thing of that name, only of these.
pub fn unknown(what: &str, name: &str, names: &[String]) -> Refusal {
    let near = nearest(name, names.iter().map(String::as_str));
    let hint = near.map_or(String::new(), |near| format!("; did you mean '{near}'?"));
    let told = &names[..names.len().min(MAX_NAMED)];
    let list = told.join(", ");
    let them = match near {
        Some(_) => format!(" {what}s are"),
        None => format!("; {what}s are"),
    };
    Kind::Unknown.because(match (told, names.len() - told.len()) {
        ([], _) => format!("no {what} '{name}': the server has none"),
        (_, 0) => format!("no {what} '{name}'{hint}{them} {list}"),
        (_, more) => format!("no {what} '{name}'{hint}{them} {list} and {more} others"),
    })
}

/// There is nothing to be done with that disk now: it comes, or goes.
pub fn changing_disk(name: &str, is_coming: bool) -> Refusal {
    let what = if is_coming { "added" } else { "removed" };
    Kind::Conflict.because(format!(
        "disk '{name}': being {what} by another request; retry when that request has completed"
    ))
}
