//! What is below a disk's own image becomes its own while users go on, until it needs another image below it, or none.
//!
//! - `terms` are what is asked for;
//! - `streamer` is what the thread does: it finds what is to become the image's own, and reads it by the disk beside that of
//!   the users, which copies on read; at the end it names the other image in the header;
//! - it is started by way of `handle`, and asked as all are that follow their disk (`following`).
//!
//! What users write meanwhile is the image's own at once. What goes wrong ends it, and the disk is as before: it only has
//! more of its own.

mod compare;
mod handle;
mod streamer;
mod terms;

pub use handle::start;
pub use terms::{Below, Terms};
