//! Version 2: "LUKS2 On-Disk Format Specification" 1.1.

pub mod binary;
mod edit;
mod json;
mod read;
mod slots;

pub use edit::{PAYLOAD_AT, add, empty, remove};
pub use read::{Layout, read};
