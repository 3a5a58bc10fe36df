//! Receives frames from a Unix stream socket and sends them.

use super::{CodecError, Frame, HEADER_LEN, Header, MAX_FDS};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Result of [`Receiver::receive`].
#[derive(Debug)]
pub enum Received {
    Frame(Frame),
    /// The rest of the message has not arrived yet.
    Incomplete,
    /// The peer closed the connection between two messages.
    Closed,
}

/// Assembles messages as their bytes arrive, without waiting. The receiver never reads past the end
/// of a message, so that file descriptors stay with their message.
#[derive(Default)]
pub struct Receiver {
    bytes: Vec<u8>,
    header: Option<Header>,
    fds: Vec<OwnedFd>,
}

impl Receiver {
    /// Reads available bytes, up to the end of one message. After an error, the stream is out of
    /// step and must be closed.
    pub fn receive(&mut self, socket: impl AsFd) -> Result<Received, CodecError> {
        loop {
            let wanted = self.header.map_or(HEADER_LEN, |h| h.size as usize);
            if self.bytes.len() == wanted
                && let Some(frame) = self.advance()?
            {
                return Ok(Received::Frame(frame));
            }
            let wanted = self.header.map_or(HEADER_LEN, |h| h.size as usize);
            match self.read(socket.as_fd(), wanted - self.bytes.len()) {
                Ok(0) if self.is_idle() => return Ok(Received::Closed),
                Ok(0) => return Err(CodecError::Truncated),
                Ok(_) => {}
                Err(CodecError::Io(e)) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    return Ok(Received::Incomplete);
                }
                Err(CodecError::Io(e)) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Returns true if no byte of the next message has arrived.
    pub fn is_idle(&self) -> bool {
        self.header.is_none() && self.bytes.is_empty()
    }

    /// Returns the bytes and file descriptors of an incomplete message, from the header's first
    /// byte on; None if no byte has arrived.
    pub fn unfinished(&self) -> Option<(Vec<u8>, &[OwnedFd])> {
        if self.is_idle() {
            return None;
        }
        let header = self.header.map(Header::to_bytes);
        let mut bytes = header.map_or(Vec::new(), Vec::from);
        bytes.extend_from_slice(&self.bytes);
        Some((bytes, &self.fds))
    }

    /// Creates a receiver that has already received this part of a message.
    pub fn resume(mut bytes: Vec<u8>, fds: Vec<OwnedFd>) -> Result<Receiver, CodecError> {
        if fds.len() > MAX_FDS {
            return Err(CodecError::TooManyFds);
        }
        let mut header = None;
        if let Some((first, payload)) = bytes.split_first_chunk()
            && !payload.is_empty()
        {
            let parsed = Header::parse(first)?;
            if payload.len() > parsed.size as usize {
                return Err(CodecError::Surplus);
            }
            header = Some(parsed);
            bytes = payload.to_vec();
        }
        Ok(Receiver { bytes, header, fds })
    }

    /// Processes a complete part: returns the message, or None if its payload follows.
    fn advance(&mut self) -> Result<Option<Frame>, CodecError> {
        let bytes = std::mem::take(&mut self.bytes);
        let header = match self.header.take() {
            Some(header) => {
                let fds = std::mem::take(&mut self.fds);
                let payload = bytes;
                return Ok(Some(Frame {
                    header,
                    payload,
                    fds,
                }));
            }
            None => bytes
                .as_slice()
                .try_into()
                .map_err(|_| CodecError::Truncated)?,
        };
        let header = Header::parse(header)?;
        if header.size > 0 {
            self.header = Some(header);
            return Ok(None);
        }
        Ok(Some(Frame {
            header,
            payload: Vec::new(),
            fds: std::mem::take(&mut self.fds),
        }))
    }

    /// Calls recvmsg(2) once, for at most `len` bytes.
    fn read(&mut self, socket: BorrowedFd<'_>, len: usize) -> Result<usize, CodecError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let filled = self.bytes.len();
        self.bytes.resize(filled + len, 0);
        let received = recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut self.bytes[filled..])],
            &mut control,
            RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
        );
        let count = received.as_ref().map_or(0, |r| r.bytes);
        self.bytes.truncate(filled + count);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        let flags = received.map_err(std::io::Error::from)?.flags;
        if flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > MAX_FDS {
            return Err(CodecError::TooManyFds);
        }
        Ok(count)
    }
}

/// Sends one message without waiting.
///
/// # Errors
/// [`CodecError::Unread`] if the message does not fit into the socket's buffer: a peer that follows
/// the protocol has at most one reply outstanding.
pub fn send(
    socket: impl AsFd,
    header: Header,
    payload: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<(), CodecError> {
    debug_assert_eq!(header.size as usize, payload.len());
    let mut bytes = header.to_bytes().to_vec();
    bytes.extend_from_slice(payload);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.as_slice();
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        let sent = sendmsg(socket.as_fd(), &[IoSlice::new(&bytes)], &mut control, flags);
        return match sent {
            Ok(n) if n == bytes.len() => Ok(()),
            Ok(_) | Err(Errno::AGAIN) => Err(CodecError::Unread),
            Err(Errno::INTR) => continue,
            Err(e) => Err(CodecError::Io(e.into())),
        };
    }
}
