//! A disk as it is without its filters.

use fathom_core::{Disk, Part};
use fathom_files::UsedFile;
use fathom_formats::served::ImageDisk;
use fathom_storage::{FileDisk, Halt};
use std::sync::Arc;

pub(crate) struct Bare {
    pub(crate) disk: Arc<dyn Disk>,
    /// That it is in, if it is in one.
    pub(crate) file: Option<Arc<FileDisk>>,
    /// The image that it is, if that has a format or is a part of its file.
    /// That of its external data file, which is written to.
    pub(crate) data: Option<Arc<FileDisk>>,
    pub(crate) image: Option<Arc<ImageDisk>>,
    /// The file or image that it is all of, where it has no format.
    pub(crate) whole: Option<UsedFile>,
    /// What it has to leave, and what that is called among the disk's parts.
    pub(crate) part: Option<(&'static str, Arc<dyn Part>)>,
    /// See [`Opened::halt`](fathom_storage::Opened).
    pub(crate) halt: Option<Halt>,
}
