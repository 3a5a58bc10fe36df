//! Images of foreign formats, which are only read: VMDK, VHDX, VDI and VHD.

mod driver;
mod image;
mod part;

pub(crate) use driver::ForeignDriver;
pub(crate) use part::{Part, describe_with, refused};
