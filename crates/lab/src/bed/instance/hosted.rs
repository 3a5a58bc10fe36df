//! Our small user space in a program of this machine's that is no QEMU: its process, and the ways
//! to the agent in it.

use fathom_units::cause;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use command_fds::{CommandFdExt, FdMapping};

use crate::agent::{Agent, READY};
use crate::console::Console;
use crate::error::{Context, Error, Result};
use crate::host;
use crate::lines::LineStream;
use crate::process::{Process, tail_of};

/// The descriptor of the agent's stream in the program.
pub const AGENT: i32 = 3;
/// The first process of a namespace takes no signal, not even its own of a panic: it is a shell.
const FIRST: &str = r#""$@"; exit $?"#;
/// Emulated machines take their time.
const PATIENCE: Duration = Duration::from_secs(180);
/// What a program gets to end, and to say why.
const CLOSING: Duration = Duration::from_secs(20);

/// A program with the agent in it. All of its processes are killed on drop, and when the lab is.
#[derive(Debug)]
pub struct Hosted {
    process: Process,
    console: Console,
    agent: Agent,
}

impl Hosted {
    /// Starts the program in namespaces of its own for processes and mounts, and waits until its
    /// agent listens. It inherits `more` streams, under these descriptors. What it prints is its
    /// console; its log goes to `dir`.
    ///
    /// # Errors
    /// Without root's rights, or when it does not come up, with its last words.
    pub fn start(
        name: &str,
        words: &[String],
        more: Vec<(UnixStream, i32)>,
        dir: &Path,
    ) -> Result<Hosted> {
        let (agent, inside) = UnixStream::pair().context(|| "cannot make a socket".into())?;
        let mut command = Command::new(host::program("unshare")?);
        // Who is the first in a process namespace takes all others along.
        command.args(["--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]);
        command.args(["sh", "-c", FIRST, "sh"]);
        command.args(words).stdout(Stdio::piped());
        let inherits = more.into_iter().chain([(inside, AGENT)]);
        let inherits = inherits.map(|(stream, child_fd)| FdMapping {
            parent_fd: OwnedFd::from(stream),
            child_fd,
        });
        let mapped = command.fd_mappings(inherits.collect());
        mapped.map_err(|error| {
            Error::Protocol(format!("cannot pass descriptors: {}", cause(error)))
        })?;
        let mut process = Process::spawn(name, command, &dir.join("log"))?;
        let stdout = process.take_stdout();
        let console = Console::collect(stdout.ok_or_else(|| Error::Protocol("no console".into()))?);
        let mut hosted = Hosted {
            agent: Agent::new(LineStream::new(agent), console.clone()),
            process,
            console,
        };
        let ready = hosted.console.wait_for(READY, 0, PATIENCE);
        hosted.explain(ready)?;
        Ok(hosted)
    }

    /// Runs a shell script that must succeed (each of its commands: `set -e`) and returns what it
    /// printed.
    ///
    /// # Errors
    /// When the agent does not answer, or the script fails or does not end in time.
    pub fn check(&mut self, script: &str, timeout: Duration) -> Result<String> {
        let text = self.agent.check(script, timeout);
        self.explain(text)
    }

    pub fn console(&self) -> &Console {
        &self.console
    }

    /// The process that was started: all others are below it.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// A failure to talk to a program that has ended is best explained by its own last words.
    fn explain<T>(&mut self, result: Result<T>) -> Result<T> {
        let error = match result {
            Err(error @ (Error::Io { .. } | Error::Protocol(_) | Error::Timeout { .. })) => error,
            other => return other,
        };
        let patience = match error {
            Error::Timeout { .. } => Duration::from_millis(200),
            _ => CLOSING,
        };
        if self.process.wait(patience).is_err() {
            return Err(error);
        }
        Err(self.last_words(error))
    }

    /// Of a program that has ended.
    fn last_words(&mut self, otherwise: Error) -> Error {
        self.console.wait_end(CLOSING);
        let said = format!("{}\n{}", self.console.text(), self.process.log());
        match self.process.expect_running() {
            Err(Error::Program {
                program, status, ..
            }) => Error::Program {
                program,
                status,
                tail: tail_of(&said),
            },
            _ => otherwise,
        }
    }

    /// Hangs up, and waits for the end of a program that ends by that, or was asked to.
    ///
    /// # Errors
    /// When it does not end, or ends with a failure.
    pub fn end(mut self) -> Result<()> {
        let what = || "cannot hang up".to_owned();
        self.agent.hang_up().context(what)?;
        match self.process.wait(CLOSING)?.success() {
            true => Ok(()),
            false => Err(self.last_words(Error::Protocol("it has ended".into()))),
        }
    }
}
