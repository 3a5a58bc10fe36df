//! What the server of `exports`, the client of `storage` and that of `bench`
//! have in common.
//!
//! - `uri` is where an export is,
//! - `protocol` has the numbers, and the small structures as bytes,
//! - `client` is a client's handshake,
//! - `transport` has the bytes of a handshake,
//! - `vsock` has the addresses of one kind of socket.
//!
//! "NBD" and "proto.md" in comments are doc/proto.md of NetworkBlockDevice/nbd,
//! with its extension EXTENDED_HEADERS.

pub mod client;
pub mod protocol;
pub mod transport;
pub mod uri;
pub mod vsock;

pub use uri::{Address, NbdUri, TlsTerms};
