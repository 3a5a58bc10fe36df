//! What of a disk has been changed since somebody was here last: its dirty bitmaps.
//!
//! Each bitmap is a file in a directory beside the image, a bit for each block, mapped into memory: a worker marks
//! what a request changes before it passes the request on. So it is right when the process is killed at any
//! instant. After the machine has gone down, and after something else has changed the image's file, nobody
//! knows what is missing: all counts as dirty then, and the reason is told. It is never too clean.
//!
//! `header` is the beginning of such a file, `mapping` its bits in memory, `bitmap` the two together; `all` are those of
//! a disk, in `place`, `limits` what there may be, `status` what is told of one. Those of a qcow2 image are in the image
//! itself whenever the disk is not in use: `own`. Tools see to those of a disk that nobody serves: `unserved`.
//!
//! A backup begins the bitmap's *successor*, which marks what is changed from its instant on. The bitmap itself
//! goes on, too: if the backup is of no use, nothing has happened. When it is known to be safe the bitmap
//! *advances*: its successor takes its place, by one rename.

mod all;
mod bitmap;
mod header;
mod limits;
mod mapping;
mod own;
mod place;
mod status;
mod successor;
#[cfg(test)]
mod tests;
mod unserved;

pub use all::Bitmaps;
pub(crate) use all::Marked;
pub use bitmap::Dirty;
pub(crate) use header::{Left, data_of};
pub use limits::check_bitmap_name;
pub(crate) use place::Place;
pub use status::BitmapStatus;
