//! The properties of images of all formats.

use crate::Format;

/// The properties of an image. A format implements what differs from a raw image.
pub trait ImageHeader {
    /// The image's format.
    fn format(&self) -> Format;

    /// The disk's size in bytes, in whole sectors, as QEMU computes it.
    fn size(&self) -> u64;

    /// Whether tables say where the data is. The disk of another image is a part of its file, or
    /// what its storage makes of the file.
    fn has_tables(&self) -> bool {
        self.format().has_tables()
    }

    /// The size in bytes of a cluster, the unit that the tables map. `None`: it has no tables.
    fn cluster_size(&self) -> Option<u64> {
        None
    }

    /// The number of bytes that are allocated in the file at once: a cluster, or a subcluster where
    /// clusters have subclusters.
    fn allocation_unit(&self) -> u64 {
        self.cluster_size().unwrap_or(512)
    }

    /// Whether the header says that the image was not closed properly and must be checked.
    fn needs_check(&self) -> bool {
        false
    }

    /// Whether the header marks the image as corrupt.
    fn is_corrupt(&self) -> bool {
        false
    }

    /// Whether guest data is encrypted.
    fn is_encrypted(&self) -> bool {
        false
    }

    /// The number of internal snapshots.
    fn snapshots(&self) -> u32 {
        0
    }

    /// Whether the image can have bitmaps.
    fn can_have_bitmaps(&self) -> bool {
        false
    }

    /// Whether guest data is in an external data file.
    fn has_data_file(&self) -> bool {
        false
    }

    /// The external data file's name as stored in the image. An image that needs a data file but
    /// does not name one is not usable.
    fn data_file(&self) -> Option<&[u8]> {
        None
    }

    /// The backing file's name as stored in the image.
    fn backing_file(&self) -> Option<&[u8]> {
        None
    }

    /// The name of the backing file's format, if the image stores it.
    fn backing_format(&self) -> Option<String> {
        None
    }
}
