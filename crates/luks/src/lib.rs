//! LUKS versions 1 and 2: headers, keys and sector encryption.
//!
//! This crate opens no files: it reads headers through [`Bytes`] and returns the required writes to
//! the caller. No function is asynchronous. Deriving a key takes seconds of CPU time and, in
//! version 2, up to 1 GiB of memory.
//!
//! The only supported cipher is AES in XTS mode with plain64 or plain IVs, which is what cryptsetup
//! and QEMU create.

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
