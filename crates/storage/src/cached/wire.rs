//! Protocol between a base image's keeper and its users: JSON messages over a SOCK_SEQPACKET
//! socket, which preserves message boundaries. The first message carries two file descriptors.

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

/// Protocol version; changes whenever either side would not understand the other.
pub const VERSION: u32 = 1;

/// Maximum length of a message in bytes.
pub const MAX_MESSAGE: usize = 64 << 10;

/// Maximum number of runs in one [`ToKeeper::Used`].
pub const MAX_RUNS: usize = 2048;

/// Maximum number of requests of one user that the keeper remembers.
pub const MAX_WANTED: usize = 1 << 15;

/// A run of stripes: the first one, and their number.
pub type Run = (u32, u32);

/// Message from a user of the image to its keeper.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToKeeper {
    /// Fetch these stripes as soon as possible.
    Want(Run),
    /// These stripes have been used since the last message. Stripes used for the first time are in
    /// the order of their use; later ones are in any order.
    Used(Vec<Run>),
}

/// Message from the keeper to a user of the image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromKeeper {
    /// First message: with the file descriptors of the data and of the live map.
    Welcome(Geometry, Identity),
    /// First and last message: why the image is not available, as one line for the user.
    Refused(String),
    /// These stripes are in the cache, or were.
    Here(Run),
    /// These stripes cannot be fetched, for a reason given as one line. Repeating the request does
    /// not help.
    Failed(Run, String),
    /// The remote does not deliver data, for this reason; the keeper retries.
    Away(String),
    /// The remote delivers data again.
    Back,
}

/// Identity of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Location from which the image is fetched, as users write it.
    pub remote: String,
    /// Identifies this version among earlier and later images at the same location.
    pub version: String,
}

/// Geometry of a base image. Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// Version of the keeper's protocol. Only [`VERSION`] is accepted.
    pub version: u32,
    /// Size of the image.
    pub size: u64,
    /// Stripe size; a power of two.
    pub stripe: u64,
}

/// Maximum number of stripes of an image.
pub const MAX_STRIPES: u64 = 1 << 26;

impl Geometry {
    /// Returns the number of stripes, of which the last may be shorter than the others.
    pub fn stripes(&self) -> u64 {
        self.size.div_ceil(self.stripe)
    }

    /// Checks the values, which come from an untrusted process.
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

    /// Returns the stripes of a non-empty range within the image.
    pub fn run(&self, at: u64, len: u64) -> Run {
        let shift = self.stripe.trailing_zeros();
        let (first, last) = (at >> shift, (at + len - 1) >> shift);
        (first as u32, (last - first + 1) as u32)
    }
}

/// Sends a whole message, or nothing. [`io::ErrorKind::WouldBlock`]: the socket has no room for it
/// now.
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

/// Receives a message and its file descriptors without blocking. [`io::ErrorKind::WouldBlock`]: no
/// message is available. A closed connection is an error, too.
pub fn receive<T: DeserializeOwned>(socket: impl AsFd) -> io::Result<(T, Vec<OwnedFd>)> {
    take(socket, RecvFlags::empty())
}

/// Reads a message like [`receive`], but leaves it in the socket.
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
