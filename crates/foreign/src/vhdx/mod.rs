//! VHDX ([MS-VHDX], whose sections are named where they matter).

mod crc;
mod header;
mod journal;
mod log;
mod metadata;
mod overlay;
mod read;
mod regions;

pub use read::read;
