//! How an image is served.

use super::beside::Beside;
use super::sealed::Keys;
use crate::Format;
use crate::offline::SnapshotName;
use std::num::NonZero;

/// Enough for all L2 tables of a qcow2 image of 256 GiB in clusters of 64 KiB.
pub const DEFAULT_METADATA_CACHE: u64 = 32 << 20;

/// How to serve an image.
#[derive(Clone, Debug)]
pub struct ImageOptions {
    pub format: Format,
    pub read_only: bool,
    /// The guest may discard, and freed clusters are freed in the file, too.
    pub discard: bool,
    /// Bytes of L2 tables in memory, for all images of the chain.
    pub metadata_cache: u64,
    /// What unlocks images of the chain that are encrypted.
    pub keys: Keys,
    /// Of a raw image: where in its file the disk starts.
    pub offset: u64,
    /// Of a raw image: the disk's bytes; none: up to the file's end.
    pub size: Option<u64>,
    /// The disk as an internal snapshot has kept it; needs `read_only`.
    pub snapshot: Option<SnapshotName>,
    /// For tools: writes of whole clusters are stored compressed (see
    /// [`ImageDisk::compress_unit`](super::ImageDisk::compress_unit)).
    pub compress: bool,
    /// For tools: also sizes that no guest can use. What a raw file has of its
    /// last sector is padded with zeroes, and a disk may be empty.
    pub any_size: bool,
    /// For a job: there are other disks on the same images (see [`ImageDisk::beside`](super::ImageDisk::beside)).
    pub beside: Option<Beside>,
    /// For whoever changes the backing file: it writes what the disk reads as already, and what
    /// it zeroes reads as zeroes by the image's own entries, even if it does so on its present
    /// backing file.
    pub rebasing: bool,
    /// Clusters that an image's tables name behind its file's end read as zeroes. Otherwise their reads fail, and an
    /// image that names any is not opened for writing.
    pub zero_missing_clusters: bool,
    /// What becomes of the bitmaps that are in a qcow2 image.
    pub own_bitmaps: OwnBitmaps,
    /// The host's page cache is right, since no other host has written to the
    /// files: it is kept. (A guest may come from another one.)
    pub keep_page_cache: bool,
    /// Threads that compress and decompress, for all workers: more than there are processors would
    /// only take turns. They start when there is something for them to do. 0: what they would do
    /// waits for [`ImageDisk::help`](super::ImageDisk::help).
    pub helpers: usize,
}

/// What becomes of the bitmaps that are in a qcow2 image when it is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnBitmaps {
    /// Nobody believes the enabled ones any more.
    Missed,
    /// For a tool: they stay true without recording anything, since nothing is changed that they do not know of.
    Kept,
    /// Whoever uses the disk records what is changed. It calls [`ImageDisk::take_bitmaps`](super::ImageDisk::take_bitmaps) before anything is.
    Recorded,
}

impl ImageOptions {
    /// The defaults for this format.
    pub fn new(format: Format) -> ImageOptions {
        ImageOptions {
            format,
            read_only: false,
            discard: true,
            metadata_cache: DEFAULT_METADATA_CACHE,
            zero_missing_clusters: false,
            keys: Keys::default(),
            offset: 0,
            size: None,
            snapshot: None,
            compress: false,
            any_size: false,
            beside: None,
            rebasing: false,
            own_bitmaps: OwnBitmaps::Missed,
            keep_page_cache: false,
            helpers: std::thread::available_parallelism().map_or(1, NonZero::get),
        }
    }
}
