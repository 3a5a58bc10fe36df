//! Inspects single entries of L1 and L2 tables: their problems, the bytes they refer to, and their
//! repaired values.

use crate::HostOffset;
use crate::qcow2::{Geometry, L1Entry, L2Entry};

/// The result of inspecting an entry.
pub(super) struct Inspected<E> {
    /// The entry's problems, one line each.
    pub(super) problems: Vec<String>,
    /// The bytes that the entry refers to, if they can be counted.
    pub(super) refers_to: Option<(HostOffset, u64)>,
    /// The entry with all problems repaired.
    pub(super) repaired: E,
}

/// The properties of a file that entries are checked against.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) g: Geometry,
    pub(super) file_len: u64,
}

impl Bounds {
    /// Whether the file contains these bytes. See [`super::Pass::in_file`].
    fn contain(&self, offset: HostOffset, len: u64) -> bool {
        let end = offset.checked_add(len);
        end.is_some_and(|end| end.0 < self.file_len.saturating_add(self.g.cluster_size()))
    }

    pub(super) fn inspect_l1(&self, entry: L1Entry) -> Inspected<L1Entry> {
        let mut problems = Vec::new();
        let mut repaired = entry.without_reserved();
        if repaired != entry {
            problems.push(format!("L1 entry {:#x} has reserved bits set", entry.0));
        }
        let offset = entry.raw_offset();
        let unusable = if offset.0 == 0 {
            // Offset 0 is the header, which is not an L2 table.
            Some("is no offset of an L2 table")
        } else if !self.g.is_aligned(offset) {
            Some("is not a multiple of the cluster size")
        } else if !self.contain(offset, self.g.cluster_size()) {
            Some("is beyond the end of the file")
        } else {
            None
        };
        if let Some(why) = unusable {
            problems.push(format!("L2 table offset={offset:#x} {why}"));
            repaired = L1Entry(0);
        }
        Inspected {
            problems,
            refers_to: unusable.is_none().then(|| (offset, self.g.cluster_size())),
            repaired,
        }
    }

    pub(super) fn inspect_l2(&self, entry: L2Entry) -> Inspected<L2Entry> {
        if entry.is_compressed() {
            self.inspect_compressed(entry)
        } else {
            self.inspect_standard(entry)
        }
    }

    /// Returns the entry that replaces a cluster that cannot be reached: zeroes, or in version 2
    /// unallocated.
    fn zeroed(&self, entry: L2Entry) -> L2Entry {
        if self.g.extended_l2 && !entry.is_compressed() {
            let zero = (entry.bitmap | entry.bitmap << 32) & !u64::from(u32::MAX);
            L2Entry {
                descriptor: 0,
                bitmap: zero,
            }
        } else if self.g.version < 3 {
            L2Entry::default()
        } else {
            L2Entry::zero(&self.g, None)
        }
    }

    fn inspect_compressed(&self, entry: L2Entry) -> Inspected<L2Entry> {
        let (descriptor, mut problems) = (entry.descriptor, Vec::new());
        let mut repaired = entry.with_copied(false);
        if entry.copied() {
            problems.push(format!(
                "compressed cluster entry={descriptor:#x} has the copied flag"
            ));
        }
        if entry.bitmap != 0 {
            repaired.bitmap = 0;
            problems.push(format!(
                "compressed cluster entry={descriptor:#x} has a subcluster bitmap"
            ));
        }
        let range = entry.compressed_range(&self.g);
        let mut refers_to = Some((range.offset, range.len));
        if self.g.data_file {
            problems.push(format!(
                "compressed cluster entry={descriptor:#x} with a data file"
            ));
            (repaired, refers_to) = (self.zeroed(entry), None);
        } else if !self.contain(range.offset, range.len) {
            problems.push(format!(
                "compressed cluster offset={:#x} is beyond the end of the file",
                range.offset
            ));
            (repaired, refers_to) = (self.zeroed(entry), None);
        }
        Inspected {
            problems,
            refers_to,
            repaired,
        }
    }

    fn inspect_standard(&self, entry: L2Entry) -> Inspected<L2Entry> {
        let mut problems = Vec::new();
        let mut repaired = entry.without_reserved(&self.g);
        if entry.reserved(&self.g) != 0 {
            problems.push(format!(
                "L2 entry {:#x} has reserved bits set",
                entry.descriptor
            ));
        }
        let offset = entry.raw_offset();
        let allocated = entry.bitmap as u32;
        let both = allocated & (entry.bitmap >> 32) as u32;
        if both != 0 {
            problems.push(format!(
                "cluster offset={offset:#x} has a contradictory subcluster bitmap"
            ));
            // The allocated bit wins, so that written data is kept.
            repaired.bitmap &= !(u64::from(both) << 32);
        }
        let mut refers_to = None;
        if offset.0 == 0 && !(self.g.data_file && entry.copied()) {
            if allocated != 0 {
                problems.push("unallocated cluster has allocated subclusters".to_owned());
                repaired = self.zeroed(entry);
            }
        } else if !self.g.is_aligned(offset) {
            problems.push(format!(
                "cluster offset={offset:#x} is not a multiple of the cluster size"
            ));
            repaired = self.zeroed(entry);
        } else if !self.g.data_file {
            if self.contain(offset, self.g.cluster_size()) {
                refers_to = Some((offset, self.g.cluster_size()));
            } else {
                problems.push(format!(
                    "cluster offset={offset:#x} is beyond the end of the file"
                ));
                repaired = self.zeroed(entry);
            }
        }
        Inspected {
            problems,
            refers_to,
            repaired,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bounds() -> impl Strategy<Value = Bounds> {
        (14u32..=21, any::<bool>(), any::<bool>(), 2u32..=3, 1u64..64).prop_map(
            |(cluster_bits, extended_l2, data_file, version, clusters)| Bounds {
                g: Geometry {
                    cluster_bits,
                    refcount_order: 4,
                    extended_l2: extended_l2 && version == 3,
                    data_file: data_file && version == 3,
                    version,
                },
                file_len: clusters << cluster_bits,
            },
        )
    }

    proptest! {
        #[test]
        fn repaired_entries_are_right(bounds in bounds(), descriptor: u64, bitmap: u64,
                                      small in 0u64..1 << 22, pick in 0..3) {
            let descriptor = match pick {
                0 => descriptor,
                1 => descriptor & !0x3fff_ffff_ffff_0000 | small << 9,
                _ => small << 14 | 1 << 63 | descriptor & 1,
            };
            let bitmap = if bounds.g.extended_l2 { bitmap } else { 0 };
            let entry = L2Entry { descriptor, bitmap };
            let found = bounds.inspect_l2(entry);
            prop_assert_eq!(found.problems.is_empty(), found.repaired == entry);
            let again = bounds.inspect_l2(found.repaired);
            prop_assert!(again.problems.is_empty(), "{:?}", again.problems);
            prop_assert_eq!(again.repaired, found.repaired);
            // Readers accept the repaired entry.
            prop_assert!(found.repaired.decode(&bounds.g).is_ok(), "{:?}", found.repaired);

            let entry = L1Entry(descriptor | 1 << 9);
            let found = bounds.inspect_l1(entry);
            prop_assert_eq!(found.problems.is_empty(), found.repaired == entry);
            if found.repaired != L1Entry(0) {
                prop_assert!(bounds.inspect_l1(found.repaired).problems.is_empty());
                prop_assert!(matches!(found.repaired.l2_table(&bounds.g), Ok(Some(_))));
            }
        }
    }
}
