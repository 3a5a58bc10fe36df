//! The files of a server: its configuration, and the directory with the definitions of persistent
//! disks.

mod config;
mod keeper;
mod kept;
mod reread;

pub use config::read_config;
pub use keeper::Keeper;
pub use kept::KeptDisks;
pub use reread::{Reread, reread};
