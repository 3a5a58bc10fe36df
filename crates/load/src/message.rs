//! What the `vhost` crate's front-end lacks: a limit on how long a server may
//! take, and SET_LOG_BASE with the answers that real servers give.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::dirty_log::DirtyLog;
use crate::error::{Error, Result};

/// Shuts a socket down when its holder takes longer than agreed, since the
/// `vhost` crate reads without a limit. The read then ends with an error.
pub struct Deadline {
    /// Dropped first, which ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Deadline {
    /// From now until the guard is dropped.
    pub fn start(stream: &UnixStream, limit: Duration) -> Result<Deadline> {
        let stream = stream
            .try_clone()
            .map_err(|e| Error::os("duplicating a socket", e))?;
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || watch(&stream, &stopped, limit));
        Ok(Deadline {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

fn watch(stream: &UnixStream, stopped: &Receiver<()>, limit: Duration) {
    if stopped.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
        let _ = stream.shutdown(Shutdown::Both);
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

const SET_LOG_BASE: u32 = 6;
/// Protocol version 1; SET_LOG_BASE is answered without asking for it.
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const HEADER_LEN: usize = 12;
/// The largest answer that is read; servers send 0, 8 or 16 bytes.
const MAX_ANSWER: usize = 64;

/// SET_LOG_BASE with LOG_SHMFD. The specification leaves the answer's payload
/// open: libvhost-user sends 8 bytes, others 16, where `vhost` insists on 16.
pub fn set_log_base(stream: &UnixStream, log: &DirtyLog) -> Result<()> {
    let mut request = Vec::with_capacity(HEADER_LEN + 16);
    for word in [SET_LOG_BASE, VERSION, 16] {
        request.extend_from_slice(&word.to_ne_bytes());
    }
    request.extend_from_slice(&(log.len() as u64).to_ne_bytes());
    request.extend_from_slice(&0u64.to_ne_bytes());
    let fds = [log.fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let data = [IoSlice::new(&request)];
    sendmsg(stream, &data, &mut control, SendFlags::NOSIGNAL)
        .map_err(|e| Error::os("sending SET_LOG_BASE", e))?;
    read_answer(stream)
}

fn read_answer(mut stream: &UnixStream) -> Result<()> {
    let failed = |e| Error::os("reading the answer to SET_LOG_BASE", e);
    let mut header = [0u8; HEADER_LEN];
    stream.read_exact(&mut header).map_err(failed)?;
    let word = |i: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|b| header[4 * i + b]));
    let (code, flags, size) = (word(0), word(1), word(2) as usize);
    if code != SET_LOG_BASE || flags & REPLY == 0 || size > MAX_ANSWER {
        return Err(Error::Gone(format!(
            "SET_LOG_BASE was answered by message {code}, flags {flags:#x}, {size} bytes"
        )));
    }
    let mut payload = [0u8; MAX_ANSWER];
    stream.read_exact(&mut payload[..size]).map_err(failed)
}
