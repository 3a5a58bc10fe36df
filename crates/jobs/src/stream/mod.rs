//! Copies data of backing images into the top image while the disk is in use. Afterwards the image
//! needs another backing image, or none.
//!
//! - `terms` are the parameters;
//! - `streamer` is the thread: it finds the data that the image needs, and reads it through a side
//!   view that copies on read. At the end it writes the new backing image to the header;
//! - `handle` starts the job, which is controlled like all jobs that follow their disk
//!   (`following`).
//!
//! Data that users write meanwhile belongs to the image at once. A failure ends the job and leaves
//! the disk unchanged: the image merely holds more data of its own.

mod compare;
mod handle;
mod streamer;
mod terms;

pub use handle::start;
pub use terms::{Below, Terms};
