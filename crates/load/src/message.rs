//! Features that the front-end of the `vhost` crate lacks: a timeout for replies, a SET_LOG_BASE
//! that accepts the replies of real servers, and a SET_VRING_BASE for packed queues.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::dirty_log::DirtyLog;
use crate::error::{Error, Result};

/// Runs an exchange of messages with a server, with a timeout for the whole exchange. After `limit`
/// the connection is shut down.
///
/// The `vhost` crate waits for replies without a timeout, and does not expose its socket.
pub fn within<T>(
    stream: &UnixStream,
    limit: Duration,
    talk: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let (stop, stopped) = channel::<()>();
    std::thread::scope(|scope| {
        let watch = scope.spawn(move || {
            let late = stopped.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
            if late {
                let _ = stream.shutdown(Shutdown::Both);
            }
            late
        });
        let said = talk();
        drop(stop);
        match (said, watch.join()) {
            (Err(Error::HungUp { what }), Ok(true)) => Err(Error::Late { what, limit }),
            (said, _) => said,
        }
    })
}

const SET_LOG_BASE: u32 = 6;
/// Protocol version 1, without NEED_REPLY: SET_LOG_BASE always gets a reply.
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const HEADER_LEN: usize = 12;
/// Maximum payload size of a reply in bytes. Servers send 0, 8 or 16 bytes.
const MAX_ANSWER: usize = 64;

/// Sends SET_LOG_BASE with LOG_SHMFD. The specification does not define the reply's payload:
/// libvhost-user sends 8 bytes, and others send 16. The `vhost` crate accepts only 16.
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
        .map_err(|e| hung_up("sending SET_LOG_BASE", e.into()))?;
    read_answer(stream)
}

const SET_VRING_BASE: u32 = 10;

/// Sends SET_VRING_BASE with the positions of a packed queue. The `vhost` crate has room for only
/// one of them. The message has no reply: a server that refuses the base closes the connection.
pub fn set_vring_base(mut stream: &UnixStream, index: u32, base: u32) -> Result<()> {
    let words = [SET_VRING_BASE, VERSION, 8, index, base];
    let request: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
    let sent = stream.write_all(&request);
    sent.map_err(|error| hung_up("sending SET_VRING_BASE", error))
}

/// Converts an error of the socket.
fn hung_up(doing: &'static str, error: io::Error) -> Error {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            // The name of the message is the last word.
            let what = doing.rsplit(' ').next().unwrap_or(doing);
            Error::HungUp { what }
        }
        _ => Error::os(doing, error),
    }
}

fn read_answer(mut stream: &UnixStream) -> Result<()> {
    let failed = |e| hung_up("reading the answer to SET_LOG_BASE", e);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_says_nothing_is_told_from_one_that_hangs_up() {
        let what = "GET_FEATURES";
        let asked = |limit, server: Option<UnixStream>, ours: UnixStream| {
            let said = within(&ours, limit, || match (&ours).read(&mut [0]) {
                Ok(1) => Ok(()),
                _ => Err(Error::HungUp { what }),
            });
            drop(server);
            said
        };
        let (ours, theirs) = UnixStream::pair().unwrap();
        let late = asked(Duration::from_millis(20), Some(theirs), ours);
        assert!(matches!(late, Err(Error::Late { .. })), "{late:?}");
        let (ours, _) = UnixStream::pair().unwrap();
        let gone = asked(Duration::from_secs(60), None, ours);
        assert!(matches!(gone, Err(Error::HungUp { .. })), "{gone:?}");
    }
}
