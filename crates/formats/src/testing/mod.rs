//! An image file in memory, a storage of one, and the bodies of fuzz targets.

pub mod fuzz;
mod memory;
mod served;
mod storage;

pub use memory::MemoryFile;
pub use served::NoFiles;
pub use storage::MemoryStorage;
