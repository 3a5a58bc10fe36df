//! Offline tools: the implementation of `fathom img`.
//!
//! Each tool works on an [`ImageFile`] that the caller has opened and locked.

pub mod amend;
pub mod backing;
pub mod bitmap;
pub mod check;
pub mod create;
pub mod edit;
pub mod info;
pub mod keys;
pub mod measure;
pub(crate) mod new_backing;
pub mod resize;
pub mod snapshot;
mod snapshot_name;

pub use crate::image::Image;
pub use snapshot_name::SnapshotName;
