//! The messages between a supervisor and its tenants: JSON, each with at most one file descriptor,
//! over two sockets. On the *link*, the supervisor sends commands, and the tenant replies. At the
//! *gate*, a tenant requests files that it cannot open itself, and reports events.

use crate::users::User;
use fathom_control::RequestError;
use fathom_files::gate::{Refused, Wanted};
use fathom_metrics::Happened;
use fathom_requests::Ask;
use fathom_spec::PoolSpec;
use fathom_trace::Summary;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair, sockopt,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::slice;
use std::time::Duration;

/// Maximum bytes of a packet. A message with more bytes is sent in pieces of this size.
const MAX_PACKET: usize = 192 << 10;

/// Maximum bytes of a message. Statistics of all operations, with every bucket of every histogram,
/// have half as many.
pub const MAX_MESSAGE: usize = 4 << 20;

/// First byte of the first piece of a message, of pieces in the middle, and of the last one. A
/// message that fits into one packet is sent as it is: JSON begins with none of these bytes.
const FIRST_PIECE: u8 = 1;
const NEXT_PIECE: u8 = 2;
const LAST_PIECE: u8 = 3;

/// Version of the messages below. A supervisor may get tenants that another program has started, so
/// the version changes when one side would not understand the other. Since version 2, large
/// messages come in pieces, and a tenant sends [`FromTenant::Outcome`] before
/// [`FromTenant::Ended`].
pub const VERSION: u32 = 2;
/// The oldest version of a tenant's messages that the supervisor understands.
pub const OLDEST_VERSION: u32 = 1;

/// Messages on the link to the tenant.
#[derive(Serialize, Deserialize)]
pub enum ToTenant {
    /// The first message. If it comes with a socket, another process of this tenant hands over its
    /// disks there.
    Begin {
        /// The server's pools of threads, by name.
        pools: BTreeMap<String, PoolSpec>,
        /// Maximum time to stop after [`ToTenant::End`], in milliseconds.
        stop_timeout_ms: u64,
        /// In the syntax of the option `--sandbox`.
        sandbox: String,
        /// The user that the process becomes. None: the process keeps its user.
        user: Option<User>,
        /// Directories with settings of libraries that make network connections. None: the tenant
        /// has no such disks.
        #[serde(default)]
        connects: Option<Vec<PathBuf>>,
    },
    /// A command, which gets exactly one reply.
    Ask {
        /// Number of the command, which the reply repeats.
        number: u64,
        /// The command.
        ask: Ask,
    },
    /// Completes requests in flight, and ends.
    End,
    /// Hands over to the process at the other end of the socket that comes with this message.
    HandOver,
    /// The successor has ended, and the tenant continues.
    GoOn,
}

/// Messages on the link from the tenant. `A` is the type of a reply's content: the supervisor first
/// finds out which command a reply belongs to, and then reads it as that command's type.
#[derive(Serialize, Deserialize)]
pub enum FromTenant<A> {
    /// The reply to a command.
    Answer {
        /// Number of the command.
        number: u64,
        /// Result of the command, or the error for the user.
        answer: Result<A, RequestError>,
    },
    /// Statistics of a disk, before the last message.
    Outcome(String, Box<Summary>),
    /// The last message. Tenants of version 1 list the statistics of all disks here.
    Ended(Vec<(String, Summary)>),
    /// The successor serves the disks. The last message, too.
    HandedOver {
        /// Time for which queues were stopped, in milliseconds.
        pause_ms: f64,
    },
    /// The successor cannot take over, and must be killed: [`ToTenant::GoOn`] confirms that.
    EndSuccessor,
    /// The handover has failed, and this process continues. The text is the reason for the user, in
    /// one line.
    Stays(String),
    /// This process has taken over from its predecessor.
    Serving,
}

/// Messages at the gate from the tenant.
#[derive(Serialize, Deserialize)]
pub enum AtGate {
    /// A request, which gets a reply.
    Want(Wanted),
    /// An event, which gets no reply.
    Happened(Happened),
}

/// Replies at the gate to the tenant: the path of a file that was found by a search.
pub type FromGate = Result<Option<PathBuf>, Refused>;

/// An end of one of the two sockets.
pub struct Link {
    socket: OwnedFd,
    /// Held while a message is sent, so that no packet of another thread comes between its pieces.
    sending: Mutex<()>,
    /// Pieces of a message of which others are missing.
    pieces: Mutex<Pieces>,
}

#[derive(Default)]
struct Pieces {
    bytes: Vec<u8>,
    with: Option<OwnedFd>,
}

/// A message, and its file descriptor.
type Received<T> = Option<(T, Option<OwnedFd>)>;

impl Link {
    /// Creates a link, and returns this process's end, and the socket for the other process.
    ///
    /// # Errors
    /// The process or the system has too many open files.
    pub fn pair() -> io::Result<(Link, OwnedFd)> {
        let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (here, there) = socketpair(kind.0, kind.1, SocketFlags::CLOEXEC, None)?;
        for end in [&here, &there] {
            // (The system may limit the size.)
            let _ = sockopt::set_socket_send_buffer_size(end, 2 * MAX_PACKET);
        }
        Ok((here.into(), there))
    }

    /// Sends a message. Without `wait`, the message must fit into one packet, and a full socket is
    /// an error. A message that is too long is an error of the kind
    /// [`io::ErrorKind::FileTooLarge`], after which the link can still be used.
    pub fn send(
        &self,
        message: &impl Serialize,
        with: Option<BorrowedFd<'_>>,
        wait: bool,
    ) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        let most = if wait { MAX_MESSAGE } else { MAX_PACKET };
        if bytes.len() > most {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!(
                    "a message of {} bytes exceeds the limit of {most} bytes",
                    bytes.len()
                ),
            ));
        }
        let _sending = self.sending.lock();
        if bytes.len() <= MAX_PACKET {
            return self.send_packet(&[IoSlice::new(&bytes)], with, wait);
        }
        let pieces = bytes.chunks(MAX_PACKET - 1);
        let last = pieces.len() - 1;
        let mut with = with;
        for (index, piece) in pieces.enumerate() {
            let kind = match index {
                0 => FIRST_PIECE,
                _ if index == last => LAST_PIECE,
                _ => NEXT_PIECE,
            };
            let packet = [IoSlice::new(slice::from_ref(&kind)), IoSlice::new(piece)];
            self.send_packet(&packet, with.take(), wait)?;
        }
        Ok(())
    }

    fn send_packet(
        &self,
        bytes: &[IoSlice<'_>],
        with: Option<BorrowedFd<'_>>,
        wait: bool,
    ) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = with.as_slice();
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let mut flags = SendFlags::NOSIGNAL;
        flags.set(SendFlags::DONTWAIT, !wait);
        loop {
            match sendmsg(&self.socket, bytes, &mut control, flags) {
                Err(Errno::INTR) => {}
                sent => return Ok(sent.map(drop)?),
            }
        }
    }

    /// Waits for a message or the end of the other side. False: neither has come within this time.
    pub fn has_message(&self, within: Duration) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let within = Timespec::try_from(within).ok();
        poll(&mut fds, within.as_ref()) == Ok(1)
    }

    /// Receives a message. None: no whole message has arrived, and `wait` is false. The end of the
    /// other side is an error, as is anything that is not a message.
    pub fn receive<T: DeserializeOwned>(&self, wait: bool) -> io::Result<Received<T>> {
        let received = self.receive_bytes(wait)?;
        let parse = |(bytes, with): (Vec<u8>, _)| Ok((serde_json::from_slice(&bytes)?, with));
        received.map(parse).transpose()
    }

    /// Receives a message as JSON text, at most [`MAX_MESSAGE`] bytes.
    pub fn receive_bytes(&self, wait: bool) -> io::Result<Received<Vec<u8>>> {
        let mut pieces = self.pieces.lock();
        loop {
            let Some((mut bytes, with)) = self.receive_packet(wait)? else {
                return Ok(None);
            };
            let kind = match bytes.first() {
                Some(kind @ (&FIRST_PIECE | &NEXT_PIECE | &LAST_PIECE)) => *kind,
                _ if pieces.bytes.is_empty() => return Ok(Some((bytes, with))),
                _ => return Err(io::Error::other("a part of a message is missing")),
            };
            match (kind == FIRST_PIECE, pieces.bytes.is_empty()) {
                // A predecessor of this process has received the first pieces.
                (false, true) if wait => continue,
                (false, true) => return Ok(None),
                (true, false) => {
                    return Err(io::Error::other("a part of a message is missing"));
                }
                (true, true) | (false, false) => {}
            }
            // Pieces before the last one are full, so a message has few of them.
            if kind != LAST_PIECE && bytes.len() < MAX_PACKET {
                return Err(io::Error::other("a part of a message is too short"));
            }
            if pieces.bytes.len() + bytes.len() > MAX_MESSAGE + 1 {
                return Err(io::Error::other("the message is too long"));
            }
            pieces.bytes.extend(bytes.drain(1..));
            pieces.with = with.or(pieces.with.take());
            if kind == LAST_PIECE {
                let Pieces { bytes, with } = std::mem::take(&mut *pieces);
                return Ok(Some((bytes, with)));
            }
        }
    }

    fn receive_packet(&self, wait: bool) -> io::Result<Received<Vec<u8>>> {
        let mut bytes = vec![0; MAX_PACKET];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut flags = RecvFlags::CMSG_CLOEXEC;
        flags.set(RecvFlags::DONTWAIT, !wait);
        let received = loop {
            let mut place = [IoSliceMut::new(&mut bytes)];
            match recvmsg(&self.socket, &mut place, &mut control, flags) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                received => break received?,
            }
        };
        let mut with = None;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                with = fds.last();
            }
        }
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if received
            .flags
            .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
        {
            return Err(io::Error::other("the message is too long"));
        }
        bytes.truncate(received.bytes);
        Ok(Some((bytes, with)))
    }
}

impl From<OwnedFd> for Link {
    fn from(socket: OwnedFd) -> Link {
        Link {
            socket,
            sending: Mutex::default(),
            pieces: Mutex::default(),
        }
    }
}

/// Readable when there is a message, or the other side has ended.
impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn messages_arrive_whole_with_their_descriptors() {
        let (here, there) = Link::pair().unwrap();
        let there = Link::from(there);
        assert!(there.receive::<Value>(false).unwrap().is_none());
        let file = std::fs::File::open("/dev/null").unwrap();
        here.send(&"one", Some(file.as_fd()), true).unwrap();
        here.send(&"x".repeat(MAX_PACKET / 2), None, true).unwrap();
        let (one, with): (String, _) = there.receive(true).unwrap().unwrap();
        assert_eq!((&*one, with.is_some()), ("one", true));
        let (two, with): (String, _) = there.receive(true).unwrap().unwrap();
        assert_eq!((two.len(), with.is_some()), (MAX_PACKET / 2, false));
        drop(here);
        assert!(there.receive::<Value>(true).is_err());
    }

    #[test]
    fn large_message_arrives_in_pieces_with_its_descriptor() {
        let (here, there) = Link::pair().unwrap();
        let there = Link::from(there);
        let file = std::fs::File::open("/dev/null").unwrap();
        // With and without a last piece that is full.
        for len in [MAX_PACKET - 1, 2 * (MAX_PACKET - 1) - 2, MAX_MESSAGE - 2] {
            let text = "x".repeat(len);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    here.send(&text, Some(file.as_fd()), true).unwrap();
                    here.send(&"next", None, true).unwrap();
                });
                let (large, with): (String, _) = there.receive(true).unwrap().unwrap();
                assert!(large == text && with.is_some(), "{len}");
                let (next, with): (String, _) = there.receive(true).unwrap().unwrap();
                assert_eq!((&*next, with.is_some()), ("next", false));
            });
        }
    }

    #[test]
    fn too_long_message_is_refused_and_the_link_stays_usable() {
        let (here, there) = Link::pair().unwrap();
        let there = Link::from(there);
        for (len, wait) in [(MAX_MESSAGE - 1, true), (MAX_PACKET - 1, false)] {
            let error = here.send(&"x".repeat(len), None, wait).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
            here.send(&"next", None, wait).unwrap();
            let (next, _): (String, _) = there.receive(true).unwrap().unwrap();
            assert_eq!(next, "next");
        }
    }

    #[test]
    fn pieces_that_make_no_message_are_refused() {
        let full = |kind| {
            let mut packet = vec![b'x'; MAX_PACKET];
            packet[0] = kind;
            packet
        };
        let mut endless = vec![full(NEXT_PIECE); MAX_MESSAGE / MAX_PACKET + 2];
        endless[0][0] = FIRST_PIECE;
        for packets in [
            vec![vec![FIRST_PIECE, b'"']],
            vec![full(FIRST_PIECE), b"7".to_vec()],
            vec![full(FIRST_PIECE), full(FIRST_PIECE)],
            endless,
        ] {
            let (here, there) = Link::pair().unwrap();
            let there = Link::from(there);
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    for packet in packets {
                        if here
                            .send_packet(&[IoSlice::new(&packet)], None, true)
                            .is_err()
                        {
                            break;
                        }
                    }
                });
                assert!(there.receive::<Value>(true).is_err());
                drop(there);
            });
        }
    }

    #[test]
    fn rest_of_a_message_that_a_predecessor_began_is_skipped() {
        let (here, there) = Link::pair().unwrap();
        let there = Link::from(there);
        let rest: [&[u8]; 3] = [&[NEXT_PIECE, b'x'], &[LAST_PIECE, b'"'], b"7"];
        for packet in rest {
            here.send_packet(&[IoSlice::new(packet)], None, true)
                .unwrap();
        }
        assert_eq!(there.receive::<u8>(true).unwrap().unwrap().0, 7);
    }

    #[test]
    fn send_without_waiting_fails_when_the_socket_is_full() {
        let (here, _there) = Link::pair().unwrap();
        let message = "x".repeat(MAX_PACKET / 2);
        let sent = (0..100).take_while(|_| here.send(&message, None, false).is_ok());
        assert!(sent.count() < 100);
    }
}
