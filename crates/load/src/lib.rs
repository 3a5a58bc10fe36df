//! A load generator that speaks vhost-user-blk and NBD, and the same load on a
//! file.
//!
//! [`run`] plays the front-end without a virtual machine: the driver's side of
//! split virtqueues in shared memory, one thread per queue, made to cost as
//! little as possible, so that what is measured is the server. The same loop
//! drives connections to an NBD server, in batches, and a file through io_uring
//! or pread, which gives the host's own figure.
//!
//! With [`options::Load::verify`] every block carries what, where and when it
//! is, and lost, stale, torn and misplaced data is found, also over the death
//! of the server and in a later run.
//!
//! [`files`] has loads on the files of a mounted file system.
//!
//! This crate does not use the code of the server under test, whose mistakes it would share. NBD's
//! constants and QEMU's image locks are exceptions, because other programs check them.

pub mod error;
pub mod files;
pub mod options;
pub mod report;
pub mod stamped;

mod control;
mod cpu;
mod dirty_log;
mod features;
mod host;
mod ledger;
mod load;
mod memory;
mod message;
mod nbd;
mod pattern;
mod port;
mod queue;
mod ring;
mod run;
mod server;
mod session;
mod slots;
mod verify;
mod workload;

pub use control::Phase;
pub use cpu::parse_list as parse_cpu_list;
pub use error::{Error, Result};
pub use nbd::{ExportInfo, NbdUri, Replies, info as nbd_info, server_pid};
pub use options::{Engine, File, Load, Nbd, Options, Rw, Target, VhostUser, Wait};
pub use port::Op;
pub use report::{Direction, Latency, Report};
pub use run::Progress;
pub use server::{ServerInfo, info};

// Rings and the configuration space are little-endian; so is every host that
// this runs on, and the code takes advantage of it.
const _: () = assert!(cfg!(target_endian = "little"));

/// Runs a load. `progress` is called about twice a second.
///
/// # Errors
/// The first thing that went wrong, in one line: options that cannot work, a
/// feature that the server refuses, a request that failed, data that is wrong.
pub fn run(options: &Options, progress: &mut dyn FnMut(&Progress)) -> Result<Report> {
    options.validate()?;
    match &options.target {
        Target::VhostUser(server) => server::run(options, server, progress),
        Target::Nbd(server) => nbd::run(options, server, progress),
        Target::File(file) => host::run(options, file, progress),
    }
}
