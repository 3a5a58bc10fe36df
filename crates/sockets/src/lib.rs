//! Sockets at which clients connect: bound to a path, inherited, or handed over to another process.

mod descriptors;
mod inherited;
mod listener;
pub mod occupant;
mod runtime_dir;

pub use descriptors::Descriptors;
pub use inherited::{InheritedError, Wanted, path_of};
pub use listener::{Access, BACKLOG, Bound, ListenError, Listener, ListenerState};
pub use runtime_dir::{make_parent_of, runtime_dir};
