//! From options to a running stack: the disks of one daemon with their workers,
//! exports and traces, its NBD server and its control socket.

mod access;
mod config;
pub mod control;
mod daemon;
mod limits;
mod nbd;
mod options;
mod repeats;
mod runtime;
mod served;
mod serving;
mod shared_disk;
mod signals;
mod socket;
mod stderr;
mod tracer;

pub use access::{parse_group, parse_mode};
pub use config::read_config;
pub use daemon::{Daemon, Ended, Error, Outcome};
pub use limits::survive_size_limit;
pub use options::{
    DiskOptions, ExportOptions, NbdOptions, ServeOptions, SocketSpec, StopTimeout, TlsOptions,
};
pub use repeats::Repeats;
pub use stderr::Stderr;
