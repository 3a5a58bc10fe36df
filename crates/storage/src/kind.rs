//! Kinds of storage, and the options and results of opening a disk.

use crate::cached::CacheTerms;
use crate::engine::EngineKind;
use crate::file::{Cache, FileDisk, OnSuperseded};
use fathom_core::{Disk, DiskError, HandoverState, Part};
use fathom_files::ImageFile;
use fathom_units::{Timeout, parse_size};
use std::ffi::OsStr;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// A kind of storage: its description for users, and how its disks are parsed and opened.
#[derive(Debug)]
pub struct Kind {
    /// Name of the kind, such as `file` or `nbd`.
    pub name: &'static str,
    /// Syntax of its disks' locations; alternatives are separated by commas.
    pub form: &'static str,
    /// One-line description.
    pub what: &'static str,
    /// Prefixes of its disks' locations: `memory:`, `nbd://`. Empty for paths.
    pub prefixes: &'static [&'static str],
    /// Whether its disks can hold images of a format such as qcow2.
    pub images: bool,
    /// Whether a library makes its network connections, in the process that serves the disk.
    pub network: bool,
    /// Whether its disks are locked against other users while they are in use here.
    pub locks: bool,
    /// Names of the kind-specific options that this kind accepts.
    pub options: &'static [&'static str],
    pub(crate) parse: fn(&OsStr) -> Result<Arc<dyn Place>, String>,
}

impl Kind {
    /// Returns whether the kind accepts the option with this name on the command line.
    pub fn takes(&self, option: &str) -> bool {
        self.options.contains(&option)
    }
}

/// The place of a disk's bytes. A [`Kind`] parses it from text, and [`fmt::Display`] writes that
/// text.
pub(crate) trait Place: fmt::Display + Send + Sync {
    /// Opens the disk; may block.
    fn open(&self, options: &OpenOptions) -> Result<Opened, DiskError>;

    /// Creates it with a length of 0, and returns whether it did; false if it exists already. May
    /// block. (Files are created by callers, which decide on their names.)
    fn create(&self) -> Result<bool, DiskError> {
        Err(self.cannot_be_made())
    }

    /// Removes it after it has been closed; may block.
    fn remove(&self) -> Result<(), DiskError> {
        Err(self.cannot_be_made())
    }

    /// Returns the error of kinds whose disks cannot be created or removed by Fathom.
    fn cannot_be_made(&self) -> DiskError {
        DiskError::Unusable {
            path: self.to_string().into(),
            problem: "images of this kind cannot be created or removed here".into(),
        }
    }

    /// Returns the path of the file, if the disk is in one.
    fn path(&self) -> Option<&Path> {
        None
    }

    /// Returns the location from which a base image is fetched, for images cached on this host.
    fn remote(&self) -> Option<&str> {
        None
    }

    /// Returns the directory of its connection settings files, if the location names one.
    fn settings_dir(&self) -> Option<&Path> {
        None
    }

    /// Resolves `name`, such as a backing file name stored in the image, relative to this place.
    /// None: such names are not allowed.
    fn beside(&self, _name: &str) -> Option<Arc<dyn Place>> {
        None
    }

    /// Returns the place with another size in bytes, if the size is a part of its text.
    fn with_size(&self, _size: u64) -> Option<Arc<dyn Place>> {
        None
    }
}

/// Options for opening a disk of any kind. Each kind uses those that concern it.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Cache mode of the disk.
    pub cache: Cache,
    /// Whether the disk is opened for reading only.
    pub read_only: bool,
    /// Whether the guest may discard.
    pub discard: bool,
    /// The disk holds an image of a format such as qcow2: bytes beyond its end read as zeroes, and
    /// a write there makes it longer, if its kind supports that.
    pub growable: bool,
    /// Whether to read an image that others may be writing. Needs `read_only`.
    pub force_share: bool,
    /// Whether to open the disk, without using it, while another process holds it. For servers to
    /// which another process hands the disk over.
    pub patient: bool,
    /// Whether the current holder of the disk is the predecessor from which the disk is taken over.
    pub succeeds: bool,
    /// Whether, once in use, the disk stays locked until it is closed, even after it is
    /// deactivated.
    pub keeps_lock: bool,
    /// Action when the image is opened for writing, but a newer image has superseded it.
    pub superseded: OnSuperseded,
    /// Engine of the disk's workers.
    pub engine: EngineKind,
    /// Number of the disk's workers.
    pub workers: usize,
    /// Time an NBD server may take to reply to a request; `None`: the default.
    pub server_timeout: Option<Timeout>,
    /// Time for which requests wait for a disconnected NBD server; `None`: the default.
    pub server_reconnect: Option<Timeout>,
    /// Whether lost connections to an NBD server are re-established. An export that reappears under
    /// the same name may be another one: the next backup of a disk, for example.
    pub server_is_sought: bool,
    /// Number of connections of each worker to an NBD server; `None`: the default.
    pub server_connections: Option<u8>,
    /// How base images are cached on this host.
    pub base: CacheTerms,
    /// State handed over by the disk's predecessor; this crate's part of it is named [`PART`].
    pub handover_state: HandoverState,
}

/// Name of the storage among the parts of a disk's handover state.
pub const PART: &str = "storage";

/// An open disk.
pub struct Opened {
    /// The disk, which is not activated yet.
    pub disk: Arc<dyn Disk>,
    /// The disk as a file, if it is one.
    pub file: Option<Arc<FileDisk>>,
    /// The disk as a part with handover state, if it has any.
    pub part: Option<Arc<dyn Part>>,
    /// The disk as an image file with blocking access, if it can hold images and is not a file.
    pub bytes: Option<Arc<dyn ImageFile>>,
    /// Set with `bytes`: a name that identifies the disk among all of its kind, however its
    /// location is written.
    pub identity: Option<String>,
    /// Abandons the disk, if the kind can do so while its storage does not respond.
    pub halt: Option<Halt>,
}

/// Abandons a disk: all pending and later requests fail soon, and no reconnection is tried. Does
/// not block.
pub type Halt = Arc<dyn Fn() + Send + Sync>;

impl Opened {
    /// Wraps a disk that has neither a file nor any other optional capability.
    pub(crate) fn new(disk: impl Disk + 'static) -> Opened {
        Opened {
            disk: Arc::new(disk),
            file: None,
            part: None,
            bytes: None,
            identity: None,
            halt: None,
        }
    }
}

/// The place of a disk that is defined by its size alone, such as `memory:4G`.
pub(crate) struct OfSize {
    prefix: &'static str,
    size: u64,
    open: Open,
}

type Open = fn(u64, &OpenOptions) -> Result<Opened, DiskError>;

impl OfSize {
    pub(crate) fn parse(
        prefix: &'static str,
        text: &OsStr,
        open: Open,
    ) -> Result<Arc<dyn Place>, String> {
        let text = text.to_str().and_then(|text| text.strip_prefix(prefix));
        match parse_size(text.unwrap_or_default())? {
            0..512 => Err("a disk needs at least 512 bytes".into()),
            size if size > i64::MAX as u64 => Err(format!("'{size}' is too large for a disk")),
            size => Ok(Arc::new(OfSize { prefix, size, open })),
        }
    }
}

impl Place for OfSize {
    fn open(&self, options: &OpenOptions) -> Result<Opened, DiskError> {
        (self.open)(self.size, options)
    }

    fn with_size(&self, size: u64) -> Option<Arc<dyn Place>> {
        let OfSize { prefix, open, .. } = *self;
        Some(Arc::new(OfSize { prefix, size, open }))
    }
}

impl fmt::Display for OfSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.prefix, self.size)
    }
}
