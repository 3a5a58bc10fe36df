//! Encrypted storages: a [`Storage`](super::storage::Storage) of plaintext on top of a storage of
//! ciphertext. A LUKS image is one, and so is the guest data of an encrypted qcow2 image.
//!
//! Each request is split into pieces ([`channel`]), which are children with buffers of their own.
//! The guest therefore never sees ciphertext. A guest that changes a buffer while it is written
//! harms only itself.
//!
//! In an encrypted qcow2 image, only guest data goes through such a storage (`Tables::data`). The
//! tables are not encrypted, and use the file itself (`Tables::storage`). A new cluster of such an
//! image does not read as zeroes.

mod bytes;
mod channel;
mod helped_pieces;
mod keys;
mod piece;
mod place;
mod storage;

pub(super) use keys::Fingerprint;
pub use keys::Keys;
pub(super) use storage::{fingerprint, open_data, open_luks};
