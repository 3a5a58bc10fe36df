//! Sockets of front-ends and NBD clients: created here, or inherited.

use crate::error::Error;
use fathom_exports::nbd::{Address, listen_at};
use fathom_sockets::{Access, Listener, Wanted, make_parent_of};
use fathom_spec::SocketSpec;
use rustix::net::AddressFamily;
use std::path::Path;

const VHOST_USER: Wanted = Wanted {
    option: "--vhost-user",
    families: &[AddressFamily::UNIX],
    kind: "Unix stream socket",
};

const NBD: Wanted = Wanted {
    option: "--nbd",
    families: &[
        AddressFamily::UNIX,
        AddressFamily::INET,
        AddressFamily::INET6,
        AddressFamily::VSOCK,
    ],
    kind: "stream socket (Unix, TCP or vsock)",
};

/// Listens for the front-ends of a disk. Must be called before threads exist that read the
/// environment, as [`Wanted::activated`] demands.
pub fn listen_for_front_ends(spec: &SocketSpec, access: Access) -> Result<Listener, Error> {
    match spec {
        SocketSpec::Path(path) => {
            make_directory_of(path)?;
            Ok(Listener::bind(path, access)?)
        }
        SocketSpec::Fd(fd) => Ok(VHOST_USER.inherited(*fd)?),
        SocketSpec::Activated => {
            let mut sockets = VHOST_USER.activated()?;
            match (sockets.pop(), sockets.len()) {
                (Some(socket), 0) => Ok(socket),
                (_, n) => Err(Error::Inherited(VHOST_USER.problem(format!(
                    "the service manager passed {} sockets, and the disk needs exactly one",
                    n + 1
                )))),
            }
        }
    }
}

/// Listens at all `addresses` for NBD clients. Must be called as early as
/// [`listen_for_front_ends`].
pub fn listen_for_nbd<'a>(
    addresses: impl Iterator<Item = &'a Address>,
    access: Access,
) -> Result<Vec<Listener>, Error> {
    let mut listeners = Vec::new();
    for address in addresses {
        match address {
            Address::Fd(fd) => listeners.push(NBD.inherited(*fd)?),
            Address::Activated => listeners.extend(NBD.activated()?),
            address => {
                if let Address::Unix(path) = address {
                    make_directory_of(path)?;
                }
                listeners.extend(listen_at(address, access)?);
            }
        }
    }
    Ok(listeners)
}

fn make_directory_of(socket: &Path) -> Result<(), Error> {
    make_parent_of(socket).map_err(Error::io("cannot create the directory of a socket"))
}
