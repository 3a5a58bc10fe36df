//! Serves disks to clients over vhost-user-blk and NBD.

pub mod nbd;
pub mod vhost_user;
mod watch;

pub use nbd::NbdServer;
pub use vhost_user::VhostUser;
pub use watch::{Visit, Watch};
