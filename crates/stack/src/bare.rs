//! A disk without its filters.

use fathom_core::{Disk, Part};
use fathom_files::UsedFile;
use fathom_formats::served::ImageDisk;
use fathom_storage::{FileDisk, Halt};
use std::sync::Arc;

pub(crate) struct Bare {
    pub(crate) disk: Arc<dyn Disk>,
    /// The file of the disk, if the disk is in a file.
    pub(crate) file: Option<Arc<FileDisk>>,
    /// The external data file, which is written to.
    pub(crate) data: Option<Arc<FileDisk>>,
    /// The disk's image, if it has a format or is a part of its file.
    pub(crate) image: Option<Arc<ImageDisk>>,
    /// The whole file or image, if the disk has no format.
    pub(crate) whole: Option<UsedFile>,
    /// The state for a successor, and its name among the disk's parts.
    pub(crate) part: Option<(&'static str, Arc<dyn Part>)>,
    /// See [`Opened::halt`](fathom_storage::Opened).
    pub(crate) halt: Option<Halt>,
}
