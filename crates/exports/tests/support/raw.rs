//! Messages that the front-end of the `vhost` crate does not send.

use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use vhost::vhost_user::Frontend;

/// A connection, or a second handle of a front-end's connection.
pub struct Raw(pub UnixStream);

impl Raw {
    pub fn new(frontend: &Frontend) -> Raw {
        // SAFETY: the socket stays open while the front-end exists, which outlives this call.
        let socket = unsafe { BorrowedFd::borrow_raw(frontend.as_raw_fd()) };
        Raw(socket.try_clone_to_owned().unwrap().into())
    }

    pub fn connect(path: &Path) -> Raw {
        Raw(UnixStream::connect(path).unwrap())
    }

    pub fn header(request: u32, flags: u32, size: usize) -> Vec<u8> {
        let words = [request, flags, size as u32];
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    pub fn send(&mut self, request: u32, flags: u32, payload: &[u8], fds: &[RawFd]) {
        let mut bytes = Raw::header(request, flags, payload.len());
        bytes.extend_from_slice(payload);
        self.send_bytes(&bytes, fds);
    }

    /// Sends a message or a part of one, with file descriptors at its first byte.
    pub fn send_bytes(&mut self, bytes: &[u8], fds: &[RawFd]) {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        if fds.is_empty() {
            return self.0.write_all(bytes).unwrap();
        }
        // SAFETY: the caller's file descriptors are open.
        let borrow = |fd: &RawFd| unsafe { BorrowedFd::borrow_raw(*fd) };
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(borrow).collect();
        let mut space = vec![std::mem::MaybeUninit::uninit(); 2048];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let flags = SendFlags::NOSIGNAL;
        let sent = sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, flags);
        assert_eq!(sent.unwrap(), bytes.len());
    }

    /// Reads a reply and returns its payload.
    pub fn reply(&mut self, request: u32) -> Vec<u8> {
        let mut header = [0; 12];
        self.0.read_exact(&mut header).unwrap();
        assert_eq!(header[..4], request.to_ne_bytes());
        assert_eq!(header[4..8], 5u32.to_ne_bytes());
        let size = u32::from_ne_bytes(header[8..].try_into().unwrap());
        let mut payload = vec![0; size as usize];
        self.0.read_exact(&mut payload).unwrap();
        payload
    }

    /// Sends a request that has a reply of its own, and returns the reply's payload.
    pub fn request(&mut self, request: u32, payload: &[u8]) -> Vec<u8> {
        self.send(request, 9, payload, &[]);
        self.reply(request)
    }

    /// Sends a request that is acknowledged, and returns the value: 0 means success.
    pub fn ack(&mut self, request: u32, payload: &[u8], fds: &[RawFd]) -> u64 {
        self.send(request, 9, payload, fds);
        u64::from_ne_bytes(self.reply(request).try_into().unwrap())
    }

    /// Waits until the other side replies or closes the connection. Returns true if it has closed.
    pub fn is_closed(&mut self) -> bool {
        matches!(self.0.read(&mut [0; 1]), Ok(0) | Err(_))
    }
}
