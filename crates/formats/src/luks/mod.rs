//! LUKS images: a header with key slots, followed by an encrypted raw disk.

mod create;
mod driver;
mod image;
mod part;
mod resize;

pub(crate) use driver::LuksDriver;
pub use image::LuksImage;
pub(crate) use part::{Part, qcow2_header, refused};
