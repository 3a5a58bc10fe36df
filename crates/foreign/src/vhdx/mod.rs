//! VHDX ([MS-VHDX]). Comments name the sections of that specification.

mod crc;
mod header;
mod journal;
mod log;
mod metadata;
mod overlay;
mod read;
mod regions;

pub use read::read;
