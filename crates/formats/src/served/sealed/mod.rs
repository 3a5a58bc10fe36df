//! Bytes that lie encrypted in a file: a [`Storage`](super::storage::Storage) as they are, on top of
//! one as they lie there. A LUKS image is one, and so is where a qcow2 image has its guest data if
//! that is encrypted.
//!
//! Each request becomes pieces ([`channel`]), each a child with a buffer of its own: the guest sees no
//! ciphertext, and what it changes while it is written harms only itself.
//!
//! In an encrypted qcow2 image, only guest data goes through such a storage (`Tables::data`). The
//! tables are not encrypted, and use the file itself (`Tables::storage`). A new cluster of such an
//! image does not read as zeroes.

mod away;
mod bytes;
mod channel;
mod keys;
mod piece;
mod place;
mod storage;

pub(super) use keys::Fingerprint;
pub use keys::Keys;
pub(super) use storage::{fingerprint, open_data, open_luks};
