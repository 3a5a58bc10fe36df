//! What a kind of storage is.

use crate::cached::CacheTerms;
use crate::engine::EngineKind;
use crate::file::{Cache, FileDisk, OnSuperseded};
use fathom_core::{Disk, DiskError, Legacy, Part};
use fathom_files::ImageFile;
use fathom_units::{Timeout, parse_size};
use std::ffi::OsStr;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// A kind of storage: what users are told of it, and how its disks are found.
#[derive(Debug)]
pub struct Kind {
    pub name: &'static str,
    /// How its disks are written; several ways are separated by commas.
    pub form: &'static str,
    /// One line.
    pub what: &'static str,
    /// What its disks begin with: `memory:`, `nbd://`; none: a path.
    pub prefixes: &'static [&'static str],
    /// Images of formats can be in its disks.
    pub images: bool,
    /// A library makes its connections, in the process that has the disk.
    pub network: bool,
    /// Others use its disks, too, who are kept away while one is in use here.
    pub locks: bool,
    /// Which of the options that not every kind takes it does take.
    pub options: &'static [&'static str],
    pub(crate) parse: fn(&OsStr) -> Result<Arc<dyn Place>, String>,
}

impl Kind {
    /// Whether this option, by its name on the command line, is for it.
    pub fn takes(&self, option: &str) -> bool {
        self.options.contains(&option)
    }
}

/// Where a disk's bytes are: what a [`Kind`] makes of a text, which [`fmt::Display`] gives back.
pub(crate) trait Place: fmt::Display + Send + Sync {
    /// Opens it; may block.
    fn open(&self, options: &OpenOptions) -> Result<Opened, DiskError>;

    /// Makes it, of no bytes, unless it is there: then the answer is false. May block. (Files are made by whoever
    /// knows what is to become of their names.)
    fn create(&self) -> Result<bool, DiskError> {
        Err(self.cannot_be_made())
    }

    /// Removes it, once it is closed; may block.
    fn remove(&self) -> Result<(), DiskError> {
        Err(self.cannot_be_made())
    }

    /// Of kinds whose disks are others' to make.
    fn cannot_be_made(&self) -> DiskError {
        DiskError::Unusable {
            path: self.to_string().into(),
            problem: "images of this kind cannot be created or removed here".into(),
        }
    }

    /// The file, of those that are in one.
    fn path(&self) -> Option<&Path> {
        None
    }

    /// Where a base image comes from, of those that are kept on this host.
    fn remote(&self) -> Option<&str> {
        None
    }

    /// The directory of files that say how it is reached, if it names some.
    fn settings_dir(&self) -> Option<&Path> {
        None
    }

    /// What an image that is in it may call `name`: a backing file, say. None: nothing.
    fn beside(&self, _name: &str) -> Option<Arc<dyn Place>> {
        None
    }

    /// The same, of another size in bytes, if its size is a part of how it is written.
    fn with_size(&self, _size: u64) -> Option<Arc<dyn Place>> {
        None
    }
}

/// What all kinds are told; each goes by what concerns it.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    pub cache: Cache,
    pub read_only: bool,
    /// The guest may discard.
    pub discard: bool,
    /// It holds an image of a format of its own: what lies beyond its end reads as zeroes, and a write there
    /// makes it longer, if its kind can.
    pub growable: bool,
    /// Read an image that others may be writing. Needs `read_only`.
    pub force_share: bool,
    /// While others have it, it can be opened, but not used: for servers, to which they hand it over.
    pub patient: bool,
    /// Who has it is whom it comes from.
    pub succeeds: bool,
    /// Once it is in use nobody else gets it before it is closed, even if it is not in use any more.
    pub keeps_lock: bool,
    /// What becomes of an image to be written that a newer one has superseded.
    pub superseded: OnSuperseded,
    /// The engine that the disk's workers will use.
    pub engine: EngineKind,
    /// How many they are.
    pub workers: usize,
    /// How long an NBD server may say nothing of a request; `None`: the default.
    pub server_timeout: Option<Timeout>,
    /// How long requests wait for an NBD server that is away; `None`: the default.
    pub server_reconnect: Option<Timeout>,
    /// Whether the connections to an NBD server are made again when they are lost. What a server has under the same
    /// name later may be something else: the next backup of a disk, for example.
    pub server_is_sought: bool,
    /// Connections of each worker to an NBD server; `None`: the default.
    pub server_connections: Option<u8>,
    /// How base images are kept on this host.
    pub base: CacheTerms,
    /// What the disk before it has lent, as [`PART`].
    pub legacy: Legacy,
}

/// What a storage is called among a disk's parts.
pub const PART: &str = "storage";

/// An open disk.
pub struct Opened {
    pub disk: Arc<dyn Disk>,
    /// The same, if it is a file.
    pub file: Option<Arc<FileDisk>>,
    /// The same, if it has something to leave.
    pub part: Option<Arc<dyn Part>>,
    /// The same, for whoever waits, if images can be in it and it is no file.
    pub bytes: Option<Arc<dyn ImageFile>>,
    /// With `bytes`: what tells it from all others of its kind, however it is called.
    pub identity: Option<String>,
    /// Gives the disk up, if that is possible while its storage does not answer.
    pub halt: Option<Halt>,
}

/// Gives a disk up: all of its requests fail soon, now and later, and no server is looked for. Does not wait.
pub type Halt = Arc<dyn Fn() + Send + Sync>;

impl Opened {
    /// A disk that is in no file.
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

/// A disk that is nothing but its size: of kinds that are written like `memory:4G`.
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
