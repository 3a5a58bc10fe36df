//! Transfers bytes out of a guest over the virtio-serial port fathom.data: a program's output while
//! it runs, or a folder as a tar archive.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::agent::{self, Output};
use crate::error::{Context, Error, Result};
use crate::guest::Guest;
use crate::initramfs;
use crate::lines::LineStream;
use crate::vcpu_watchdog::{self, VcpuWatchdog};

const CHUNK: usize = 64 << 10;
/// Maximum number of unread chunks. When the queue is full, the guest's writes block.
const WAITING: usize = 64;
const POLL: Duration = Duration::from_millis(20);

/// The host's end of the port. A thread reads it.
#[derive(Debug)]
pub(crate) struct DataPort {
    chunks: Receiver<Vec<u8>>,
    /// A second port for the direction into the guest: the kernel lets only one program open a
    /// port.
    signal: UnixStream,
}

impl DataPort {
    /// Connects to the sockets that QEMU creates for the ports.
    pub fn connect(data: &Path, signal: &Path, timeout: Duration) -> Result<Self> {
        let stream = LineStream::connect(data, timeout)?.into_stream();
        let signal = LineStream::connect(signal, timeout)?.into_stream();
        let (sender, chunks) = sync_channel(WAITING);
        std::thread::spawn(move || forward(stream, &sender));
        Ok(Self { chunks, signal })
    }

    /// Returns the next chunk, or `None` if none arrives within [`POLL`].
    fn receive(&self) -> Result<Option<Vec<u8>>> {
        match self.chunks.recv_timeout(POLL) {
            Ok(chunk) => Ok(Some(chunk)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Error::Protocol("the guest's data port was closed".into()))
            }
        }
    }

    /// Returns the stream into the guest, where /tmp/.ports/fathom.signal reads it.
    pub fn signal(&self) -> Result<UnixStream> {
        let what = || "cannot signal the guest".to_owned();
        self.signal.try_clone().context(what)
    }

    /// Discards chunks that an earlier, abandoned transfer has left.
    fn discard(&self) {
        while self.chunks.try_recv().is_ok() {}
    }
}

/// Forwards chunks until QEMU or the receiver is gone.
fn forward(mut stream: UnixStream, sender: &SyncSender<Vec<u8>>) {
    let mut chunk = vec![0; CHUNK];
    while let Ok(n @ 1..) = stream.read(&mut chunk) {
        if sender.send(chunk[..n].to_vec()).is_err() {
            return;
        }
    }
}

impl Guest {
    /// Runs a shell script and passes its standard output to `sink` while the script runs. The
    /// returned output is the script's standard error.
    ///
    /// # Errors
    /// When the guest does not respond, its vCPUs have stopped, `sink` fails, or the script does
    /// not end in time. A failure of the script itself is reported in the status.
    pub fn stream(
        &mut self,
        script: &str,
        timeout: Duration,
        sink: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<Output> {
        // The port has no end of file, so the guest counts the bytes that it sends.
        let script = format!(
            "{{ (\n{script}\n); echo $? >/tmp/.status; }} | tee /tmp/.ports/fathom.data | wc -c\n\
             exit $(cat /tmp/.status)"
        );
        self.data().discard();
        let id = self.agent().ask(&script, timeout)?;
        let deadline = Instant::now() + timeout + agent::LATE;
        let mut vcpu_watchdog = VcpuWatchdog::of(self.pid());
        let (mut received, mut answer) = (0, None);
        loop {
            if let Some(chunk) = self.receive_data()? {
                received += chunk.len() as u64;
                sink(&chunk)?;
            }
            if answer.is_none() {
                let soon = Instant::now() + Duration::from_millis(1);
                let come = self.agent().answer(&id, soon);
                answer = self.explain(come)?;
            }
            if let Some((output, sent)) = answer.as_ref().and_then(split_count)
                && received >= sent
            {
                return Ok(output);
            }
            if Instant::now() >= deadline {
                return Err(self.agent().late(&script, timeout));
            }
            if let Some(still) = vcpu_watchdog.check() {
                self.revive(still)?;
            }
        }
    }

    /// Runs a shell script and passes each line of its standard output to `line`. A line that
    /// `line` returns is sent to the script's standard input. The returned output is the script's
    /// standard error.
    ///
    /// # Errors
    /// Like [`stream`](Self::stream).
    pub fn converse(
        &mut self,
        script: &str,
        timeout: Duration,
        line: &mut dyn FnMut(&str) -> Result<Option<String>>,
    ) -> Result<Output> {
        let what = || "cannot signal the guest".to_owned();
        let mut signal = self.data().signal()?;
        let script = format!("exec </tmp/.ports/fathom.signal\n{script}");
        let mut lines = Lines::default();
        self.stream(&script, timeout, &mut |chunk| {
            lines.push(chunk, &mut |text| match line(text)? {
                Some(answer) => signal
                    .write_all(format!("{answer}\n").as_bytes())
                    .context(what),
                None => Ok(()),
            })
        })
    }

    /// Copies a folder of the guest into a folder on the host.
    ///
    /// # Errors
    /// When the guest has no such folder, the guest does not respond, or the host's disk is full.
    pub fn fetch(&mut self, dir: &str, into: &Path, timeout: Duration) -> Result<()> {
        let what = || format!("cannot unpack into {}", into.display());
        std::fs::create_dir_all(into).context(what)?;
        let mut unpack = Command::new(initramfs::busybox()?)
            .args(["tar", "-x", "-C"])
            .arg(into)
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context(what)?;
        let mut archive = unpack.stdin.take();
        let script = format!("tar -c -C '{dir}' .");
        let output = self.stream(&script, timeout, &mut |chunk| match &mut archive {
            Some(pipe) => pipe.write_all(chunk).context(what),
            None => Ok(()),
        });
        drop(archive);
        let unpacked = unpack.wait_with_output().context(what)?;
        let output = output?;
        if output.status != 0 {
            return Err(self.agent().failed(&script, &output));
        }
        if !unpacked.status.success() {
            let reason = String::from_utf8_lossy(&unpacked.stderr).trim().to_owned();
            let path = into.to_owned();
            return Err(Error::Unusable { path, reason });
        }
        Ok(())
    }

    /// Acts on vCPUs that have not run for `still`: wakes them with a key press, or fails after
    /// [`vcpu_watchdog::DEAD_AFTER`].
    fn revive(&mut self, still: Duration) -> Result<()> {
        if still >= vcpu_watchdog::DEAD_AFTER {
            return Err(Error::Timeout {
                what: "the guest's CPUs have stopped".into(),
                after: still,
                tail: self.console().tail(),
            });
        }
        if still >= vcpu_watchdog::STALLED_AFTER {
            eprintln!("the guest's CPUs stand still: they get an interrupt");
            // The guest ignores this key, which only causes an interrupt.
            let keys = json!({"keys": [{"type": "qcode", "data": "shift"}]});
            let _ = self.qmp("send-key", keys);
        }
        Ok(())
    }

    fn receive_data(&mut self) -> Result<Option<Vec<u8>>> {
        let chunk = self.data().receive();
        self.explain(chunk)
    }
}

/// Splits a stream of chunks into lines.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    pending: Vec<u8>,
}

impl Lines {
    /// Appends a chunk, and passes each line that the chunk completes to `line`.
    pub fn push(&mut self, chunk: &[u8], line: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
        self.pending.extend_from_slice(chunk);
        while let Some(end) = self.pending.iter().position(|&b| b == b'\n') {
            let bytes: Vec<u8> = self.pending.drain(..=end).collect();
            line(String::from_utf8_lossy(&bytes).trim_end())?;
        }
        Ok(())
    }

    /// Returns the text after the last line end, if any.
    pub fn rest(self) -> Option<String> {
        let rest = String::from_utf8_lossy(&self.pending).into_owned();
        (!rest.is_empty()).then_some(rest)
    }
}

/// Returns the response without its last line, and the byte count in that line. A script that timed
/// out reports no count; the count is then 0, so the transfer ends with the bytes received so far.
fn split_count(output: &Output) -> Option<(Output, u64)> {
    let text = output.text.trim_end();
    let (text, count) = text.rsplit_once('\n').unwrap_or(("", text));
    match count.trim().parse() {
        Ok(count) => {
            let text = text.to_owned();
            Some((
                Output {
                    status: output.status,
                    text,
                },
                count,
            ))
        }
        Err(_) => Some((output.clone(), 0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_the_last_line() {
        let output = |text: &str| Output {
            status: 3,
            text: text.into(),
        };
        let split = |text: &str| {
            split_count(&output(text))
                .map(|(o, n)| (o.text, n))
                .unwrap()
        };
        assert_eq!(split("12\n"), (String::new(), 12));
        assert_eq!(
            split("a warning\nof 2 lines\n0\n"),
            ("a warning\nof 2 lines".into(), 0)
        );
        assert_eq!(split("stuck\n"), ("stuck\n".into(), 0));
    }
}
