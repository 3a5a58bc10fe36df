//! Serves disks to clients over vhost-user-blk and NBD, and to programs as files by FUSE.

pub mod fuse;
pub mod nbd;
pub mod vhost_user;
mod watch;

pub use fuse::FuseExport;
pub use nbd::NbdServer;
pub use vhost_user::VhostUser;
pub use watch::{Visit, Watch};
