//! Interface between randomized tests and `make torture`: counters of what the tests have tried,
//! and the time at which they stop.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

/// Kind of event that a randomized test counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tried {
    /// Requests whose replies and data were checked.
    Requests,
    /// Servers that were killed in the middle of their work.
    Kills,
    /// Images checked in a state that a power cut may leave.
    PowerCuts,
    /// Test runs in which storage operations failed.
    StorageErrors,
    /// Hostile or damaged inputs.
    HostileInputs,
    /// Results compared with those of another program.
    Comparisons,
}

impl Tried {
    fn name(self) -> &'static str {
        match self {
            Tried::Requests => "requests",
            Tried::Kills => "kills",
            Tried::PowerCuts => "power-cuts",
            Tried::StorageErrors => "storage-errors",
            Tried::HostileInputs => "hostile-inputs",
            Tried::Comparisons => "comparisons",
        }
    }

    /// Appends a line `NAME NUMBER` to the file named by the environment variable `FATHOM_TALLY`.
    /// Does nothing without that variable.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn count(self, number: u64) {
        static FILE: OnceLock<Option<File>> = OnceLock::new();
        let file = FILE.get_or_init(|| {
            let path = std::env::var_os("FATHOM_TALLY")?;
            let opened = OpenOptions::new().create(true).append(true).open(&path);
            Some(opened.unwrap_or_else(|error| panic!("FATHOM_TALLY: {}: {error}", path.display())))
        });
        if let Some(mut file) = file.as_ref() {
            // Use a single write, so that lines of several threads and processes do not mix.
            let line = format!("{} {number}\n", self.name());
            file.write_all(line.as_bytes())
                .expect("the tally is written");
        }
    }
}

/// Returns whether the time in the environment variable `FATHOM_UNTIL`, in seconds since 1970, is
/// over. A test then starts no further attempt. Returns `false` without that variable.
///
/// # Panics
/// If the variable is not a number.
pub fn is_time_up() -> bool {
    static UNTIL: OnceLock<Option<u64>> = OnceLock::new();
    let until = UNTIL.get_or_init(|| {
        let text = std::env::var("FATHOM_UNTIL").ok()?;
        let number = text.parse();
        Some(number.unwrap_or_else(|_| panic!("FATHOM_UNTIL is no number: {text}")))
    });
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    until.is_some_and(|until| now.is_ok_and(|now| now.as_secs() >= until))
}
