//! Background jobs on disks in use, one folder each.
//!
//! - `backup` serves a disk as it was at an instant;
//! - `mirror` copies a disk to another one and follows its changes until both are identical;
//! - `commit` copies data of intermediate images of a chain into an image below them;
//! - `stream` copies data of backing images into the top image;
//! - `pull` copies a disk from the server where its guest runs, and takes it over from there.
//!
//! `source` is the disk on which jobs work, and `copy` does the copying. `above` finds the data
//! that goes into an image below, and `name` is the name of a backing image. `following` is the
//! state of jobs that follow their disk.

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
