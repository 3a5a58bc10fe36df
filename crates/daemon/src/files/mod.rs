//! What a server reads and writes: its configuration, and a directory with a file for each disk that
//! it keeps.

mod config;
mod keeper;
mod kept;
mod reread;

pub use config::read_config;
pub use keeper::Keeper;
pub use kept::KeptDisks;
pub use reread::{Reread, reread};
