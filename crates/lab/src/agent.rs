//! The agent: runs scripts wherever it was started, a guest or something else that has our small
//! user space. It is a shell's loop (`agent/agent.sh`) at the other end of a stream of lines.

use std::io;
use std::time::{Duration, Instant};

use crate::base64;
use crate::console::Console;
use crate::error::{Error, Result};
use crate::lines::LineStream;
use crate::process::tail_of;

/// The agent itself, for busybox's shell.
pub(crate) const SCRIPT: &str = include_str!("agent/agent.sh");
/// Printed on the console when it listens.
pub(crate) const READY: &str = "FATHOM-LAB READY";
/// What it gets to tell why a script has not ended.
pub(crate) const LATE: Duration = Duration::from_secs(60);

/// What a script printed, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// The script's exit status.
    pub status: i32,
    /// Standard output and error, in order.
    pub text: String,
}

/// The host's end of the stream.
#[derive(Debug)]
pub(crate) struct Agent {
    lines: LineStream,
    /// Of what it runs in: failures are told with its end.
    console: Console,
    requests: u64,
}

impl Agent {
    pub fn new(lines: LineStream, console: Console) -> Agent {
        Agent {
            lines,
            console,
            requests: 0,
        }
    }

    /// Ends the stream: an agent that has inherited its own ends with it.
    pub fn hang_up(&self) -> io::Result<()> {
        self.lines.hang_up()
    }

    /// Runs a shell script. One that does not end in time has status 124, and in its output what is
    /// known there about it: requests in flight, blocked tasks.
    ///
    /// # Errors
    /// When the agent does not answer; the script's own failure is in the output.
    pub fn run(&mut self, script: &str, timeout: Duration) -> Result<Output> {
        let id = self.ask(script, timeout)?;
        let answer = self.answer(&id, Instant::now() + timeout + LATE)?;
        answer.ok_or_else(|| self.late(script, timeout))
    }

    /// Runs a shell script that must succeed (each of its commands: `set -e`) and returns what it
    /// printed.
    ///
    /// # Errors
    /// Like [`run`](Self::run), and [`Error::Guest`] when the script fails.
    pub fn check(&mut self, script: &str, timeout: Duration) -> Result<String> {
        let output = self.run(&format!("set -e\n{script}"), timeout)?;
        if output.status == 0 {
            return Ok(output.text);
        }
        Err(self.failed(script, &output))
    }

    /// Sends a script; returns the request's id.
    pub fn ask(&mut self, script: &str, timeout: Duration) -> Result<String> {
        self.requests += 1;
        let id = self.requests.to_string();
        let limit = timeout.as_secs().max(1);
        let script_in_base64 = base64::encode(script.as_bytes());
        self.lines
            .send(&format!("{id} {limit} {script_in_base64}"))?;
        Ok(id)
    }

    /// The answer to a request, `None` when it does not come before the deadline.
    pub fn answer(&mut self, id: &str, deadline: Instant) -> Result<Option<Output>> {
        loop {
            let Some(line) = self.lines.receive(deadline)? else {
                return Ok(None);
            };
            // Anything else is the late answer to a request that was given up.
            let mut parts = line.splitn(3, ' ');
            if parts.next() == Some(id) {
                return parse_answer(parts.next(), parts.next()).map(Some);
            }
        }
    }

    /// The error of a script that was not answered in time.
    pub fn late(&self, script: &str, after: Duration) -> Error {
        Error::Timeout {
            what: format!("in the guest: `{}`", first_line(script)),
            after,
            tail: self.console.tail(),
        }
    }

    /// The error of a script that must succeed and did not.
    pub fn failed(&self, script: &str, output: &Output) -> Error {
        let console = self.console.tail().0;
        Error::Guest {
            script: first_line(script).to_owned(),
            status: output.status,
            tail: tail_of(&format!("{}\n-- console --\n{console}", output.text)),
        }
    }
}

fn parse_answer(status: Option<&str>, text: Option<&str>) -> Result<Output> {
    let status = status
        .and_then(|status| status.parse().ok())
        .ok_or_else(|| Error::Protocol("the agent answered without a status".into()))?;
    let text = base64::decode(text.unwrap_or_default())
        .ok_or_else(|| Error::Protocol("the agent answered no base64".into()))?;
    Ok(Output {
        status,
        text: String::from_utf8_lossy(&text).into_owned(),
    })
}

fn first_line(script: &str) -> &str {
    script
        .lines()
        .find(|line| !line.trim().is_empty() && *line != "set -e")
        .unwrap_or(script)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_script_and_not_its_prologue() {
        assert_eq!(
            first_line("set -e\n\n  mkfs /dev/vda\nsync"),
            "  mkfs /dev/vda"
        );
    }
}
