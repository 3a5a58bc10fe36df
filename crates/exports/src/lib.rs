//! Who may ask: vhost-user-blk and NBD.

mod descriptors;
mod listen;
pub mod nbd;
pub mod occupant;
mod signal;
pub mod vhost_user;
mod watch;

pub use descriptors::Descriptors;
pub use listen::{Access, Bound, ListenError, Listener, ListenerState};
pub use nbd::NbdServer;
pub use vhost_user::VhostUser;
pub use watch::{Visit, Watch};
