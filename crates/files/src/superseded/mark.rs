//! What a mark says.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Longest mark that is read, in bytes.
pub(super) const MAX_MARK: usize = 16 << 10;

/// By what an image was superseded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Superseded {
    /// The newer image, as its server names it.
    pub image: String,
    /// The disk that has the newer image.
    pub disk: String,
    /// Seconds since 1970.
    pub time: u64,
    /// The file of the disk's definition, until that names the newer image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub definition: Option<PathBuf>,
}

impl Superseded {
    /// A mark made now.
    pub fn new(image: String, disk: String, definition: Option<PathBuf>) -> Superseded {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Superseded {
            image,
            disk,
            time: now.map_or(0, |now: Duration| now.as_secs()),
            definition,
        }
    }

    /// A mark that this program did not write.
    pub(super) fn unreadable() -> Superseded {
        Superseded {
            image: "an image that cannot be told (the mark is damaged)".into(),
            disk: String::new(),
            time: 0,
            definition: None,
        }
    }

    pub(super) fn parse(bytes: &[u8]) -> Superseded {
        serde_json::from_slice(bytes).unwrap_or_else(|_| Superseded::unreadable())
    }
}
