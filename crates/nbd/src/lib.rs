//! The NBD protocol, for the server in `exports` and the clients in `storage` and `bench`.
//!
//! - `uri` has addresses of exports.
//! - `protocol` has numbers, and small structures as bytes.
//! - `client` has the client's handshake.
//! - `transport` sends and receives the bytes of a handshake.
//! - `vsock` has addresses of AF_VSOCK sockets.
//!
//! "NBD" and "proto.md" in comments refer to doc/proto.md of NetworkBlockDevice/nbd, with its
//! extension EXTENDED_HEADERS.

pub mod client;
pub mod protocol;
pub mod transport;
pub mod uri;
pub mod vsock;

pub use uri::{Address, NbdUri, TlsTerms};
