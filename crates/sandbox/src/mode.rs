//! How strict the cage is.

use std::fmt;
use std::str::FromStr;

/// What happens to what a thread has no need of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Mode {
    /// Nothing is set up.
    Off,
    /// System calls that would end the process are written to the kernel's log, and happen. Paths,
    /// privileges and rings are not restricted.
    Log,
    /// It ends the process, or is refused.
    #[default]
    On,
}

impl Mode {
    pub const ALL: [Mode; 3] = [Mode::Off, Mode::Log, Mode::On];

    pub fn name(self) -> &'static str {
        match self {
            Mode::Off => "off",
            Mode::Log => "log",
            Mode::On => "on",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Mode, String> {
        let known = Mode::ALL.into_iter().find(|mode| mode.name() == text);
        known.ok_or_else(|| format!("'{text}' is not off, log or on"))
    }
}
