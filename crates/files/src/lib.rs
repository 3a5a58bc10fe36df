//! What an image's file shows to everybody, before it is opened as a disk: who
//! else uses it (QEMU's locks), and the format that its first bytes tell. And how files are come by.

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
