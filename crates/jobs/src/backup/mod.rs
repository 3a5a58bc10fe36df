//! Serves a disk as it was at an instant while its users change it.
//!
//! - `terms` are the parameters and the status;
//! - `keeper` is the thread that copies data to a scratch file before it is overwritten;
//! - `view` is the disk as it was, composed of the scratch file and of unchanged data;
//! - `handle` starts and ends a backup.
//!
//! The disk's users take precedence. If original data cannot be saved, the backup fails and users
//! continue. Reasons are a full scratch file, a failed read, or a timeout.

mod handle;
mod keeper;
mod terms;
mod view;

pub use handle::Backup;
pub use terms::{Failed, Status, Terms};
