//! LUKS, versions 1 and 2: headers, keys and the encryption of sectors.
//!
//! Opens no file: headers are read through [`Bytes`], and what is to be
//! written is handed to the caller. Nothing here is asynchronous; deriving a
//! key takes seconds of a processor, and up to 1 GiB of memory in version 2.
//!
//! Supported is AES in XTS mode with IVs of plain64 or plain, which is what
//! cryptsetup and QEMU make.

mod af;
mod bytes;
mod change;
mod create;
mod describe;
mod effort;
mod error;
mod guarded;
mod hash;
mod header;
mod kdf;
mod keys;
mod parts;
mod payload;
mod random;
mod secret;
mod slot;
mod tweak;
mod v1;
mod v2;
mod xts;

pub use bytes::Bytes;
pub use change::Change;
pub use create::{Created, Options, create};
pub use describe::{Description, FreeSlot, SlotDescription};
pub use effort::Effort;
pub use error::{Error, Result};
pub use hash::Hash;
pub use header::Header;
pub use keys::Added;
pub use payload::{Iv, Payload};
pub use secret::{MAX_PASSPHRASE, Passphrase, VolumeKey};
pub use xts::Sectors;
