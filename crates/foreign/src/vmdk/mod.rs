//! VMDK ("Virtual Disk Format" 5.0 by VMware; QEMU's behaviour where that is silent).

mod cowd;
mod descriptor;
mod grains;
mod read;
mod sesparse;
mod sparse;
mod start;

pub use descriptor::Descriptor;
pub use read::{read_described, read_single};
pub use start::descriptor;
