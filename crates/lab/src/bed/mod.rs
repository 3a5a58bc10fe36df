//! Beds: the environments in which cells run their work.

mod guest;
mod host;
pub mod image;
pub mod instance;
mod kvm_host;
mod pool;
mod program;
mod share;
mod stages;
mod window;

pub use guest::{DISK, GuestBed};
pub use host::HostBed;
pub use kvm_host::KvmHost;
pub use pool::Pool;
pub use program::Program;
pub use share::Protocol;
pub use window::{Job, Seen};
