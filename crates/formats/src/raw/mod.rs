//! Raw images: the file's bytes are the disk's bytes.

mod create;
mod driver;
mod image;
mod resize;

pub(crate) use driver::RawDriver;
pub use image::RawImage;
pub(crate) use resize::resize;
