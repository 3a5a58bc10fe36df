//! Parameters and status of a backup.

use std::path::PathBuf;

/// Parameters of a backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The directory of the scratch file, which has no name and disappears with the backup.
    pub scratch: PathBuf,
    /// Maximum number of bytes that the scratch file may occupy on disk.
    ///
    /// `None` means half of the file system's free space at the start, since the image may need
    /// the rest.
    pub most: Option<u64>,
    /// The bitmap of earlier changes, which gets a successor at the instant. Need not exist.
    pub bitmap: Option<String>,
    /// Whether users' writes are held until [`Backup::go_on`](super::Backup::go_on) or a timeout.
    pub held: bool,
}

/// Callback with the reason of a failure, called on the backup's thread.
pub type Failed = Box<dyn Fn(&str) + Send>;

/// Progress of a backup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Number of bytes in the scratch file.
    pub kept: u64,
    /// Why the backup has failed; data read from it must not be used.
    pub problem: Option<String>,
}
