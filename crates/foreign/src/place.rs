//! The locations of parts of a guest's disk.

use crate::grain::Grain;

/// A contiguous range of the guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Size in bytes.
    pub len: u64,
    /// Location of the first byte. The other bytes follow it.
    pub place: Place,
}

/// The location of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The extent is stored nowhere and reads as zeroes.
    Zero,
    /// The extent is stored uncompressed in a file.
    Data {
        /// Number of the file: 0 is the file that was opened, 1 the first of
        /// [`Start::names`](crate::Start::names).
        file: usize,
        /// Offset in the file in bytes.
        at: u64,
    },
    /// The extent is stored in a compressed grain of a VMDK image.
    Compressed(Grain),
}
