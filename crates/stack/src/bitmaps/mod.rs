//! Dirty bitmaps: the blocks of a disk that were changed since some instant.
//!
//! Each bitmap is a file in a directory next to the image, with one bit per block, mapped into
//! memory. A worker marks the range of a request before it submits the request. Therefore the
//! bitmap is right even if the process is killed at any instant. After a crash of the machine, and
//! after another program has changed the image's file, missing changes are unknown: everything
//! counts as dirty then, and the reason is reported. The bitmap never misses a change.
//!
//! `header` is the start of such a file, `mapping` its bits in memory, and `bitmap` both together.
//! `all` are the bitmaps of a disk, in a `place`; `limits` restrict them, and `status` describes
//! one. The bitmaps of a qcow2 image are in the image itself whenever the disk is not in use:
//! `own`. Tools manage the bitmaps of a disk that no server uses: `unserved`.
//!
//! A backup begins a *successor* of the bitmap, which marks changes from the backup's instant on.
//! The bitmap itself is marked, too, so that a failed backup has no effect. When the backup is
//! known to be safe, the bitmap *advances*: its successor takes its place, by one rename.

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
