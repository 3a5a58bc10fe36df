//! Stores images in archives as stripes, and reads them.
//!
//! An archive is a directory or a prefix of an S3 bucket. The archive contains a manifest for each
//! image, and stripes, which all images share and which are identified by their hashes.
//! docs/archive.md specifies the formats. This crate also reads byte ranges of plain images on
//! servers ([`Object`]).
//!
//! All code runs in the caller's tokio runtime, whose time and I/O drivers must be enabled. No data
//! is used before it has been compared with a hash, or with the version of the object when it was
//! opened.

mod address;
mod archive;
mod elsewhere;
mod error;
#[cfg(feature = "testing")]
pub mod fuzz;
mod hash;
mod manifest;
mod object;
mod place;
pub mod profile;
mod store_error;
mod stripe;
mod writer;

pub use archive::{Image, ListedImage, Summary, list};
pub use error::Error;
pub use hash::Hash;
pub use manifest::{Manifest, STRIPE_SIZES};
pub use object::Object;
pub use stripe::{Encoded, decode, encode};
pub use writer::{Put, Writer, check_name};
