//! Offsets in the guest's disk, and in the file that an image is in. To take one for the other is
//! to write to the wrong place, so they are two types. Lengths, counts and numbers of clusters are
//! plain numbers.
//!
//! ```
//! use fathom_formats::{GuestOffset, HostOffset};
//! let (guest, host) = (GuestOffset(0x10200), HostOffset(0x70000));
//! assert_eq!(host + guest.within(0x10000), HostOffset(0x70200));
//! ```
//!
//! One is not the other:
//!
//! ```compile_fail
//! use fathom_formats::{GuestOffset, HostOffset};
//! let (guest, host) = (GuestOffset(0x10200), HostOffset(0x70000));
//! assert_eq!(host + guest, HostOffset(0x80200));
//! ```

use std::fmt;
use std::ops::{Add, AddAssign, Range, Sub};

/// A byte of the guest's disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestOffset(pub u64);

/// A byte of a file: an image's own, or its external data file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostOffset(pub u64);

impl GuestOffset {
    /// Where it is in an external data file or a raw one: where the guest sees it.
    #[inline]
    pub const fn in_data_file(self) -> HostOffset {
        HostOffset(self.0)
    }
}

macro_rules! arithmetic {
    ($offset:ident) => {
        impl $offset {
            /// The first byte of a cluster, by its number.
            #[inline]
            pub const fn of_cluster(number: u64, cluster_bits: u32) -> $offset {
                $offset(number << cluster_bits)
            }

            /// So many bytes further; none: nothing can be there.
            #[inline]
            pub const fn checked_add(self, len: u64) -> Option<$offset> {
                match self.0.checked_add(len) {
                    Some(at) => Some($offset(at)),
                    None => None,
                }
            }

            /// The number of the cluster that it is in.
            #[inline]
            pub const fn cluster(self, cluster_bits: u32) -> u64 {
                self.0 >> cluster_bits
            }

            /// The numbers of those that `len` bytes from here on touch.
            #[inline]
            pub const fn clusters(self, len: u64, cluster_bits: u32) -> Range<u64> {
                self.cluster(cluster_bits)..(self.0 + len).div_ceil(1 << cluster_bits)
            }

            /// The last multiple of `unit`, a power of two, up to here.
            #[inline]
            pub const fn down_to(self, unit: u64) -> $offset {
                debug_assert!(unit.is_power_of_two());
                $offset(self.0 & !(unit - 1))
            }

            /// The first multiple of `unit` from here on.
            #[inline]
            pub const fn up_to(self, unit: u64) -> $offset {
                $offset(self.0.next_multiple_of(unit))
            }

            /// Bytes since the last multiple of `unit`, a power of two.
            #[inline]
            pub const fn within(self, unit: u64) -> u64 {
                debug_assert!(unit.is_power_of_two());
                self.0 & (unit - 1)
            }
        }

        impl Add<u64> for $offset {
            type Output = $offset;

            #[inline]
            fn add(self, len: u64) -> $offset {
                $offset(self.0 + len)
            }
        }

        impl AddAssign<u64> for $offset {
            #[inline]
            fn add_assign(&mut self, len: u64) {
                self.0 += len;
            }
        }

        /// The bytes between the two.
        impl Sub for $offset {
            type Output = u64;

            #[inline]
            fn sub(self, start: $offset) -> u64 {
                self.0 - start.0
            }
        }

        /// As it is said to people.
        impl fmt::LowerHex for $offset {
            fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
                fmt::LowerHex::fmt(&self.0, f)
            }
        }
    };
}

arithmetic!(GuestOffset);
arithmetic!(HostOffset);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_is_in_a_cluster() {
        let at = HostOffset::of_cluster(3, 16) + 5;
        assert_eq!(at, HostOffset(0x30005));
        assert_eq!((at.cluster(16), at.within(1 << 16)), (3, 5));
        assert_eq!(at.clusters(0xfffb, 16), 3..4);
        assert_eq!(at.clusters(0xfffc, 16), 3..5);
        assert_eq!(at.down_to(1 << 16), HostOffset(0x30000));
        assert_eq!(at.up_to(1 << 16), HostOffset(0x40000));
        assert_eq!(at.down_to(1 << 16).up_to(1 << 16), HostOffset(0x30000));
        assert_eq!(at - HostOffset(0x20000), 0x10005);
        assert_eq!(format!("{at:#x}"), "0x30005");
    }
}
