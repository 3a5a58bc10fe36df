//! Messages between a server and its successor: JSON, with open files, on a Unix stream socket.
//!
//! A message is a head (what it is, and how much there is), then the files, some with each byte,
//! then the text. A message arrives as a whole or not at all.

use fathom_sockets::Descriptors;
use fathom_units::cause;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Files in one go: the kernel takes 253 (unix(7), SCM_RIGHTS).
const AT_ONCE: usize = 250;
const MAGIC: [u8; 8] = *b"fathom>1";
/// Maximum bytes of text and maximum number of files of a message: more than any server needs.
const MAX_TEXT: u64 = 1 << 30;
const MAX_FILES: u64 = 1 << 20;
/// Timeout for the other side to accept more bytes.
const STALL: Duration = Duration::from_secs(5);

/// Why there is no message.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The other side is gone.
    #[error("the connection is closed")]
    Gone,
    #[error("no message in time")]
    Late,
    #[error("malformed message: {0}")]
    Strange(String),
    #[error("{}", cause(.0))]
    Io(io::Error),
}

impl From<io::Error> for WireError {
    fn from(error: io::Error) -> WireError {
        match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                WireError::Gone
            }
            ErrorKind::WouldBlock | ErrorKind::TimedOut => WireError::Late,
            _ => WireError::Io(error),
        }
    }
}

impl From<serde_json::Error> for WireError {
    fn from(error: serde_json::Error) -> WireError {
        WireError::Strange(error.to_string())
    }
}

/// The other side.
pub struct Peer(UnixStream);

impl Peer {
    pub fn new(socket: UnixStream) -> io::Result<Peer> {
        socket.set_nonblocking(false)?;
        socket.set_write_timeout(Some(STALL))?;
        Ok(Peer(socket))
    }

    /// The same one again.
    pub fn try_clone(&self) -> io::Result<Peer> {
        self.0.try_clone().map(Peer)
    }

    pub fn send(&mut self, message: &impl Serialize) -> Result<(), WireError> {
        self.send_with(message, &Descriptors::default())
    }

    pub fn send_with(
        &mut self,
        message: &impl Serialize,
        files: &Descriptors,
    ) -> Result<(), WireError> {
        let text = serde_json::to_vec(message)?;
        let files: Vec<_> = files.iter().collect();
        let mut head = MAGIC.to_vec();
        head.extend((text.len() as u64).to_ne_bytes());
        head.extend((files.len() as u64).to_ne_bytes());
        self.0.write_all(&head)?;
        files.chunks(AT_ONCE).try_for_each(|some| self.give(some))?;
        Ok(self.0.write_all(&text)?)
    }

    fn give(&self, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(files));
        let byte = [IoSlice::new(&[0])];
        sendmsg(&self.0, &byte, &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Receives the next message, with its files. Waits for each part of the message for `patience`
    /// at most, or without limit if that is `None`.
    pub fn receive<T: DeserializeOwned>(
        &mut self,
        patience: Option<Duration>,
    ) -> Result<(T, Descriptors), WireError> {
        self.0.set_read_timeout(patience)?;
        let mut head = [0; 24];
        self.0.read_exact(&mut head)?;
        let number = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&head[at..at + 8]);
            u64::from_ne_bytes(bytes)
        };
        let (text, files) = (number(8), number(16));
        if head[..8] != MAGIC || text > MAX_TEXT || files > MAX_FILES {
            return Err(WireError::Strange("not a message".into()));
        }
        let mut taken = Vec::new();
        while (taken.len() as u64) < files {
            self.take(&mut taken)?;
        }
        let mut bytes = vec![0; text as usize];
        self.0.read_exact(&mut bytes)?;
        Ok((serde_json::from_slice(&bytes)?, taken.into_iter().collect()))
    }

    fn take(&self, files: &mut Vec<OwnedFd>) -> Result<(), WireError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let received = recvmsg(
            &self.0,
            &mut [IoSliceMut::new(&mut byte)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        );
        let before = files.len();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                files.extend(some);
            }
        }
        if received.map_err(io::Error::from)?.bytes == 0 {
            return Err(WireError::Gone);
        }
        match files.len() > before {
            true => Ok(()),
            // The kernel drops file descriptors that do not fit into this process's table of open
            // files.
            false => Err(WireError::Strange("file descriptors are missing".into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;

    fn pair() -> (Peer, Peer) {
        let (a, b) = UnixStream::pair().unwrap();
        (Peer::new(a).unwrap(), Peer::new(b).unwrap())
    }

    #[test]
    fn messages_come_with_their_files_in_order() {
        let (mut ours, mut theirs) = pair();
        let files: Vec<_> = (0..3).map(|_| tempfile::tempfile().unwrap()).collect();
        let mut list = Descriptors::default();
        for i in 0..600 {
            list.add(files[i % 3].as_fd()).unwrap();
        }
        let sender = std::thread::spawn(move || {
            ours.send(&"first").unwrap();
            ours.send_with(&vec![1, 2], &list).unwrap();
        });
        let patience = Some(fathom_testing::PATIENCE);
        let (first, none): (String, _) = theirs.receive(patience).unwrap();
        assert_eq!((first.as_str(), none.len()), ("first", 0));
        let (second, mut some): (Vec<i32>, _) = theirs.receive(patience).unwrap();
        assert_eq!((second, some.len()), (vec![1, 2], 600));
        for i in [0, 249, 250, 599] {
            let file = std::fs::File::from(some.take(i).unwrap());
            let of = |file: &std::fs::File| file.metadata().unwrap().ino();
            assert_eq!(of(&file), of(&files[i % 3]), "{i}");
            assert!(some.take(i).is_err());
        }
        sender.join().unwrap();
        let gone = theirs.receive::<String>(patience);
        assert!(matches!(gone, Err(WireError::Gone)));
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let (mut ours, mut theirs) = pair();
        ours.send(&7).unwrap();
        let text = theirs.receive::<String>(None);
        assert!(matches!(text, Err(WireError::Strange(_))));
        ours.0.write_all(&[b'x'; 24]).unwrap();
        let text = theirs.receive::<String>(None);
        assert!(matches!(text, Err(WireError::Strange(_))));
        let late = theirs.receive::<String>(Some(Duration::from_millis(10)));
        assert!(matches!(late, Err(WireError::Late)));
        // Half of one.
        ours.0.write_all(&MAGIC).unwrap();
        drop(ours);
        assert!(matches!(
            theirs.receive::<String>(None),
            Err(WireError::Gone)
        ));
    }
}
