//! A server: its process, its control thread, its files, and its upgrade to another process.
//!
//! - `daemon` starts a server from its options, and is its main loop;
//! - `controller` carries out requests on the control thread, which `control_thread` passes on from
//!   the API;
//! - `files` reads and writes the configuration and the definitions of disks;
//! - `handover` hands the server over to another process;
//! - `tenant` is the process of a tenant;
//! - `cage` is the sandbox of these processes, `limits` their resource limits.

mod cage;
mod control_thread;
mod controller;
mod daemon;
mod files;
mod handover;
mod limits;
mod tenant;

pub use daemon::{Daemon, Ended};
pub use files::read_config;
pub use handover::{TAKE_OVER, start_successors};
pub use limits::survive_size_limit;
pub use tenant::{NewTenant, begin_tenant, serve_tenant};
