//! Events of a cell over time: `cells/ID/timeline.json`.
//!
//! Names and files are not trusted; readers limit the size of both.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cell::Planned;
use crate::error::{Error, Result};
use crate::open::replace;

const FILE: &str = "timeline.json";
/// Maximum size of a file in bytes.
const MAX_BYTES: u64 = 16 << 20;

/// All spans of a cell, relative to the same start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// The spans, in no particular order.
    pub spans: Vec<Span>,
}

/// An activity with its duration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Lane of the span; the spans of a lane are of one kind.
    pub lane: String,
    /// Name of the activity, such as a function or a program.
    pub name: String,
    /// Seconds from the start of the timeline.
    pub begin: f64,
    /// Duration in seconds.
    pub seconds: f64,
}

impl Span {
    /// Creates a span from its begin and end, in seconds from the start of the timeline.
    pub fn new(lane: &str, name: impl Into<String>, begin: f64, end: f64) -> Span {
        Span {
            lane: lane.to_owned(),
            name: name.into(),
            begin,
            seconds: end - begin,
        }
    }

    /// Returns the end in seconds from the start of the timeline.
    pub fn end(&self) -> f64 {
        self.begin + self.seconds
    }
}

impl Timeline {
    /// Writes the timeline into a cell's folder.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, folder: &Path) -> Result<()> {
        replace(&folder.join(FILE), self)
    }

    /// Reads the timeline of a cell; `None` if the cell has no timeline. All times are finite and
    /// not negative.
    ///
    /// # Errors
    /// The file is damaged, or does not lie in that folder.
    pub fn load(run: &Path, planned: &Planned) -> Result<Option<Timeline>> {
        let Some(read) = planned.read::<Timeline>(run, FILE, MAX_BYTES)? else {
            return Ok(None);
        };
        let is_sound = |span: &Span| {
            let times = [span.begin, span.seconds, span.end()];
            times.iter().all(|time| time.is_finite() && *time >= 0.0)
        };
        match read.spans.iter().all(is_sound) {
            true => Ok(Some(read)),
            false => {
                let path = planned.folder(run).join(FILE);
                Err(Error::unusable(&path, "damaged: a time that is none"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn what_was_written_is_read_and_what_is_damaged_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let planned = Planned {
            id: "1-1".into(),
            ..Planned::default()
        };
        assert_eq!(Timeline::load(dir.path(), &planned).unwrap(), None);
        let folder = planned.folder(dir.path());
        fs::create_dir_all(&folder).unwrap();
        let timeline = Timeline {
            spans: vec![Span::new("machine", "kernel", 0.5, 2.0)],
        };
        timeline.save(&folder).unwrap();
        let read = Timeline::load(dir.path(), &planned).unwrap();
        assert_eq!(read, Some(timeline));
        for bad in ["-1", "1e999", "null"] {
            let span = format!(r#"{{"lane": "", "name": "", "begin": 1, "seconds": {bad}}}"#);
            let text = format!(r#"{{"spans": [{span}]}}"#);
            fs::write(folder.join(FILE), text).unwrap();
            assert!(Timeline::load(dir.path(), &planned).is_err(), "{bad}");
        }
    }
}
