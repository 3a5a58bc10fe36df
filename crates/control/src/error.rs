//! Errors of requests.

use fathom_units::nearest;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Why a request was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestError {
    /// Kind of the failure, from which the API derives the HTTP status.
    pub kind: ErrorKind,
    /// Message for the user, in one line, that says how to proceed.
    pub text: String,
}

/// Kind of a [`RequestError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ErrorKind {
    /// The request cannot be understood, or contradicts itself.
    Invalid,
    /// The object does not exist.
    Unknown,
    /// The object's state does not allow the request.
    ///
    /// The object exists already, is in use, or is being changed.
    Conflict,
    /// The operation was tried and failed.
    Failed,
    /// The operation takes longer than its timeout, and continues.
    Late,
    /// The object is not as the request expects it (If-Match).
    Changed,
    /// The object exists already, which the request rules out (If-None-Match).
    Exists,
}

impl ErrorKind {
    /// Returns an error of this kind.
    pub fn because(self, text: impl Into<String>) -> RequestError {
        let text = text.into();
        RequestError { kind: self, text }
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Maximum number of names in the message about an unknown name.
const MAX_NAMES: usize = 5;

/// Returns the error for a disk that does not exist. `names` are all disks.
pub fn unknown_disk(name: &str, names: &[String]) -> RequestError {
    unknown("disk", name, names)
}

/// Returns the error for an object that does not exist. `names` are all objects of the kind.
pub fn unknown(what: &str, name: &str, names: &[String]) -> RequestError {
    let near = nearest(name, names.iter().map(String::as_str));
    let hint = near.map_or(String::new(), |near| format!("; did you mean '{near}'?"));
    let shown = &names[..names.len().min(MAX_NAMES)];
    let list = shown.join(", ");
    let them = match near {
        Some(_) => format!(" {what}s are"),
        None => format!("; {what}s are"),
    };
    ErrorKind::Unknown.because(match (shown, names.len() - shown.len()) {
        ([], _) => format!("no {what} '{name}': the server has none"),
        (_, 0) => format!("no {what} '{name}'{hint}{them} {list}"),
        (_, more) => format!("no {what} '{name}'{hint}{them} {list} and {more} others"),
    })
}

/// Returns the error while another request adds or removes the disk.
pub fn changing_disk(name: &str, is_added: bool) -> RequestError {
    let what = if is_added { "added" } else { "removed" };
    ErrorKind::Conflict.because(format!(
        "disk '{name}': being {what} by another request; retry when that request has completed"
    ))
}
