//! TLS on either side of a connection: certificates and keys in files, laid out as for nbdkit and QEMU, and a
//! session as bytes to bytes.

mod client;
mod files;
#[cfg(feature = "testing-certificates")]
pub mod pki;
mod server;
mod session;

pub use client::{ClientTls, client_config};
pub use files::{ClientFiles, TlsError, open_here, read_certificates};
pub use server::server_config;
pub use session::{Opened, Session};
