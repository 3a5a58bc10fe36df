//! TLS for clients and servers: certificates and keys in files laid out as for nbdkit and QEMU, and
//! sessions.
//!
//! A session converts between plain text and encrypted bytes, without I/O.

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
