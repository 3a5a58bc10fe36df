//! What a supervisor and its tenants tell each other: whole messages in JSON, each with a descriptor
//! at most, over two sockets. On the *link* the supervisor asks and the tenant answers; at the *gate*
//! a tenant asks for what it cannot open itself, and tells what happens.

use crate::answer::Refusal;
use crate::command::Ask;
use crate::events::Happened;
use crate::table::PoolTable;
use crate::users::User;
use fathom_files::gate::{Refused, Wanted};
use fathom_trace::Summary;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair, sockopt,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

/// The largest message. The largest that makes sense, a disk with all of its clients, has a quarter
/// of it.
const MAX_MESSAGE: usize = 192 << 10;

/// Of what is below. It changes when one side would not understand the other any more: a supervisor's
/// successor may be another program than the tenants that it gets.
pub const VERSION: u32 = 1;

/// On the link, to the tenant.
#[derive(Serialize, Deserialize)]
pub enum ToTenant {
    /// Once, first. With a socket, at whose other end another process of this tenant hands over what
    /// it has.
    Begin {
        pools: BTreeMap<String, PoolTable>,
        stop_timeout_ms: u64,
        /// As users write it.
        sandbox: String,
        /// Who it is to be; None: who it is.
        user: Option<User>,
        /// A library makes connections for its disks, in its process, by what these directories say, too.
        #[serde(default)]
        connects: Option<Vec<PathBuf>>,
    },
    Ask {
        number: u64,
        ask: Ask,
    },
    /// Finish what is in flight, and end.
    End,
    /// Hand over to the process at the other end of the socket that comes with this.
    HandOver,
    /// The process that was to take over is dead.
    GoOn,
}

/// On the link, from the tenant.
#[derive(Serialize, Deserialize)]
pub enum FromTenant {
    Answer {
        /// Of what was asked.
        number: u64,
        answer: Result<Value, Refusal>,
    },
    /// The last message: where the requests spent their time, by disk.
    Ended(Vec<(String, Summary)>),
    /// The other process serves the disks; queues stood still for so long. The last message, too.
    HandedOver { pause_ms: f64 },
    /// The other process cannot take over, and is to be killed: [`ToTenant::GoOn`] says that it was.
    EndSuccessor,
    /// This one goes on. One line for the user.
    Stays(String),
    /// It has taken over.
    Serving,
}

/// At the gate, from the tenant.
#[derive(Serialize, Deserialize)]
pub enum AtGate {
    /// To be answered.
    Want(Wanted),
    Happened(Happened),
}

/// At the gate, to the tenant: where what was wanted is, of what was found by searching.
pub type FromGate = Result<Option<PathBuf>, Refused>;

/// One end of one of the two sockets.
pub struct Link(OwnedFd);

impl Link {
    pub fn pair() -> io::Result<(Link, OwnedFd)> {
        let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (here, there) = socketpair(kind.0, kind.1, SocketFlags::CLOEXEC, None)?;
        for end in [&here, &there] {
            // As much as the system allows.
            let _ = sockopt::set_socket_send_buffer_size(end, 2 * MAX_MESSAGE);
        }
        Ok((Link(here), there))
    }

    /// Waits for room, or not: then there is an error if there is none.
    pub fn send(
        &self,
        message: &impl Serialize,
        with: Option<BorrowedFd<'_>>,
        wait: bool,
    ) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MAX_MESSAGE {
            return Err(io::Error::other("a message is too long"));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = with.as_slice();
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let mut flags = SendFlags::NOSIGNAL;
        flags.set(SendFlags::DONTWAIT, !wait);
        loop {
            match sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, flags) {
                Err(Errno::INTR) => {}
                sent => return Ok(sent.map(drop)?),
            }
        }
    }

    /// Whether within this time there is a message, or the other side ends.
    pub fn has_message(&self, within: Duration) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        let within = Timespec::try_from(within).ok();
        poll(&mut fds, within.as_ref()) == Ok(1)
    }

    /// None: there is nothing, and nothing was to be waited for. At the end of the other side there
    /// is an error, as there is if this is no message.
    pub fn receive<T: DeserializeOwned>(
        &self,
        wait: bool,
    ) -> io::Result<Option<(T, Option<OwnedFd>)>> {
        let mut bytes = vec![0; MAX_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut flags = RecvFlags::CMSG_CLOEXEC;
        flags.set(RecvFlags::DONTWAIT, !wait);
        let received = loop {
            let mut place = [IoSliceMut::new(&mut bytes)];
            match recvmsg(&self.0, &mut place, &mut control, flags) {
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
            return Err(io::Error::other("a message is too long"));
        }
        Ok(Some((
            serde_json::from_slice(&bytes[..received.bytes])?,
            with,
        )))
    }
}

impl From<OwnedFd> for Link {
    fn from(socket: OwnedFd) -> Link {
        Link(socket)
    }
}

/// Readable when there is a message, or the other side has ended.
impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_whole_with_their_descriptors() {
        let (here, there) = Link::pair().unwrap();
        let there = Link::from(there);
        assert!(there.receive::<Value>(false).unwrap().is_none());
        let file = std::fs::File::open("/dev/null").unwrap();
        here.send(&"one", Some(file.as_fd()), true).unwrap();
        here.send(&"x".repeat(MAX_MESSAGE / 2), None, true).unwrap();
        let (one, with): (String, _) = there.receive(true).unwrap().unwrap();
        assert_eq!((&*one, with.is_some()), ("one", true));
        let (two, with): (String, _) = there.receive(true).unwrap().unwrap();
        assert_eq!((two.len(), with.is_some()), (MAX_MESSAGE / 2, false));
        assert!(here.send(&"x".repeat(MAX_MESSAGE), None, true).is_err());
        drop(here);
        assert!(there.receive::<Value>(true).is_err());
    }

    #[test]
    fn who_does_not_read_is_not_waited_for() {
        let (here, _there) = Link::pair().unwrap();
        let message = "x".repeat(MAX_MESSAGE / 2);
        let sent = (0..100).take_while(|_| here.send(&message, None, false).is_ok());
        assert!(sent.count() < 100);
    }
}
