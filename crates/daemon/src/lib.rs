//! From options to a running stack: the disks of one daemon with their workers,
//! exports and traces, its NBD server and its control socket.

mod access;
mod assemble;
mod config;
mod confined;
pub mod control;
mod cow;
mod daemon;
mod filters;
mod image_files;
mod inject;
mod limits;
mod magic;
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
pub use confined::{AllowedDirs, data_file, no_data_file};
pub use daemon::{Daemon, Ended, Error, Outcome};
pub use fathom_core::Polling;
pub use fathom_exports::Access;
pub use fathom_exports::nbd::{Address, TlsMode};
pub use fathom_filters::{About, FILTERS, Spec, find as find_filter};
pub use fathom_formats::Format;
pub use fathom_storage::{Cache, EngineKind};
pub use fathom_trace::Summary;
pub use fathom_trace::ring;
pub use image_files::{ImageOpener, StoredImage};
pub use inject::{Injected, Injection};
pub use limits::survive_size_limit;
pub use options::{
    CpuList, DiskOptions, DiskSpec, ExportOptions, NbdOptions, ServeOptions, SocketSpec,
    StopTimeout, Timeout, TlsOptions, parse_format,
};
pub use repeats::Repeats;
pub use stderr::Stderr;
