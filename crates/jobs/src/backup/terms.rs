//! What is asked for, and what is told.

use std::path::PathBuf;

/// Where it is kept what users are about to change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The directory of the scratch file, which has no name and is gone with the backup.
    pub scratch: PathBuf,
    /// So long that file may be (bytes that it has on disk); None: half of what its file system has left at the
    /// beginning. (The image may need the rest.)
    pub most: Option<u64>,
    /// The bitmap that says what has been changed before, and has a successor from the instant on. It need not be
    /// there.
    pub bitmap: Option<String>,
    /// Users change nothing until [`Backup::go_on`](super::Backup::go_on), or for as long as they wait for anything.
    pub held: bool,
}

/// Hears why it has failed, on a thread of the backup's.
pub type Failed = Box<dyn Fn(&str) + Send>;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Bytes in the scratch file.
    pub kept: u64,
    /// Why what is read of it is not to be used: it has failed.
    pub problem: Option<String>,
}
