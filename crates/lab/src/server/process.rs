//! A disk server that is a process of its own.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};
use crate::process::Process;

const START: Duration = Duration::from_secs(30);
const STOP: Duration = Duration::from_secs(60);

/// A disk server with one vhost-user socket. It is killed on drop.
#[derive(Debug)]
pub struct Server {
    process: Process,
    socket: PathBuf,
    stdout: PathBuf,
    api: Option<PathBuf>,
}

impl Server {
    /// Starts a program that will listen on `DIR/NAME.sock`, and waits until it does. Its log and
    /// what it prints are `DIR/NAME.log` and `DIR/NAME.out`.
    ///
    /// # Errors
    /// When it does not start; the error has the end of what it said.
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

    /// The vhost-user socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The socket of a Fathom server's API.
    pub fn api(&self) -> Option<&Path> {
        self.api.as_deref()
    }

    /// The process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Asks the server to end and returns what it printed on standard output: for Fathom its
    /// table of stages.
    ///
    /// # Errors
    /// When it does not end within a minute or ends with a failure.
    pub fn stop(mut self) -> Result<String> {
        self.process.terminate()?;
        let status = self.process.wait(STOP)?;
        if !status.success() {
            self.process.expect_running()?;
        }
        fs::read_to_string(&self.stdout).context(|| "cannot read the server's output".into())
    }
}

/// All Unix sockets of a network.
const LIST: &str = "/proc/thread-self/net/unix";

/// Whether somebody listens on a Unix socket, without connecting: a connection would count as a
/// front-end. Listening sockets have the flag __SO_ACCEPTCON in /proc/net/unix (proc_net_unix(5)).
/// They are those of this thread's network, in which it has started the server.
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
        // Programs that other tests start at this instant hold a copy of it until they exec.
        drop(listener);
        fathom_testing::until("the listener's end", || !is_listening(&path).unwrap());
    }
}
