//! Errors of the lab, worded so that the reader knows what to do.

use fathom_units::cause;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Last lines of a guest's serial console or of a process's log, printed below an error.
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
    /// A program, package or file that the lab needs is not installed.
    #[error("{what} not found: {hint}")]
    Missing {
        /// The program, package or file.
        what: String,
        /// How to install it.
        hint: &'static str,
    },
    /// A program is older than the lab requires.
    #[error("{what} is too old: {least} or newer is needed ({hint})")]
    TooOld {
        /// The program and its version.
        what: String,
        /// Oldest version that is sufficient.
        least: String,
        /// How to install it.
        hint: &'static str,
    },
    /// A system call of the lab failed.
    #[error("{what}: {}", cause(source))]
    Io {
        /// The attempted operation, with the path.
        what: String,
        /// The error of the system call.
        source: io::Error,
    },
    /// A program on the host failed.
    #[error("{program} failed ({status}){tail}")]
    Program {
        /// Name of the program.
        program: String,
        /// Exit status or signal.
        status: String,
        /// Last lines of its output.
        tail: Tail,
    },
    /// An event did not happen in time.
    #[error("{what}: nothing after {} s{tail}", after.as_secs_f32())]
    Timeout {
        /// The awaited event.
        what: String,
        /// The timeout.
        after: Duration,
        /// Last lines of the console or log.
        tail: Tail,
    },
    /// The guest's kernel panicked.
    #[error("the guest's kernel panicked: {reason}{tail}")]
    Panic {
        /// Message of the panic.
        reason: String,
        /// Last lines of the console.
        tail: Tail,
    },
    /// QEMU replied to a QMP command with an error.
    #[error("QMP {command}: {description}")]
    Qmp {
        /// Name of the command.
        command: String,
        /// QEMU's description of the error.
        description: String,
    },
    /// A script in the guest failed.
    #[error("in the guest: `{script}` ended with status {status}{tail}")]
    Guest {
        /// First line of the script.
        script: String,
        /// Exit status of the script.
        status: i32,
        /// Last lines of the script's output and of the console.
        tail: Tail,
    },
    /// The run in the KVM host failed.
    #[error("in the KVM host: {what}{tail}")]
    Inner {
        /// Error of the inner run.
        what: String,
        /// Last lines of the inner run's output.
        tail: Tail,
    },
    /// The other side of a connection violated the protocol.
    #[error("{0}")]
    Protocol(String),
    /// A run directory cannot be written or read.
    #[error(transparent)]
    Run(#[from] fathom_run::Error),
    /// The benchmark cannot run.
    #[error(transparent)]
    Load(#[from] fathom_load::Error),
    /// The file exists but is not usable for its purpose.
    #[error("{path}: {reason}")]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why it cannot be used.
        reason: String,
    },
}

/// Prints like `Display`, so that a test that unwraps shows the guest's console readably.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Result of the lab's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Adds a description of the attempted operation to an I/O error.
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
