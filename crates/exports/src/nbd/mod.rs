//! A disk for anything that speaks NBD.
//!
//! One [`NbdServer`] serves several disks, each under a name, to many clients
//! at once. Each connection has a thread of its own, which goes through the
//! handshake and then sleeps until the connection has ended: requests never
//! pass through it, since a connection in the transmission phase is a
//! [`Source`](fathom_core::Source) of one of the disk's workers.
//!
//! - `listen` is where clients connect,
//! - `server` accepts and ends connections, of which `table` knows what they do,
//! - `handshake` finds out which disk a client wants, and how,
//! - `tls` is what is needed for encryption,
//! - `export` is what there is to choose from,
//! - `moving` lets another server take a disk over,
//! - `holding` holds clients up, for another process to go on with them,
//! - `connection` serves requests.
//!
//! How all of it looks is in `fathom-nbd`. "proto.md" in comments is doc/proto.md
//! of the NetworkBlockDevice project, with its extension EXTENDED_HEADERS.

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
