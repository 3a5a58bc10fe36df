//! Child processes that never outlive the lab.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, kill_process, pidfd_open, set_parent_process_death_signal,
};

use crate::error::{Context, Error, Result, Tail};

const TAIL_LINES: usize = 100;
const FOREVER: Timespec = Timespec {
    tv_sec: i64::MAX,
    tv_nsec: 0,
};

/// A child process, which is killed on drop. The kernel also kills the process when the *thread*
/// that started it ends, so start it from a thread that lives at least as long.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with standard error redirected to the file `log` and empty standard input.
    ///
    /// # Errors
    /// When the log cannot be created or the program cannot be started.
    pub fn spawn(name: &str, mut command: Command, log: &Path) -> Result<Self> {
        let file = File::create(log).context(|| format!("cannot create {}", log.display()))?;
        command.stdin(Stdio::null()).stderr(file);
        // SAFETY: the closure runs in the child between fork and exec and makes one system call;
        // it allocates nothing and takes no lock.
        unsafe {
            command.pre_exec(|| {
                set_parent_process_death_signal(Some(Signal::KILL)).map_err(io::Error::from)
            });
        }
        let child = command.spawn().context(|| format!("cannot start {name}"))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            log: log.to_owned(),
        })
    }

    /// Returns the name given to [`spawn`](Self::spawn).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Takes the read end of standard output, if the command has a pipe there.
    pub fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// Returns what the process has written to standard error.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Returns the last lines of [`log`](Self::log).
    pub fn tail(&self) -> Tail {
        tail_of(&self.log())
    }

    /// Returns the exit status, or `None` while the process runs.
    ///
    /// # Errors
    /// When the process cannot be waited for.
    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        self.child
            .try_wait()
            .context(|| format!("cannot wait for {}", self.name))
    }

    /// Waits for the process to exit by itself.
    ///
    /// # Errors
    /// [`Error::Timeout`] with the last lines of its log, if the process still runs after
    /// `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + timeout;
        // pidfd_open fails for a process that has been reaped.
        if let Some(status) = self.try_wait()? {
            return Ok(status);
        }
        let what = || format!("cannot wait for {}", self.name);
        let end = pidfd_open(self.raw_pid(), PidfdFlags::empty()).context(what)?;
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Timeout {
                    what: format!("waiting for {} to end", self.name),
                    after: timeout,
                    tail: self.tail(),
                });
            }
            let left = Timespec::try_from(left).unwrap_or(FOREVER);
            // A signal may interrupt the poll; the loop then checks again.
            let _ = poll(&mut [PollFd::new(&end, PollFlags::IN)], Some(&left));
        }
    }

    /// Fails with the last lines of the log if the process has ended.
    ///
    /// # Errors
    /// [`Error::Program`] if the process has ended, with any status.
    pub fn expect_running(&mut self) -> Result<()> {
        match self.try_wait()? {
            None => Ok(()),
            Some(status) => Err(Error::Program {
                program: self.name.clone(),
                status: status.to_string(),
                tail: self.tail(),
            }),
        }
    }

    /// Asks the process to exit (SIGTERM).
    ///
    /// # Errors
    /// When the signal cannot be sent.
    pub fn terminate(&self) -> Result<()> {
        self.signal(Signal::TERM)
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// When the signal cannot be sent, for example because the process has been reaped.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(self.raw_pid(), signal).context(|| format!("cannot signal {}", self.name))
    }

    /// Kills the process (SIGKILL) and reaps it.
    ///
    /// # Errors
    /// When the process cannot be waited for.
    pub fn kill(&mut self) -> Result<ExitStatus> {
        let _ = self.child.kill(); // fails only if the process has ended, which the wait reports
        self.child
            .wait()
            .context(|| format!("cannot wait for {}", self.name))
    }

    fn raw_pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the last lines of a text, without empty lines and control characters.
pub(crate) fn tail_of(text: &str) -> Tail {
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    let from = lines.len().saturating_sub(TAIL_LINES);
    let clean = |line: &&str| without_escapes(line);
    Tail(
        lines[from..]
            .iter()
            .map(clean)
            .collect::<Vec<_>>()
            .join("\n"),
    )
}

/// Removes control characters and escape sequences (ECMA-48: `ESC [`, parameters, a letter; or
/// `ESC` and a letter).
fn without_escapes(line: &str) -> String {
    let mut out = String::new();
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        if c == '\x1b' {
            if chars.next() == Some('[') {
                chars.by_ref().find(|c| ('@'..='~').contains(c));
            }
        } else if !c.is_control() {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_consoles_escapes_are_left_out() {
        let text = "\x1bc\x1b[?7l\x1b[2J\x1b[0mSeaBIOS\r\n\x1b[1;31mred\x1b[0m \x07end\x1b[";
        assert_eq!(tail_of(text).0, "SeaBIOS\nred end");
    }

    #[test]
    fn a_dropped_process_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sleep");
        command.arg("1000");
        let process = Process::spawn("sleep", command, &dir.path().join("log")).unwrap();
        let proc_entry = PathBuf::from(format!("/proc/{}", process.pid()));
        assert!(proc_entry.exists());
        drop(process);
        assert!(!proc_entry.exists());
    }

    #[test]
    fn an_early_end_is_reported_with_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such disk >&2; exit 3"]);
        let mut process = Process::spawn("server", command, &dir.path().join("log")).unwrap();
        let status = process.wait(fathom_testing::PATIENCE).unwrap();
        assert_eq!(status.code(), Some(3));
        let error = process.expect_running().unwrap_err().to_string();
        assert!(
            error.contains("server") && error.contains("no such disk"),
            "{error}"
        );
    }
}
