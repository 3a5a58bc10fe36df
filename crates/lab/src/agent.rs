//! The agent, which runs shell scripts in a guest, or in another environment with the lab's small
//! user space. The agent is a loop in a shell (`agent/agent.sh`) at the other end of a stream of
//! lines.

use std::io;
use std::time::{Duration, Instant};

use crate::base64;
use crate::console::Console;
use crate::error::{Error, Result};
use crate::lines::LineStream;
use crate::process::tail_of;

/// Source of the agent, for busybox's shell.
pub(crate) const SCRIPT: &str = include_str!("agent/agent.sh");
/// Line that the agent prints on the console when it starts to listen.
pub(crate) const READY: &str = "FATHOM-LAB READY";
/// Time that the agent may take, after a script's own timeout, to report why the script has not
/// ended.
pub(crate) const LATE: Duration = Duration::from_secs(60);

/// Output and exit status of a script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Exit status of the script.
    pub status: i32,
    /// Standard output and standard error, interleaved in the order of writing.
    pub text: String,
}

/// The host's end of the agent's stream.
#[derive(Debug)]
pub(crate) struct Agent {
    lines: LineStream,
    /// Console of the agent's environment. Errors quote its last lines.
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

    /// Closes the stream. An agent that has inherited its end of the stream then exits.
    pub fn hang_up(&self) -> io::Result<()> {
        self.lines.hang_up()
    }

    /// Runs a shell script. If the script exceeds the timeout, its status is 124 and its output
    /// holds the environment's diagnostics: requests in flight and blocked tasks.
    ///
    /// # Errors
    /// When the agent does not respond. A failure of the script itself is reported in the output.
    pub fn run(&mut self, script: &str, timeout: Duration) -> Result<Output> {
        let id = self.ask(script, timeout)?;
        let answer = self.answer(&id, Instant::now() + timeout + LATE)?;
        answer.ok_or_else(|| self.late(script, timeout))
    }

    /// Runs a shell script in which each command must succeed (`set -e`), and returns its output.
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

    /// Sends a script and returns the id of the request.
    pub fn ask(&mut self, script: &str, timeout: Duration) -> Result<String> {
        self.requests += 1;
        let id = self.requests.to_string();
        let limit = timeout.as_secs().max(1);
        let script_in_base64 = base64::encode(script.as_bytes());
        self.lines
            .send(&format!("{id} {limit} {script_in_base64}"))?;
        Ok(id)
    }

    /// Waits for the response to a request. Returns `None` if none arrives before the deadline.
    pub fn answer(&mut self, id: &str, deadline: Instant) -> Result<Option<Output>> {
        loop {
            let Some(line) = self.lines.receive(deadline)? else {
                return Ok(None);
            };
            // Any other line is a late response to a request that has timed out.
            let mut parts = line.splitn(3, ' ');
            if parts.next() == Some(id) {
                return parse_answer(parts.next(), parts.next()).map(Some);
            }
        }
    }

    /// Returns the error for a script whose response did not arrive in time.
    pub fn late(&self, script: &str, after: Duration) -> Error {
        Error::Timeout {
            what: format!("in the guest: `{}`", first_line(script)),
            after,
            tail: self.console.tail(),
        }
    }

    /// Returns the error for a script that had to succeed and failed.
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
