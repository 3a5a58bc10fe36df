//! An image for people.

use crate::kind::Kind;
use serde::Serialize;

/// What is in an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Its format.
    pub kind: Kind,
    /// Bytes of the guest's disk.
    pub size: u64,
    /// Bytes of a block, or what QEMU calls a cluster; `None` if there are no
    /// blocks, or blocks of several sizes.
    pub block_size: Option<u64>,
    /// What only one format has.
    pub details: Details,
}

/// What only one format has. Serialized, that of VMDK has the names of
/// "format-specific" of `qemu-img info --output json`; QEMU tells nothing of
/// the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged, rename_all_fields = "kebab-case")]
pub enum Details {
    /// Of VMDK.
    Vmdk {
        /// Changes whenever the disk is written to.
        cid: u32,
        /// 0xffffffff, since there is no parent.
        parent_cid: u32,
        /// As "monolithicSparse".
        create_type: &'static str,
        /// In order.
        extents: Vec<VmdkExtent>,
    },
    /// Of VHDX.
    Vhdx {
        /// Whether all blocks are there from the start.
        fixed: bool,
        /// Bytes of a sector, as the guest has to see it: 512 or 4096.
        logical_sector_size: u32,
        /// The same of what is below: 512 or 4096.
        physical_sector_size: u32,
        /// How many changes its log had to the tables in the file: such an
        /// image was not closed, and its file alone is not what is read here.
        log_changes: usize,
    },
    /// Of VDI.
    Vdi {
        /// Whether all blocks are there from the start.
        fixed: bool,
    },
    /// Of VHD.
    Vhd {
        /// Whether it is a raw disk and a footer.
        fixed: bool,
        /// Which program made it, as far as it is printable: "win ".
        creator: String,
    },
}

/// A part of a VMDK image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct VmdkExtent {
    /// Its file's name in the descriptor; `None` is the file that was opened,
    /// or none for zeroes.
    #[serde(skip)]
    pub name: Option<String>,
    /// As the descriptor says it: "SPARSE", "FLAT"; empty if the extent has
    /// the descriptor in it.
    pub format: &'static str,
    /// In bytes of the guest's disk.
    pub virtual_size: u64,
    /// Bytes of a grain; `None` if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_size: Option<u64>,
    /// Whether grains are compressed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub compressed: bool,
}
