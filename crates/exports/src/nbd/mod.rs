//! An NBD server.
//!
//! An [`NbdServer`] serves several disks, each under its export name, to many clients at once. Each
//! connection has a thread, which runs the handshake and then sleeps until the connection ends.
//! Requests do not pass through that thread: a connection in the transmission phase is a
//! [`Source`](fathom_core::Source) of one of the disk's workers.
//!
//! - `listen` creates the listening sockets,
//! - `server` accepts and ends connections; `table` holds their states,
//! - `handshake` negotiates which disk a client uses, and how,
//! - `tls` holds the server's certificates and keys,
//! - `export` holds the exports,
//! - `moving` lets another server take over a disk,
//! - `holding` pauses clients, for example to hand them over to another process,
//! - `connection` serves requests.
//!
//! The wire format is in `fathom-nbd`. "proto.md" in comments is doc/proto.md of the
//! NetworkBlockDevice project, with its extension EXTENDED_HEADERS.

mod admission;
pub mod connection;
mod export;
#[cfg(feature = "testing")]
pub mod fuzz;
mod handshake;
mod holding;
mod listen;
mod moving;
mod peer;
mod server;
mod table;
mod tls;

pub use export::{Export, Exports, SameName};
pub use holding::ClientState;
pub use listen::{Address, listen_at, local_name};
pub use moving::{Moving, Wake};
pub use server::{ConnectionInfo, Leaving, NbdServer, Options};
pub use tls::{Mode as TlsMode, Tls};
