//! Image formats: qcow2 and QED, served to guests and edited offline.
//!
//! [`qcow2`] and [`qed`] parse and encode the formats' structures. Both modules validate every
//! field and do no I/O. [`served`] serves an image as a disk of a running guest. [`offline`]
//! implements `fathom img create | info | check` for images that are not in use, on an
//! [`ImageFile`](fathom_files::ImageFile).
//!
//! Images are untrusted. Sizes and counts read from an image are bounded before they cause an
//! allocation or a loop. Each [`Error`] is one line.

mod driver;
mod drivers;
mod error;
mod foreign;
mod format;
mod image;
mod image_header;
mod luks;
mod names;
pub mod offline;
mod offset;
pub mod qcow2;
pub mod qed;
mod raw;
pub mod served;
#[cfg(feature = "testing")]
pub mod testing;

pub use error::{Error, Result};
pub use format::Format;
pub use image::Image;
pub use image_header::ImageHeader;
pub use luks::LuksImage;
pub use names::{file_name_of, resolve, shown};
pub use offset::{GuestOffset, HostOffset};
pub use raw::RawImage;
