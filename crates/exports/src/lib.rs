//! Who may ask: vhost-user-blk, NBD.

pub mod nbd;
pub mod vhost_user;

pub use vhost_user::VhostUser;
