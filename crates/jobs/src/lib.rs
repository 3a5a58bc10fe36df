//! Work on running disks, beside their users: one folder each.
//!
//! - `backup` keeps a disk as it was at an instant, to be read at leisure;
//! - `mirror` copies a disk to another one, and follows it until both are the same;
//! - `commit` brings what images in the middle of a chain have into one below;
//! - `stream` has an image make its own what is below it;
//! - `pull` copies a disk from the server where its guest runs, and takes it over from there.
//!
//! `source` is what they work on, `copy` the copying itself, `above` what goes into an image below, `name` what images are
//! called, and `following` how those are that stay with their disk.

mod above;
pub mod backup;
pub mod commit;
mod copy;
mod following;
pub mod mirror;
mod name;
pub mod pull;
mod source;
pub mod stream;

pub use following::{Following, Phase, Status, Tell};
pub use name::Name;
pub use source::{InUse, Source};
