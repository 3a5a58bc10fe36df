//! TLS on either side of a connection: certificates and keys in files, laid out as for nbdkit and QEMU, and a
//! session as bytes to bytes.

mod client;
mod files;
#[cfg(feature = "testing-certificates")]
pub mod pki;
mod session;

pub use client::ClientTls;
pub use files::{TlsError, open_here, read_certificates, read_key};
pub use session::{Opened, Session};
