//! The common layout of qcow2 and QED: two levels of tables that map guest to host clusters.

use crate::qcow2::{self, Cluster, L1Entry, L2Entry, MAX_HOST_OFFSET};
use crate::qed;
use crate::{GuestOffset, HostOffset};

/// Bytes of a table that are read, cached and written together.
///
/// A sector is written wholly or not at all, and entries never cross sectors.
pub(super) const SLICE_BYTES: u64 = 4096;

/// The copied flag of a qcow2 entry: the cluster belongs to this entry alone.
pub(super) const EXCLUSIVE: u64 = 1 << 63;

/// Why an entry is invalid, as text for the user.
pub(super) type Problem = String;

/// The layout of one image's tables. Entries are kept as numbers, independent of their byte order
/// on disk.
#[derive(Clone, Copy, Debug)]
pub(super) enum Layout {
    Qcow2(qcow2::Geometry),
    Qed(qed::Geometry),
}

impl Layout {
    #[inline]
    pub(super) fn cluster_bits(&self) -> u32 {
        match self {
            Layout::Qcow2(g) => g.cluster_bits,
            Layout::Qed(g) => g.cluster_bits,
        }
    }

    #[inline]
    pub(super) fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits()
    }

    /// Returns the smallest number of bytes that can be allocated or zero by themselves.
    #[inline]
    pub(super) fn unit(&self) -> u64 {
        match self {
            Layout::Qcow2(g) => g.subcluster_size(),
            Layout::Qed(g) => g.cluster_size(),
        }
    }

    /// Returns the number of words of an L2 entry: 1 or 2.
    #[inline]
    pub(super) fn entry_words(&self) -> usize {
        match self {
            Layout::Qcow2(g) if g.extended_l2 => 2,
            _ => 1,
        }
    }

    /// Returns the bytes of an L2 table, which is contiguous.
    pub(super) fn table_bytes(&self) -> u64 {
        match self {
            Layout::Qcow2(g) => g.cluster_size(),
            Layout::Qed(g) => g.table_bytes(),
        }
    }

    /// Returns the bytes of a slice: a part of a table, or a whole small one.
    #[inline]
    pub(super) fn slice_bytes(&self) -> u64 {
        SLICE_BYTES.min(self.table_bytes())
    }

    /// Returns the number of clusters that a slice describes; a power of two.
    #[inline]
    pub(super) fn slice_entries(&self) -> u64 {
        self.slice_bytes() / 8 / self.entry_words() as u64
    }

    /// Returns the number of slices of a table; a power of two.
    #[inline]
    pub(super) fn slices_per_table(&self) -> u64 {
        self.table_bytes() / self.slice_bytes()
    }

    /// Decodes an L2 entry; fails if it is invalid.
    ///
    /// `file_len` bounds the clusters of a QED image. In a data file the offset must equal `guest`.
    #[inline]
    pub(super) fn decode(
        &self,
        entry: L2Entry,
        guest: GuestOffset,
        file_len: u64,
    ) -> Result<Cluster, Problem> {
        match self {
            Layout::Qcow2(g) => {
                let cluster = entry.decode(g).map_err(|error| error.to_string())?;
                if g.data_file {
                    check_data_file(&cluster, guest.down_to(g.cluster_size()))?;
                }
                Ok(cluster)
            }
            Layout::Qed(g) => {
                let cluster = qed::Cluster::decode(entry.descriptor, g, file_len);
                Ok(match cluster.map_err(|error| error.to_string())? {
                    qed::Cluster::Unallocated => Cluster::Unallocated,
                    qed::Cluster::Zero => Cluster::Zero { host: None },
                    qed::Cluster::Data { host } => Cluster::Data { host },
                })
            }
        }
    }

    /// Returns the bits that no entry of an ordinary data cluster has, for a fast check of entries.
    ///
    /// All bits are set where this check does not suffice.
    pub(super) fn not_plain(&self) -> u64 {
        match self {
            Layout::Qcow2(g) if !g.extended_l2 && !g.data_file => {
                let host = (MAX_HOST_OFFSET.0 - 1) & !(g.cluster_size() - 1);
                !(host | EXCLUSIVE)
            }
            _ => u64::MAX,
        }
    }

    /// Returns whether the entry's host cluster belongs to this entry alone.
    #[inline]
    pub(super) fn is_exclusive(&self, entry: L2Entry) -> bool {
        match self {
            Layout::Qcow2(_) => entry.copied(),
            Layout::Qed(_) => true,
        }
    }

    /// Returns the entry of a cluster at `host`.
    ///
    /// The bits of `allocated` and `zero` stand for its units; there is a single unit unless
    /// entries are extended.
    pub(super) fn entry(&self, host: Option<HostOffset>, allocated: u32, zero: u32) -> L2Entry {
        let all = self.all_units();
        match self {
            Layout::Qcow2(g) => {
                let mut entry = match host {
                    _ if !g.extended_l2 && zero == all => {
                        return L2Entry::zero(g, host.map(|h| (h, true)));
                    }
                    Some(host) => L2Entry::data(g, host, true),
                    None => L2Entry::default(),
                };
                if g.extended_l2 {
                    entry.bitmap = u64::from(allocated) | u64::from(zero) << 32;
                }
                entry
            }
            Layout::Qed(_) => {
                let cluster = match host {
                    Some(host) if allocated != 0 => qed::Cluster::Data { host },
                    _ if zero != 0 => qed::Cluster::Zero,
                    _ => qed::Cluster::Unallocated,
                };
                L2Entry {
                    descriptor: cluster.encode(),
                    bitmap: 0,
                }
            }
        }
    }

    /// Returns a mask with a bit for each unit of a cluster.
    pub(super) fn all_units(&self) -> u32 {
        match self.entry_words() {
            2 => u32::MAX,
            _ => 1,
        }
    }

    /// Returns whether the format distinguishes zero clusters from unallocated ones.
    pub(super) fn has_zero_clusters(&self) -> bool {
        match self {
            Layout::Qcow2(g) => g.version >= 3,
            Layout::Qed(_) => true,
        }
    }

    /// Returns the offset of the L2 table that an L1 entry refers to.
    pub(super) fn table(
        &self,
        l1_entry: u64,
        file_len: u64,
    ) -> Result<Option<HostOffset>, Problem> {
        match self {
            Layout::Qcow2(g) => {
                let table = L1Entry(l1_entry).l2_table(g);
                match table.map_err(|error| error.to_string())? {
                    Some(at) if at.0 >= file_len => {
                        Err(format!("the L2 table at {at:#x} is beyond the file's end"))
                    }
                    table => Ok(table),
                }
            }
            Layout::Qed(g) => {
                let table = qed::L2Offset(l1_entry).decode(g, file_len);
                table.map_err(|error| error.to_string())
            }
        }
    }

    /// Returns whether the L1 entry's table belongs to this entry alone.
    pub(super) fn table_is_exclusive(&self, l1_entry: u64) -> bool {
        match self {
            Layout::Qcow2(_) => L1Entry(l1_entry).copied(),
            Layout::Qed(_) => true,
        }
    }

    /// Returns the L1 entry of a table that belongs to this entry alone.
    pub(super) fn l1_entry(&self, table: HostOffset) -> u64 {
        match self {
            Layout::Qcow2(_) => L1Entry::new(table, true).0,
            Layout::Qed(_) => table.0,
        }
    }

    /// Converts a word from the byte order of the file.
    pub(super) fn word(&self, bytes: [u8; 8]) -> u64 {
        match self {
            Layout::Qcow2(_) => u64::from_be_bytes(bytes),
            Layout::Qed(_) => u64::from_le_bytes(bytes),
        }
    }

    /// The inverse of [`Layout::word`].
    pub(super) fn bytes(&self, word: u64) -> [u8; 8] {
        match self {
            Layout::Qcow2(_) => word.to_be_bytes(),
            Layout::Qed(_) => word.to_le_bytes(),
        }
    }
}

/// Checks that a cluster of an external data file is at its guest offset.
fn check_data_file(cluster: &Cluster, guest: GuestOffset) -> Result<(), Problem> {
    let host = match cluster {
        Cluster::Data { host } => Some(*host),
        Cluster::Zero { host } | Cluster::Subclusters { host, .. } => *host,
        _ => None,
    };
    match host {
        Some(host) if host != guest.in_data_file() => Err(format!(
            "cluster {guest:#x} is at {host:#x} of the external data file, not at its own offset"
        )),
        _ => Ok(()),
    }
}
