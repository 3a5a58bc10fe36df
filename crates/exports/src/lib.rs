//! Who may ask: vhost-user-blk and NBD.

mod listen;
pub mod nbd;
mod signal;
pub mod vhost_user;
mod watch;

pub use listen::{Access, ListenError, Listener};
pub use nbd::NbdServer;
pub use vhost_user::VhostUser;
pub use watch::{Visit, Watch};
