//! What can go wrong in the lab, said so that the reader knows what to do about it.

use fathom_units::cause;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// The last lines of a guest's serial console or of a process's log, printed under an error.
#[derive(Debug, Clone, Default)]
pub struct Tail(pub String);

impl fmt::Display for Tail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in self.0.lines() {
            write!(f, "\n    | {line}")?;
        }
        Ok(())
    }
}

/// A failure of the lab itself, of the virtual machine, or of what ran in the guest.
#[derive(thiserror::Error)]
pub enum Error {
    /// Something that the lab needs is not installed.
    #[error("{what} not found: {hint}")]
    Missing {
        /// The program, package or file.
        what: String,
        /// How to get it.
        hint: &'static str,
    },
    /// A program is older than what the lab needs.
    #[error("{what} is too old: {least} or newer is needed ({hint})")]
    TooOld {
        /// The program and its version.
        what: String,
        /// The first version that will do.
        least: String,
        /// How to get it.
        hint: &'static str,
    },
    /// A system call of the lab failed.
    #[error("{what}: {}", cause(source))]
    Io {
        /// What was being done, with the path.
        what: String,
        /// The system's reason.
        source: io::Error,
    },
    /// A program of the host ended with a failure.
    #[error("{program} failed ({status}){tail}")]
    Program {
        /// Its name.
        program: String,
        /// How it ended.
        status: String,
        /// The end of what it printed.
        tail: Tail,
    },
    /// Something did not happen in time.
    #[error("{what}: nothing after {} s{tail}", after.as_secs_f32())]
    Timeout {
        /// What was waited for.
        what: String,
        /// How long.
        after: Duration,
        /// The end of the console or log.
        tail: Tail,
    },
    /// The guest's kernel gave up.
    #[error("the guest's kernel panicked: {reason}{tail}")]
    Panic {
        /// Its words.
        reason: String,
        /// The end of the console.
        tail: Tail,
    },
    /// QEMU answered a QMP command with an error.
    #[error("QMP {command}: {description}")]
    Qmp {
        /// The command.
        command: String,
        /// QEMU's words.
        description: String,
    },
    /// A script in the guest ended with a failure.
    #[error("in the guest: `{script}` ended with status {status}{tail}")]
    Guest {
        /// The script's first line.
        script: String,
        /// Its exit status.
        status: i32,
        /// The end of what it printed and of the console.
        tail: Tail,
    },
    /// The run in the KVM host failed.
    #[error("in the KVM host: {what}{tail}")]
    Inner {
        /// Its own words.
        what: String,
        /// What it said before.
        tail: Tail,
    },
    /// A peer spoke something unexpected.
    #[error("{0}")]
    Protocol(String),
    /// A run directory cannot be written or read.
    #[error(transparent)]
    Run(#[from] fathom_run::Error),
    /// The benchmark cannot run.
    #[error(transparent)]
    Load(#[from] fathom_load::Error),
    /// The file is there but cannot be what it is said to be.
    #[error("{path}: {reason}")]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why it cannot be used.
        reason: String,
    },
}

/// The same words as for people: a test that unwraps prints the guest's console readably.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The lab's results.
pub type Result<T> = std::result::Result<T, Error>;

/// Adds what was being done to an I/O error.
pub(crate) trait Context<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Io {
            what: what(),
            source,
        })
    }
}

impl<T> Context<T> for rustix::io::Result<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(io::Error::from).context(what)
    }
}
