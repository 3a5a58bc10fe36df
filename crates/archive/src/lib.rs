//! Images kept in stripes: an archive is a directory or a prefix of an S3 bucket, with a manifest for each
//! image and the stripes that all of them share, which are found by their hashes. docs/archive.md has the
//! formats. Plain images on servers ([`Object`]) are read a range at a time.
//!
//! All of it runs in the caller's tokio runtime, which has its clock and its network on. Nothing here is
//! believed before it was compared with a hash or with what it was when it was opened.

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
mod stripe;
mod told;
mod writer;

pub use archive::{Image, ListedImage, Summary, list};
pub use error::Error;
pub use hash::Hash;
pub use manifest::{Manifest, STRIPE_SIZES};
pub use object::Object;
pub use stripe::{Encoded, decode, encode};
pub use writer::{Put, Writer, check_name};
