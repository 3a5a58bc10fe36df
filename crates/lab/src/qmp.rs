//! A small QMP client: commands, replies and events.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::{Error, Result, Tail};
use crate::lines::LineStream;

const ANSWER: Duration = Duration::from_secs(60);
/// Maximum number of events kept for later. Beyond it, the oldest are dropped.
const EVENTS_KEPT: usize = 1024;

/// A QMP connection to QEMU on which the capabilities have been negotiated.
#[derive(Debug)]
pub struct Qmp {
    lines: LineStream,
    events: VecDeque<Value>,
    /// Number of commands so far, which is the id of the last one.
    commands: u64,
}

impl Qmp {
    /// Connects to QEMU's QMP socket and negotiates capabilities.
    ///
    /// # Errors
    /// When no connection is accepted in time, or the other side is not a QMP server.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self> {
        let mut lines = LineStream::connect(path, timeout)?;
        let greeting = lines.receive(Instant::now() + timeout)?.unwrap_or_default();
        if !greeting.contains("QMP") {
            return Err(Error::Protocol(format!("no QMP greeting: '{greeting}'")));
        }
        let mut qmp = Self {
            lines,
            events: VecDeque::new(),
            commands: 0,
        };
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs one command and returns its `return` value.
    ///
    /// # Errors
    /// [`Error::Qmp`] when QEMU replies with an error. A timeout when QEMU does not reply within a
    /// minute: an unresponsive vhost-user backend blocks QEMU's main loop.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.commands += 1;
        let id = json!(self.commands);
        let message = json!({"execute": command, "arguments": arguments, "id": id});
        self.lines.send(&message.to_string())?;
        let deadline = Instant::now() + ANSWER;
        loop {
            let mut message = self.next(deadline, || format!("QMP {command}"), ANSWER)?;
            if message.get("event").is_some() {
                self.keep(message);
            } else if message.get("id").is_some_and(|known| *known != id) {
                // A late reply to a command that has timed out.
            } else if let Some(value) = message.get_mut("return") {
                return Ok(value.take());
            } else {
                let description = message["error"]["desc"]
                    .as_str()
                    .unwrap_or("no reason given");
                return Err(Error::Qmp {
                    command: command.to_owned(),
                    description: description.to_owned(),
                });
            }
        }
    }

    /// Waits for an event of that name and returns its data. Events that arrived during a command
    /// count.
    ///
    /// # Errors
    /// A timeout.
    pub fn wait_event(&mut self, name: &str, timeout: Duration) -> Result<Value> {
        let deadline = Instant::now() + timeout;
        if let Some(found) = self.events.iter().position(|event| event["event"] == name) {
            let event = self.events.remove(found).unwrap_or_default();
            return Ok(event["data"].clone());
        }
        loop {
            let message = self.next(deadline, || format!("QMP event {name}"), timeout)?;
            if message["event"] == name {
                return Ok(message["data"].clone());
            }
            self.keep(message);
        }
    }

    fn keep(&mut self, event: Value) {
        if self.events.len() == EVENTS_KEPT {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    fn next(
        &mut self,
        deadline: Instant,
        what: impl Fn() -> String,
        after: Duration,
    ) -> Result<Value> {
        let Some(line) = self.lines.receive(deadline)? else {
            return Err(Error::Timeout {
                what: what(),
                after,
                tail: Tail::default(),
            });
        };
        serde_json::from_str(&line)
            .map_err(|e| Error::Protocol(format!("{}: '{line}' is not JSON: {e}", what())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_testing::PATIENCE;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    /// Replies like QEMU: a greeting, then one of `answers` for each command.
    fn server(path: &Path, answers: &'static [&'static str]) -> std::thread::JoinHandle<()> {
        let listener = UnixListener::bind(path).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"{\"QMP\": {\"version\": {}}}\n").unwrap();
            let mut commands = BufReader::new(stream.try_clone().unwrap()).lines();
            for answer in answers {
                commands.next().unwrap().unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
            }
        })
    }

    #[test]
    fn events_between_command_and_answer_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let thread = server(
            &path,
            &[
                "{\"return\": {}}\n",
                "{\"event\": \"STOP\", \"data\": {\"n\": 1}}\n{\"return\": 7, \"id\": 2}\n",
                "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no such device\"}}\n",
            ],
        );
        let mut qmp = Qmp::connect(&path, PATIENCE).unwrap();
        assert_eq!(qmp.execute("stop", json!({})).unwrap(), json!(7));
        assert_eq!(qmp.wait_event("STOP", PATIENCE).unwrap()["n"], 1);
        let refused = qmp
            .execute("device_del", json!({"id": "x"}))
            .unwrap_err()
            .to_string();
        assert_eq!(refused, "QMP device_del: no such device");
        thread.join().unwrap();
    }

    #[test]
    fn late_reply_to_an_earlier_command_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let thread = server(
            &path,
            &[
                "{\"return\": {}, \"id\": 1}\n",
                "{\"return\": 1, \"id\": 1}\n{\"return\": 2, \"id\": 2}\n",
            ],
        );
        let mut qmp = Qmp::connect(&path, PATIENCE).unwrap();
        assert_eq!(qmp.execute("query-status", json!({})).unwrap(), json!(2));
        thread.join().unwrap();
    }
}
