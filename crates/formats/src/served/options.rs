//! Options for serving an image.

use super::encrypted::Keys;
use super::side_view::SideViewKind;
use crate::Format;
use crate::offline::SnapshotName;
use std::num::NonZero;

/// Default bytes of L2 tables in memory: all of a 256 GiB qcow2 image with 64 KiB clusters.
pub const DEFAULT_METADATA_CACHE: u64 = 32 << 20;

/// Options for serving an image.
#[derive(Clone, Debug)]
pub struct ImageOptions {
    /// Format of the image.
    pub format: Format,
    /// Whether the image is opened for reading only.
    pub read_only: bool,
    /// Whether the guest may discard, and freed clusters are discarded in the file.
    pub discard: bool,
    /// Bytes of L2 tables in memory, for all images of the chain.
    pub metadata_cache: u64,
    /// Keys of the encrypted images of the chain.
    pub keys: Keys,
    /// For a raw image: offset in bytes of the disk in its file.
    pub offset: u64,
    /// For a raw image: size of the disk in bytes; `None`: up to the end of the file.
    pub size: Option<u64>,
    /// Internal snapshot whose state is served; requires `read_only`.
    pub snapshot: Option<SnapshotName>,
    /// For tools: stores writes of whole clusters compressed (see
    /// [`ImageDisk::compress_unit`](super::ImageDisk::compress_unit)).
    pub compress: bool,
    /// For tools: allows sizes that no guest can use. An incomplete last sector of a raw file is
    /// padded with zeroes, and a disk may be empty.
    pub any_size: bool,
    /// For jobs: side views of the same images (see
    /// [`ImageDisk::side_view`](super::ImageDisk::side_view)).
    pub side_view: Option<SideViewKind>,
    /// For a change of the backing file. The caller only writes data that the disk reads as
    /// already. Ranges that it zeroes must read as zeroes by the image's own entries, even if the
    /// present backing file has zeroes there, too.
    pub rebasing: bool,
    /// Clusters beyond the end of an image's file read as zeroes. Otherwise reads of them fail, and
    /// an image whose tables refer to such clusters is not opened for writing.
    pub zero_missing_clusters: bool,
    /// How the bitmaps inside a qcow2 image are handled.
    pub own_bitmaps: OwnBitmaps,
    /// Keeps the host's page cache at activation. Correct only if no other host has written to the
    /// files. (A migrated guest has run on another host.)
    pub keep_page_cache: bool,
    /// Maximum number of threads that compress and decompress, for all workers. More threads than
    /// processors gain nothing. Threads start with the first job. 0: jobs wait for
    /// [`ImageDisk::help`](super::ImageDisk::help).
    pub helpers: usize,
}

/// How the bitmaps inside a qcow2 image are handled when the image is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnBitmaps {
    /// The enabled bitmaps are marked as unusable.
    Missed,
    /// For a tool: the bitmaps stay valid without recording, since the tool changes nothing that
    /// they would have to record.
    Kept,
    /// A user of the disk records changes. The user calls
    /// [`ImageDisk::take_bitmaps`](super::ImageDisk::take_bitmaps) before the first change.
    Recorded,
}

impl ImageOptions {
    /// Returns the default options for this format.
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
            side_view: None,
            rebasing: false,
            own_bitmaps: OwnBitmaps::Missed,
            keep_page_cache: false,
            helpers: std::thread::available_parallelism().map_or(1, NonZero::get),
        }
    }
}
