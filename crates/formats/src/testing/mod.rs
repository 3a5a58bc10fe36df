//! An image file in memory, and the bodies of fuzz targets.

pub mod fuzz;
mod memory;

pub use memory::MemoryFile;
