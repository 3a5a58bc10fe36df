//! From options to a running stack: disk, workers, export, control socket and
//! trace of one daemon, which serves one disk.

mod assemble;
mod confined;
pub mod control;
mod daemon;
mod image_files;
pub mod images;
mod inject;
mod limits;
mod magic;
mod options;
mod serving;
mod signals;
pub mod size;
mod socket;

pub use daemon::{Daemon, Error, Outcome};
pub use fathom_core::Polling;
pub use fathom_formats::img::Format;
pub use fathom_storage::{Cache, EngineKind};
pub use fathom_trace::Summary;
pub use fathom_trace::ring;
pub use inject::{Injected, Injection};
pub use options::{CpuList, DiskSpec, ServeOptions, SocketSpec, parse_format};
