//! Content of a mark.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Maximum length of a mark, in bytes.
pub(super) const MAX_MARK: usize = 16 << 10;

/// The image that superseded another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Superseded {
    /// The newer image, as the server names it.
    pub image: String,
    /// The disk that uses the newer image.
    pub disk: String,
    /// Time of the mark, in seconds since 1970.
    pub time: u64,
    /// The disk's definition file, until the definition names the newer image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub definition: Option<PathBuf>,
}

impl Superseded {
    /// Returns a mark with the current time.
    pub fn new(image: String, disk: String, definition: Option<PathBuf>) -> Superseded {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Superseded {
            image,
            disk,
            time: now.map_or(0, |now: Duration| now.as_secs()),
            definition,
        }
    }

    /// Returns a stand-in for a mark that cannot be parsed.
    pub(super) fn unreadable() -> Superseded {
        Superseded {
            image: "an unknown image (the mark is damaged)".into(),
            disk: String::new(),
            time: 0,
            definition: None,
        }
    }

    /// Parses a mark, and replaces its control characters, which could control a terminal.
    ///
    /// Anyone who can write to the image may have written the mark.
    pub(super) fn parse(bytes: &[u8]) -> Superseded {
        let read = serde_json::from_slice(bytes);
        let mark: Superseded = read.unwrap_or_else(|_| Superseded::unreadable());
        Superseded {
            image: printable(&mark.image),
            disk: printable(&mark.disk),
            ..mark
        }
    }
}

/// Replaces control characters by `?`.
fn printable(text: &str) -> String {
    text.replace(char::is_control, "?")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mark_of_a_stranger_controls_no_terminal() {
        let bytes = br#"{"image": "/a\u001b[2J\n/b", "disk": "d\r", "time": 1}"#;
        let mark = Superseded::parse(bytes);
        assert_eq!((&*mark.image, &*mark.disk), ("/a?[2J?/b", "d?"));
    }
}
