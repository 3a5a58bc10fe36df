//! Conditions of requests about disks (RFC 9110, section 13), evaluated by the host of the disks.

use crate::error::{ErrorKind, RequestError};
use fathom_spec::DiskSpec;
use serde::{Deserialize, Serialize};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Matches every disk that exists.
const ANY: &str = "*";

/// Versions that a disk must have, or must not have, for a request to be carried out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Condition {
    /// `If-Match`: the disk must have one of these versions. Empty: no such condition.
    pub wanted: Vec<String>,
    /// `If-None-Match`: the disk must have none of these versions. Empty: no such condition.
    pub unwanted: Vec<String>,
}

/// Returns the version of a disk with these options: an entity tag (RFC 9110, section 8.8.3).
///
/// # Errors
/// If the options cannot be written as JSON: a path is not UTF-8.
pub fn version_of(spec: &DiskSpec) -> Result<String, RequestError> {
    // Members of a JSON value are sorted, so equal options have equal text.
    let options = serde_json::to_value(spec);
    let options = options.map_err(|error| ErrorKind::Failed.because(error.to_string()))?;
    let mut hasher = DefaultHasher::new();
    options.to_string().hash(&mut hasher);
    Ok(format!("\"{:016x}\"", hasher.finish()))
}

impl Condition {
    /// Returns whether the request names versions that the disk must have.
    pub fn names_versions(&self) -> bool {
        self.wanted.iter().any(|tag| tag != ANY)
    }

    /// Returns whether the disk must not exist.
    pub fn rules_out_existing(&self) -> bool {
        self.unwanted.iter().any(|tag| tag == ANY)
    }

    /// Rejects a request whose condition the disk does not meet.
    ///
    /// `present` is the disk's version, if the disk exists.
    pub fn check(&self, disk: &str, present: Option<&str>) -> Result<(), RequestError> {
        let is_it = |tag: &str| present.is_some_and(|present| tag == ANY || tag == present);
        if !self.wanted.is_empty() && !self.wanted.iter().any(|tag| is_it(tag)) {
            return Err(ErrorKind::Changed.because(match present {
                Some(_) => format!(
                    "disk '{disk}': changed since the client read it (If-Match); read the disk \
                     again, and repeat the request"
                ),
                None => format!("no disk '{disk}' (If-Match)"),
            }));
        }
        // If-None-Match uses weak comparison (section 13.1.2).
        let strong = |tag: &String| is_it(tag.strip_prefix("W/").unwrap_or(tag));
        match self.unwanted.iter().any(strong) {
            true => Err(ErrorKind::Exists.because(format!(
                "a disk named '{disk}' already exists; use 'fathom disk change', or choose \
                 another name"
            ))),
            false => Ok(()),
        }
    }

    /// Returns the error for a conditional request while another request changes the disk.
    pub fn overtaken(disk: &str) -> RequestError {
        ErrorKind::Changed.because(format!(
            "disk '{disk}': being changed by another request (If-Match); read the disk again, \
             and repeat the request"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn conditions_compare_with_the_present_version() {
        let version = |name| {
            let spec = json!({ "name": name, "image": "null:1M" });
            version_of(&serde_json::from_value(spec).unwrap()).unwrap()
        };
        let tag = version("a");
        assert_ne!(tag, version("b"));
        let weak = format!("W/{tag}");
        for (tags, present, if_match, if_none_match) in [
            (&["*"][..], None, false, true),
            (&["*"], Some(&*tag), true, false),
            (&[&*tag], Some(&*tag), true, false),
            (&["\"x\"", &*tag], Some(&*tag), true, false),
            (&["\"x\""], Some(&*tag), false, true),
            (&[&*tag], None, false, true),
            // If-Match compares strongly, If-None-Match weakly.
            (&[&*weak], Some(&*tag), false, false),
        ] {
            let tags: Vec<_> = tags.iter().map(|tag| (*tag).to_owned()).collect();
            let wanted = Condition {
                wanted: tags.clone(),
                ..Condition::default()
            };
            let unwanted = Condition {
                unwanted: tags.clone(),
                ..Condition::default()
            };
            assert_eq!(wanted.check("a", present).is_ok(), if_match, "{tags:?}");
            let holds = unwanted.check("a", present).is_ok();
            assert_eq!(holds, if_none_match, "{tags:?}");
        }
        assert!(Condition::default().check("a", None).is_ok());
    }
}
