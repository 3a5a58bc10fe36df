//! Definitions that the parts of a server share: options, the interface of a host of disks, and the
//! state of a handover.
//!
//! - `host` is the interface of a host: `fathom_disks` serves disks in this process,
//!   `fathom_supervisor` in the processes of tenants;
//! - `options` has the options of a server, of which `tenancy`, `allowance` and `users` are those
//!   of tenants;
//! - `handover` is what one process hands over to another;
//! - `link` connects a supervisor and its tenants, `mailbox` the control thread and other threads;
//! - `socket` listens for clients of disks.

mod access;
pub mod allowance;
mod error;
pub mod handover;
mod host;
pub mod link;
pub mod mailbox;
pub mod options;
mod outcome;
mod pull_terms;
pub mod signals;
pub mod socket;
pub mod stderr;
mod stop_timeout;
pub mod tenancy;
mod trace_file;
pub mod users;

pub use access::access;
pub use error::Error;
pub use host::Host;
pub use outcome::Outcome;
pub use stop_timeout::StopTimeout;
pub use tenancy::Tenancy;
pub use trace_file::prepare_trace;
