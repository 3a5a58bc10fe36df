//! The options of disks and pools, each defined once: for the command line (clap), for
//! configurations and files of disks (serde), and for the API's description (utoipa).

mod access;
mod alarm;
mod changes;
mod check;
mod disk;
mod export;
mod file;
pub mod filters;
mod name;
mod pool;
mod socket;
pub mod text;
pub mod values;

pub use access::{Group, Mode};
pub use alarm::{Alarm, Limit, WINDOW, name_of};
pub use changes::Changes;
pub use disk::{DEFAULT_QUEUES, DiskSpec};
pub use export::check_text;
pub use file::{line_of, parse_toml, read_definition, stem, unreadable};
pub use name::{check_first, check_name, check_path};
pub use pool::PoolSpec;
pub use socket::{SocketSpec, socket_parser};
