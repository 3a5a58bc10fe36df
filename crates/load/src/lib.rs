//! A load generator for vhost-user-blk servers, NBD servers and files.
//!
//! [`run`] acts as a vhost-user front-end without a virtual machine. The front-end implements the
//! driver's side of split and packed virtqueues in shared memory, with one thread per queue. The
//! threads use as little CPU time as possible, so that the measurement shows the server. The same
//! loop drives connections to an NBD server, in batches, and a file through io_uring, Linux AIO or
//! pread. The load on a file gives the host's own figure.
//!
//! With [`options::Load::verify`], every block records its run, position and generation. The
//! check finds lost, stale, torn and misplaced data, even after the server was killed or in a later
//! run.
//!
//! [`files`] contains loads on the files of a mounted file system.
//!
//! This crate does not use the code of the server under test, because it would share that code's
//! mistakes. NBD's constants and QEMU's image locks are exceptions, because other programs check
//! them.

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
mod packed_ring;
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

// Rings and the configuration space are little-endian. This code relies on the host being
// little-endian, too.
const _: () = assert!(cfg!(target_endian = "little"));

/// Runs a load. Calls `progress` about twice a second.
///
/// # Errors
/// The first error of the run: invalid options, a feature that the server does not offer, a failed
/// request, or wrong data.
pub fn run(options: &Options, progress: &mut dyn FnMut(&Progress)) -> Result<Report> {
    options.validate()?;
    match &options.target {
        Target::VhostUser(server) => server::run(options, server, progress),
        Target::Nbd(server) => nbd::run(options, server, progress),
        Target::File(file) => host::run(options, file, progress),
    }
}
