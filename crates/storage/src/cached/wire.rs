//! What a base image's keeper and those who use the image tell each other: messages in JSON over a socket that
//! keeps them apart (SOCK_SEQPACKET), the first one with two descriptors.

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// It changes when one side would not understand the other any more.
pub const VERSION: u32 = 1;

/// The longest message.
pub const MAX_MESSAGE: usize = 64 << 10;

/// The most runs in one [`ToKeeper::Used`].
pub const MAX_RUNS: usize = 2048;

/// So many requests of one user the keeper has in mind.
pub const MAX_WANTED: usize = 1 << 15;

/// A first stripe, and how many.
pub type Run = (u32, u32);

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToKeeper {
    /// These stripes, as soon as can be.
    Want(Run),
    /// These have been used since the last time, for the first time in this order or, later, in any.
    Used(Vec<Run>),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromKeeper {
    /// First: with the file of the data and that of the map.
    Welcome(Geometry, Identity),
    /// First and last: why there is nothing to be had. One line for the user.
    Refused(String),
    /// These stripes are there, or were.
    Here(Run),
    /// These cannot be had, and it does not help to ask again. One line.
    Failed(Run, String),
    /// What comes from afar does not come, for this reason; it is tried again.
    Away(String),
    /// It comes again.
    Back,
}

/// Which image it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Where it comes from, as users write it.
    pub remote: String,
    /// What tells it from others that were, or will be, there.
    pub version: String,
}

/// Of a base image. Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    pub version: u32,
    pub size: u64,
    /// A power of two.
    pub stripe: u64,
}

/// The most stripes of an image.
pub const MAX_STRIPES: u64 = 1 << 26;

impl Geometry {
    pub fn stripes(&self) -> u64 {
        self.size.div_ceil(self.stripe)
    }

    /// Believes nothing.
    pub fn check(&self) -> Result<(), String> {
        match self {
            Geometry { version, .. } if *version != VERSION => Err(format!(
                "its keeper uses protocol version {version}, this program version {VERSION}; end \
                 the keeper, and the server starts a new one"
            )),
            Geometry { size: 0, .. } => Err("the image is empty".into()),
            Geometry { size, .. } if *size > i64::MAX as u64 => {
                Err("the image is too large".into())
            }
            Geometry { stripe, .. }
                if !stripe.is_power_of_two() || !(4096..=1 << 26).contains(stripe) =>
            {
                Err(format!("unsupported stripe size of {stripe} bytes"))
            }
            all if all.stripes() > MAX_STRIPES => Err("too many stripes; use larger ones".into()),
            _ => Ok(()),
        }
    }

    /// The stripes of a range that is not empty and within the image.
    pub fn run(&self, at: u64, len: u64) -> Run {
        let shift = self.stripe.trailing_zeros();
        let (first, last) = (at >> shift, (at + len - 1) >> shift);
        (first as u32, (last - first + 1) as u32)
    }
}

/// Sends a whole message, or nothing; [`io::ErrorKind::WouldBlock`]: there is no room for it now.
pub fn send(
    socket: impl AsFd,
    message: &impl Serialize,
    with: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !with.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(with));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    loop {
        match sendmsg(&socket, &[IoSlice::new(&bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            sent => return Ok(sent.map(drop)?),
        }
    }
}

/// A message that is there, and what came with it; [`io::ErrorKind::WouldBlock`]: there is none. The other side's
/// end is an error, too.
pub fn receive<T: DeserializeOwned>(socket: impl AsFd) -> io::Result<(T, Vec<OwnedFd>)> {
    take(socket, RecvFlags::empty())
}

/// Likewise, but leaves the message there for [`receive`].
pub fn peek<T: DeserializeOwned>(socket: impl AsFd) -> io::Result<T> {
    Ok(take(socket, RecvFlags::PEEK)?.0)
}

fn take<T: DeserializeOwned>(socket: impl AsFd, how: RecvFlags) -> io::Result<(T, Vec<OwnedFd>)> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT | how;
    let got = loop {
        let into = &mut [IoSliceMut::new(&mut bytes)];
        match recvmsg(&socket, into, &mut control, flags) {
            Err(Errno::INTR) => {}
            got => break got?,
        }
    };
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            files.extend(fds);
        }
    }
    if got.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if got.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::other("the message is too long"));
    }
    Ok((serde_json::from_slice(&bytes[..got.bytes])?, files))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn messages_arrive_whole_with_their_files() {
        let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (a, b) = socketpair(kind.0, kind.1, SocketFlags::CLOEXEC, None).unwrap();
        let kind = |error: io::Error| error.kind();
        let nothing = receive::<ToKeeper>(&b).map_err(kind).unwrap_err();
        assert_eq!(nothing, io::ErrorKind::WouldBlock);
        let geometry = Geometry {
            version: VERSION,
            size: 5 << 20,
            stripe: 1 << 20,
        };
        let files = [a.as_fd(), b.as_fd()];
        let identity = Identity {
            remote: "https://h/x".into(),
            version: "tag".into(),
        };
        let welcome = FromKeeper::Welcome(geometry, identity);
        send(&a, &welcome, &files).unwrap();
        let longest = ToKeeper::Used(vec![(u32::MAX, u32::MAX); MAX_RUNS]);
        send(&a, &longest, &[]).unwrap();
        assert_eq!(peek::<FromKeeper>(&b).unwrap(), welcome);
        let (received, files) = receive::<FromKeeper>(&b).unwrap();
        assert_eq!((received, files.len()), (welcome, 2));
        assert_eq!(receive::<ToKeeper>(&b).unwrap().0, longest);
        drop((a, files));
        let end = receive::<ToKeeper>(&b).map_err(kind).unwrap_err();
        assert_eq!(end, io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_geometry_is_not_believed() {
        let (version, size, stripe) = (VERSION, 1 << 40, 1 << 18);
        let good = Geometry {
            version,
            size,
            stripe,
        };
        assert_eq!(good.check(), Ok(()));
        assert_eq!(good.run((1 << 18) - 1, 2), (0, 2));
        assert_eq!(good.run((1 << 40) - 512, 512), ((1 << 22) - 1, 1));
        for bad in [
            Geometry { version: 0, ..good },
            Geometry { size: 0, ..good },
            Geometry {
                size: u64::MAX,
                ..good
            },
            Geometry { stripe: 0, ..good },
            Geometry {
                stripe: 5000,
                ..good
            },
            Geometry {
                stripe: 512,
                ..good
            },
            Geometry {
                size: 1 << 62,
                ..good
            },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
