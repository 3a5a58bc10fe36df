//! Disk images of other programs, for reading: VMDK of VMware, VHDX and VHD
//! of Microsoft, VDI of VirtualBox.
//!
//! Opens no file and reads no guest data: headers and tables are read through
//! [`Bytes`], checked, and kept; [`Image::lookup`] then tells where each byte
//! of the guest's disk lies, without reading anything. Nothing here is
//! asynchronous.
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
//! What is in such files may be meant to do harm: every number in them is
//! checked before it is used, tables take at most [`MAX_TABLES`] bytes of
//! memory, and places outside of their files are errors when an image is
//! opened. (QEMU reads zeroes there, or fails later.)
//!
//! A VMDK image may be in several files, which its descriptor names. Here these
//! names are of files next to the descriptor: absolute ones, and any with a
//! slash, a backslash or `..` are refused, although QEMU opens them, since an
//! image must not choose which of the host's files are read. It is still the
//! caller's to open no device, pipe or symbolic link by such a name.
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
