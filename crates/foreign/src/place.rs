//! Where parts of a guest's disk lie.

use crate::grain::Grain;

/// A stretch of the guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// In bytes.
    pub len: u64,
    /// Of its first byte; the others follow it.
    pub place: Place,
}

/// Where a stretch lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Nowhere: it reads as zeroes.
    Zero,
    /// As it is, in a file.
    Data {
        /// 0 is the file that was opened, 1 the first of
        /// [`Start::names`](crate::Start::names).
        file: usize,
        /// In bytes from the file's start.
        at: u64,
    },
    /// In a compressed grain of a VMDK image.
    Compressed(Grain),
}
