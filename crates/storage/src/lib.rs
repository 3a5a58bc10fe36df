//! How an image's bytes are reached: files, memory, nothing.

pub mod engine;
pub mod file;
pub mod memory;
pub mod null;

pub use engine::{EngineKind, engine};
pub use file::{Cache, FileDisk, FileOptions};
pub use memory::MemoryDisk;
pub use null::NullDisk;
