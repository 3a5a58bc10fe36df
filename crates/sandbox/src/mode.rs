//! Strictness of the sandbox.

use std::fmt;
use std::str::FromStr;

/// Reaction when a thread does something that it does not need to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Mode {
    /// The sandbox is not set up.
    Off,
    /// The kernel logs system calls that would end the process, and executes them. Paths,
    /// privileges and io_uring instances are not restricted.
    Log,
    /// A forbidden system call ends the process, or fails with an error.
    #[default]
    On,
}

impl Mode {
    /// All modes, from the weakest to the strictest.
    pub const ALL: [Mode; 3] = [Mode::Off, Mode::Log, Mode::On];

    /// Returns the name of the mode, as users write it.
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
