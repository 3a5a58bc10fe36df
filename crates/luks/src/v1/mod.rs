//! Version 1: "LUKS On-Disk Format Specification" 1.2.3.

mod edit;
pub mod fields;
mod read;

pub use edit::{PAYLOAD_AT, add, empty, remove};
pub use read::{Layout, read};
