//! From options to a running stack: the disks of one daemon with their workers,
//! exports and traces, its NBD server and its API.

mod access;
mod allowance;
mod cage;
mod control_thread;
mod controller;
mod daemon;
mod error;
mod files;
mod handover;
mod host;
mod limits;
mod link;
mod mailbox;
mod objects;
mod options;
mod pull_terms;
mod signals;
mod socket;
mod stderr;
mod stop_timeout;
mod supervisor;
mod tenancy;
mod tenant;
mod users;

pub use access::access;
pub use daemon::{Daemon, Ended};
pub use error::Error;
pub use fathom_sandbox::Mode as SandboxMode;
pub use files::read_config;
pub use handover::{TAKE_OVER, start_successors};
pub use limits::survive_size_limit;
pub use objects::Outcome;
pub use options::{DiskOptions, ExportOptions, NbdOptions, ServeOptions, TlsOptions};
pub use stderr::Stderr;
pub use stop_timeout::StopTimeout;
pub use tenancy::Tenancy;
pub use tenant::{NewTenant, begin_tenant, serve_tenant};
