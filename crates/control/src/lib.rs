//! The decisions of the control plane, without I/O: which disks exist, who owns each disk's name,
//! and what each disk is after a restart. docs/configuration.md has the rules.
//!
//! [`Registry`] is a state machine. [`Registry::take`] processes one event, which is a request or
//! the end of an operation, and returns the operations to start next. The registry uses no threads,
//! clocks or files, so that a test can explore every order of events (`tests/model`).

mod condition;
mod definition;
mod entry;
mod error;
mod event;
mod owner;
mod registry;
mod request;
mod second_definition;

pub use condition::{Condition, version_of};
pub use definition::{Definition, Definitions, Found};
pub use error::{ErrorKind, RequestError, changing_disk, unknown, unknown_disk};
pub use event::{Done, Effect, Event, HostRequest, Level, Slot};
pub use owner::Owner;
pub use registry::{Failure, Registry, Settings};
pub use request::{Removal, Reply, Request, RequestId, SwitchTo};
pub use second_definition::without_conflicts;
