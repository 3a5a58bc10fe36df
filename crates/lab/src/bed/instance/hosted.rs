//! The lab's small user space in a program of this machine other than QEMU: its process, and the
//! streams to the agent in it.

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

/// Descriptor of the agent's stream in the program.
pub const AGENT: i32 = 3;
/// Shell that is the first process of the process namespace. The kernel ignores the signals of a
/// first process, even those with which a program aborts itself.
const FIRST: &str = r#""$@"; exit $?"#;
/// Timeout for the agent's start. Emulated machines are slow.
const PATIENCE: Duration = Duration::from_secs(180);
/// Time for a program to exit and to report the reason.
const CLOSING: Duration = Duration::from_secs(20);

/// A program with the agent in it. All of its processes are killed on drop, or when the lab is
/// killed.
#[derive(Debug)]
pub struct Hosted {
    process: Process,
    console: Console,
    agent: Agent,
}

impl Hosted {
    /// Starts the program in its own process and mount namespaces and waits until its agent
    /// listens. The program inherits the streams `more` under the given descriptors. The program's
    /// output is the console; its log goes to `dir`.
    ///
    /// # Errors
    /// When the caller is not root, or the program does not start; the error has its last messages.
    pub fn start(
        name: &str,
        words: &[String],
        more: Vec<(UnixStream, i32)>,
        dir: &Path,
    ) -> Result<Hosted> {
        let (agent, inside) = UnixStream::pair().context(|| "cannot make a socket".into())?;
        let mut command = Command::new(host::program("unshare")?);
        // When the first process of a process namespace ends, the kernel kills all others.
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

    /// Runs a shell script in which each command must succeed (`set -e`), and returns its output.
    ///
    /// # Errors
    /// When the agent does not respond, or the script fails or does not end in time.
    pub fn check(&mut self, script: &str, timeout: Duration) -> Result<String> {
        let text = self.agent.check(script, timeout);
        self.explain(text)
    }

    /// Returns the collected output of the started program.
    pub fn console(&self) -> &Console {
        &self.console
    }

    /// Returns the id of the started process, which is the ancestor of all others.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Replaces a communication error with the program's own last messages if the program has
    /// ended.
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

    /// Returns the error of a program that has ended, with its last messages.
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

    /// Closes the agent's stream and waits for the program to exit.
    ///
    /// # Errors
    /// When the program does not exit, or fails.
    pub fn end(mut self) -> Result<()> {
        let what = || "cannot hang up".to_owned();
        self.agent.hang_up().context(what)?;
        match self.process.wait(CLOSING)?.success() {
            true => Ok(()),
            false => Err(self.last_words(Error::Protocol("it has ended".into()))),
        }
    }
}
