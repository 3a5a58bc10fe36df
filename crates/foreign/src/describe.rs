//! Describes an image for people.

use crate::kind::Kind;
use serde::Serialize;

/// The properties of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Format of the image.
    pub kind: Kind,
    /// Size of the guest's disk in bytes.
    pub size: u64,
    /// Block size in bytes, which QEMU calls the cluster size.
    ///
    /// `None` if the image has no blocks, or blocks of several sizes.
    pub block_size: Option<u64>,
    /// Properties specific to the format.
    pub details: Details,
}

/// Properties that only one format has.
///
/// When serialized, the VMDK properties have the names of "format-specific" in the output of
/// `qemu-img info --output json`. QEMU reports no such properties for the other formats.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged, rename_all_fields = "kebab-case")]
pub enum Details {
    /// Properties of a VMDK image.
    Vmdk {
        /// Content ID, which changes when the disk is written.
        cid: u32,
        /// Content ID of the parent: always 0xffffffff, because images with a parent are refused.
        parent_cid: u32,
        /// Type of the image, for example "monolithicSparse".
        create_type: &'static str,
        /// Extents in the order of the disk.
        extents: Vec<VmdkExtent>,
    },
    /// Properties of a VHDX image.
    Vhdx {
        /// Whether all blocks were allocated when the image was created.
        fixed: bool,
        /// Logical sector size that the guest must see, in bytes: 512 or 4096.
        logical_sector_size: u32,
        /// Physical sector size in bytes: 512 or 4096.
        physical_sector_size: u32,
        /// Number of changes to the file's tables that the log contains.
        ///
        /// If the number is not 0, the image was not closed properly. The disk that Fathom reads
        /// then differs from what the file contains without its log.
        log_changes: usize,
    },
    /// Properties of a VDI image.
    Vdi {
        /// Whether all blocks were allocated when the image was created.
        fixed: bool,
    },
    /// Properties of a VHD image.
    Vhd {
        /// Whether the image is a raw disk followed by a footer.
        fixed: bool,
        /// Program that created the image, for example "win "; unprintable characters are left out.
        creator: String,
    },
}

/// An extent of a VMDK image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct VmdkExtent {
    /// File name in the descriptor; `None` for the file that was opened, or for an extent of
    /// zeroes.
    #[serde(skip)]
    pub name: Option<String>,
    /// Format as named in the descriptor, for example "SPARSE" or "FLAT".
    ///
    /// Empty if the extent's file contains the descriptor.
    pub format: &'static str,
    /// Size in bytes on the guest's disk.
    pub virtual_size: u64,
    /// Grain size in bytes; `None` if the extent has no grains.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_size: Option<u64>,
    /// Whether grains are compressed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub compressed: bool,
}
