//! TLS on either side of a connection: certificates and keys in files, laid out as for nbdkit and QEMU, and a
//! session as bytes to bytes.

mod files;
mod session;

pub use files::{TlsError, read_certificates, read_key};
pub use session::{Opened, Session};
