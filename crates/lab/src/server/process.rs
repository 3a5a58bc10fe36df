//! A disk server in a separate process.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};
use crate::process::Process;

const START: Duration = Duration::from_secs(30);
const STOP: Duration = Duration::from_secs(60);

/// A disk server with one vhost-user socket. The server is killed on drop.
#[derive(Debug)]
pub struct Server {
    process: Process,
    socket: PathBuf,
    stdout: PathBuf,
    api: Option<PathBuf>,
}

impl Server {
    /// Starts a program and waits until it listens on `socket`. The program's log and standard
    /// output are `DIR/NAME.log` and `DIR/NAME.out`.
    ///
    /// # Errors
    /// When the program does not start; the error has the last lines of its log.
    pub(super) fn start(
        program: &str,
        mut command: Command,
        dir: &Path,
        name: &str,
        socket: PathBuf,
        api: Option<PathBuf>,
    ) -> Result<Self> {
        let stdout = dir.join(format!("{name}.out"));
        let file = File::create(&stdout).context(|| format!("cannot create {name}.out"))?;
        command.stdout(file);
        let process = Process::spawn(program, command, &dir.join(format!("{name}.log")))?;
        let mut server = Self {
            process,
            socket,
            stdout,
            api,
        };
        server.wait_listening()?;
        Ok(server)
    }

    fn wait_listening(&mut self) -> Result<()> {
        let deadline = Instant::now() + START;
        while !is_listening(&self.socket)? {
            self.process.expect_running()?;
            if Instant::now() >= deadline {
                return Err(Error::Timeout {
                    what: format!("waiting for a server on {}", self.socket.display()),
                    after: START,
                    tail: self.process.tail(),
                });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Returns the path of the vhost-user socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the path of a Fathom server's API socket.
    pub fn api(&self) -> Option<&Path> {
        self.api.as_deref()
    }

    /// Returns the server's process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Terminates the server and returns its standard output, which for Fathom is its table of
    /// stages.
    ///
    /// # Errors
    /// When the server does not exit within a minute, or fails.
    pub fn stop(mut self) -> Result<String> {
        self.process.terminate()?;
        let status = self.process.wait(STOP)?;
        if !status.success() {
            self.process.expect_running()?;
        }
        fs::read_to_string(&self.stdout).context(|| "cannot read the server's output".into())
    }
}

/// File with all Unix sockets of the thread's network namespace.
const LIST: &str = "/proc/thread-self/net/unix";

/// Returns whether a process listens on a Unix socket. This function does not connect, because a
/// connection would count as a front-end. Listening sockets have the flag __SO_ACCEPTCON in
/// /proc/net/unix (proc_net_unix(5)). The file is that of this thread's network namespace, in which
/// the server runs.
fn is_listening(path: &Path) -> Result<bool> {
    const ACCEPTCON: &str = "00010000";
    let table = fs::read_to_string(LIST).context(|| format!("cannot read {LIST}"))?;
    let wanted = path.to_string_lossy();
    Ok(table.lines().any(|line| {
        let mut fields = line.split_whitespace();
        fields.nth(3) == Some(ACCEPTCON) && line.ends_with(&format!(" {wanted}"))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn listening_is_seen_without_connecting() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        assert!(!is_listening(&path).unwrap());
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        assert!(is_listening(&path).unwrap());
        assert!(listener.accept().is_err(), "somebody connected");
        // Child processes that other tests start now hold a copy of the socket until they call
        // exec.
        drop(listener);
        fathom_testing::until("the listener's end", || !is_listening(&path).unwrap());
    }
}
