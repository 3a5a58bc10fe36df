//! Who may ask: vhost-user-blk and NBD.

mod listen;
pub mod nbd;
pub mod vhost_user;

pub use listen::{ListenError, Listener};
pub use vhost_user::VhostUser;
