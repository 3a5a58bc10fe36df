//! Who may ask: vhost-user-blk.

pub mod vhost_user;

pub use vhost_user::VhostUser;
