//! Client of QEMU's guest agent, which flushes and freezes a guest's file systems.
//!
//! The protocol is JSON, one message per line, on the socket of a virtio-serial port (QEMU's
//! documentation, "QEMU Guest Agent").

use anyhow::{Context, anyhow, bail};
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Timeout for the guest to flush and freeze its file systems.
const FREEZE: Duration = Duration::from_secs(60);
/// Timeout for all other commands.
const ANSWER: Duration = Duration::from_secs(10);

/// Maximum size of a reply in bytes. The guest chooses the size, so it must be bounded.
const MAX_ANSWER: usize = 64 << 10;

/// Precedes the reply to `guest-sync-delimited`, which resynchronizes both sides.
const DELIMITER: u8 = 0xff;

/// A connected guest agent.
pub struct Agent {
    path: PathBuf,
    stream: UnixStream,
    unread: Vec<u8>,
}

/// A guest whose file systems are frozen until this value is thawed or dropped.
pub struct FrozenGuest(Option<Agent>);

impl Agent {
    pub fn connect(path: &Path) -> anyhow::Result<Agent> {
        let stream = UnixStream::connect(path);
        let mut agent = Agent {
            stream: stream.with_context(|| format!("the guest agent at {}", path.display()))?,
            path: path.to_owned(),
            unread: Vec::new(),
        };
        agent.synchronize().map_err(|error| agent.told(&error))?;
        Ok(agent)
    }

    fn told(&self, error: &anyhow::Error) -> anyhow::Error {
        anyhow!("the guest agent at {}: {error:#}", self.path.display())
    }

    /// Discards unread replies and incomplete commands of earlier clients.
    fn synchronize(&mut self) -> anyhow::Result<()> {
        let id = u64::from(std::process::id());
        let sync = json!({ "execute": "guest-sync-delimited", "arguments": { "id": id } });
        self.stream.write_all(&[DELIMITER])?;
        self.send(&sync)?;
        let until = Instant::now() + ANSWER;
        loop {
            let line = self.line(until)?;
            let from = line.iter().rposition(|byte| *byte == DELIMITER);
            let answer = from.map(|at| serde_json::from_slice::<Value>(&line[at + 1..]));
            if matches!(answer, Some(Ok(answer)) if answer["return"] == id) {
                return Ok(());
            }
        }
    }

    fn send(&mut self, command: &Value) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(command)?;
        line.push(b'\n');
        self.stream.set_write_timeout(Some(ANSWER))?;
        Ok(self.stream.write_all(&line)?)
    }

    /// Reads a line and returns it without its newline.
    fn line(&mut self, until: Instant) -> anyhow::Result<Vec<u8>> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let rest = self.unread.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.unread, rest);
                line.truncate(end);
                return Ok(line);
            }
            if self.unread.len() > MAX_ANSWER {
                bail!("the reply is too long");
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("no reply");
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut buf = [0; 4096];
            match self.stream.read(&mut buf) {
                Ok(0) => bail!("the connection was closed"),
                Ok(n) => self.unread.extend(&buf[..n]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn execute(&mut self, command: &str, patience: Duration) -> anyhow::Result<Value> {
        self.send(&json!({ "execute": command }))?;
        let line = self.line(Instant::now() + patience)?;
        let answer: Value = serde_json::from_slice(&line).context("the reply is not JSON")?;
        match &answer["error"] {
            Value::Null => Ok(answer["return"].clone()),
            error => bail!(
                "{command}: {}",
                error["desc"].as_str().unwrap_or("an error")
            ),
        }
    }

    /// Flushes and freezes the guest's file systems, so that nothing is written until the thaw.
    pub fn freeze(mut self) -> anyhow::Result<FrozenGuest> {
        let frozen = self.execute("guest-fsfreeze-freeze", FREEZE);
        match frozen {
            Ok(_) => Ok(FrozenGuest(Some(self))),
            Err(error) => {
                let told = self.told(&error);
                // Some file systems may already be frozen: dropping the value thaws them.
                drop(FrozenGuest(Some(self)));
                Err(told)
            }
        }
    }
}

impl FrozenGuest {
    /// Thaws the file systems. After an error, they may still be frozen.
    pub fn thaw(mut self) -> anyhow::Result<()> {
        match self.0.take() {
            Some(agent) => thaw(agent),
            None => Ok(()),
        }
    }
}

impl Drop for FrozenGuest {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.take().map(thaw) {
            // The guest chooses a part of the message: escape control characters.
            let error = fathom_img::shown(&format!("{error:#}"));
            let _ = writeln!(std::io::stderr(), "fathom: {error}");
        }
    }
}

fn thaw(mut agent: Agent) -> anyhow::Result<()> {
    // The thaw is sent even after an error: an agent that is still freezing reads it afterwards.
    let synchronized = agent.synchronize();
    let thawed = agent.execute("guest-fsfreeze-thaw", ANSWER);
    match synchronized.and(thawed) {
        Ok(_) => Ok(()),
        Err(error) => Err(agent.told(&error).context(
            "the guest's file systems may still be frozen: thaw them (guest-fsfreeze-thaw, virsh domfsthaw)",
        )),
    }
}
