//! Access to image files before they are opened as disks.
//!
//! Opens files, detects other users of an image by QEMU's locks, and detects the image's format by
//! its first bytes.

pub mod gate;
pub mod lasting;
pub mod lock;
pub mod magic;
pub mod open_mark;
pub mod superseded;
pub mod trusted;

mod file_id;
mod holder;
mod image_file;
mod missing;

pub use file_id::{FileId, UsedFile, check_same};
pub use image_file::{ImageFile, read_up_to};
pub use missing::{explain_create, missing_directory};
