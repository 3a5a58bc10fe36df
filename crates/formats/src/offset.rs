//! Offsets in the guest's disk and in an image's file. The two kinds of offsets have separate
//! types, because confusing them would write to the wrong place. Lengths, counts and cluster
//! numbers are plain integers.
//!
//! ```
//! use fathom_formats::{GuestOffset, HostOffset};
//! let (guest, host) = (GuestOffset(0x10200), HostOffset(0x70000));
//! assert_eq!(host + guest.within(0x10000), HostOffset(0x70200));
//! ```
//!
//! The two types cannot be mixed:
//!
//! ```compile_fail
//! use fathom_formats::{GuestOffset, HostOffset};
//! let (guest, host) = (GuestOffset(0x10200), HostOffset(0x70000));
//! assert_eq!(host + guest, HostOffset(0x80200));
//! ```

use std::fmt;
use std::ops::{Add, AddAssign, Range, Sub};

/// Offset of a byte in the guest's disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestOffset(pub u64);

/// Offset of a byte in a file: the image or its external data file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostOffset(pub u64);

impl GuestOffset {
    /// Returns the same offset in an external data file or raw image, which stores each byte at the
    /// guest's offset.
    #[inline]
    pub const fn in_data_file(self) -> HostOffset {
        HostOffset(self.0)
    }
}

macro_rules! arithmetic {
    ($offset:ident) => {
        impl $offset {
            /// Returns the offset of a cluster's first byte.
            #[inline]
            pub const fn of_cluster(number: u64, cluster_bits: u32) -> $offset {
                $offset(number << cluster_bits)
            }

            /// Adds `len` bytes, or returns `None` on overflow.
            #[inline]
            pub const fn checked_add(self, len: u64) -> Option<$offset> {
                match self.0.checked_add(len) {
                    Some(at) => Some($offset(at)),
                    None => None,
                }
            }

            /// Returns the number of the cluster that contains the offset.
            #[inline]
            pub const fn cluster(self, cluster_bits: u32) -> u64 {
                self.0 >> cluster_bits
            }

            /// Returns the numbers of the clusters that `len` bytes from this offset touch.
            #[inline]
            pub const fn clusters(self, len: u64, cluster_bits: u32) -> Range<u64> {
                self.cluster(cluster_bits)..(self.0 + len).div_ceil(1 << cluster_bits)
            }

            /// Rounds the offset down to a multiple of `unit`, a power of two.
            #[inline]
            pub const fn down_to(self, unit: u64) -> $offset {
                debug_assert!(unit.is_power_of_two());
                $offset(self.0 & !(unit - 1))
            }

            /// Rounds the offset up to a multiple of `unit`.
            #[inline]
            pub const fn up_to(self, unit: u64) -> $offset {
                $offset(self.0.next_multiple_of(unit))
            }

            /// Returns the distance in bytes from the previous multiple of `unit`, a power of two.
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

        /// Returns the distance between two offsets in bytes.
        impl Sub for $offset {
            type Output = u64;

            #[inline]
            fn sub(self, start: $offset) -> u64 {
                self.0 - start.0
            }
        }

        /// Formats the offset as in error messages.
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
