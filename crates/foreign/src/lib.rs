//! Reads disk images of other programs: VMware's VMDK, Microsoft's VHDX and VHD, and VirtualBox's
//! VDI.
//!
//! This crate opens no files and reads no guest data. The crate reads headers and tables through
//! [`Bytes`], checks them, and keeps them in memory. [`Image::lookup`] then returns the location of
//! each byte of the guest's disk without reading anything. No function is asynchronous.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use fathom_foreign::{Kind, Place, Start};
//! # let (directory, name) = (std::env::temp_dir(), format!("{}.vmdk", std::process::id()));
//! # std::fs::write(directory.join(&name), "# Disk DescriptorFile\nversion=1\nCID=1\n\
//! #     parentCID=ffffffff\ncreateType=\"monolithicFlat\"\nRW 8 ZERO\n")?;
//! let main = std::fs::File::open(directory.join(&name))?;
//! let start = Start::read(Kind::Vmdk, &main)?;
//! let parts = start.names().iter().map(|name| std::fs::File::open(directory.join(name)));
//! let parts = parts.collect::<Result<Vec<_>, _>>()?;
//! let image = start.open(&main, &parts)?;
//! let mut offset = 0;
//! while offset < image.size() {
//!     let extent = image.lookup(offset, image.size() - offset);
//!     match extent.place {
//!         Place::Zero => {}
//!         Place::Data { file, at } => println!("{offset}: {at} of file {file}"),
//!         Place::Compressed(grain) => println!("{offset}: {} of file {}", grain.at, grain.file),
//!     }
//!     offset += extent.len;
//! }
//! # Ok(std::fs::remove_file(directory.join(&name))?)
//! # }
//! ```
//!
//! Image files may be malicious. Every number in them is checked before it is used, and the tables
//! use at most [`MAX_TABLES`] bytes of memory. A location outside of its file is an error when the
//! image is opened, whereas QEMU reads zeroes there or fails later.
//!
//! A VMDK image may consist of several files, which its descriptor names. This crate accepts only
//! names of files next to the descriptor. The crate refuses absolute names and names with a slash,
//! a backslash or `..`, although QEMU opens them, because an image must not choose which of the
//! host's files are read. The caller must still make sure that no such name opens a device, a pipe
//! or a symbolic link.
//!
//! Images with a parent are refused.

mod blocks;
mod bytes;
mod describe;
mod error;
mod grain;
mod image;
mod kind;
mod limits;
mod part;
mod place;
mod source;
#[cfg(feature = "testing")]
pub mod testing;
mod vdi;
mod vhd;
mod vhdx;
mod vmdk;

pub use bytes::Bytes;
pub use describe::{Description, Details, VmdkExtent};
pub use error::{Error, Result};
pub use grain::Grain;
pub use image::{Image, Start};
pub use kind::{Kind, VhdSize};
pub use limits::MAX_TABLES;
pub use place::{Extent, Place};
