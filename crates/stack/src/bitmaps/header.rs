//! The header of a bitmap's file: a line of JSON.

use serde::{Deserialize, Serialize};
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::SystemTime;

/// Offset of the bits in bytes, a multiple of any page size.
pub(super) const LEN: u64 = 64 << 10;

/// Length of the header in bytes: a sector, which is written atomically.
pub(super) const LINE: usize = 512;

/// Offset of a byte that is set if the file was truncated or unreadable while in use.
const LOST: u64 = 4096;

const FORMAT: &str = "fathom bitmap 1";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Header {
    pub(super) format: String,
    /// Size of the disk, and bytes per bit.
    pub(super) size: u64,
    pub(super) block: u64,
    /// Creation time in nanoseconds since 1970, which identifies the bitmap.
    pub(super) since: u64,
    /// Boot identifier of the machine that uses the bitmap now, or died while it did.
    pub(super) used_by: Option<String>,
    /// State of the image's file when it was closed, if there is one.
    pub(super) image: Option<Left>,
    /// Digest of the disk's name, where a directory may hold bitmaps of other disks.
    #[serde(default)]
    pub(super) of: Option<String>,
    /// Why everything is dirty.
    pub(super) problem: Option<String>,
    /// Whether the image has the bitmap, too, whose version there counts if it is valid.
    #[serde(default)]
    pub(super) own: bool,
}

/// Attributes of a file that change whenever the file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Left {
    inode: u64,
    size: u64,
    /// Times in seconds and nanoseconds.
    modified: (i64, i64),
    changed: (i64, i64),
    /// Digest of the state of the external data file, if there is one.
    #[serde(default)]
    data: u64,
}

impl Left {
    /// Returns whether the image is unchanged, but its external data file is not.
    pub(super) fn differ_in_data(one: Option<Left>, other: Option<Left>) -> bool {
        let is_same = |(one, other): (Left, Left)| {
            one != other && Left { data: 0, ..one } == Left { data: 0, ..other }
        };
        one.zip(other).is_some_and(is_same)
    }

    /// Returns whether both are known to belong to different files.
    pub(super) fn are_of_two_files(one: Option<Left>, other: Option<Left>) -> bool {
        one.zip(other)
            .is_some_and(|(one, other)| one.inode != other.inode)
    }
}

/// Returns a digest of the state of an image's external data file.
///
/// `None` means that the state is unknown; such a digest never matches.
pub(crate) fn data_of(found: Option<&Metadata>) -> u64 {
    let said = match found {
        // A device has no such attributes.
        Some(found) if !found.is_file() => return 0,
        Some(found) => format!("{:?}", Left::of(found, found.dev())),
        None => format!("{:?}", SystemTime::now()),
    };
    let told = blake3::hash(said.as_bytes());
    u64::from_ne_bytes(*told.as_bytes().first_chunk().expect("there are 32"))
}

impl Left {
    /// Creates the state of a file. `data` is the [digest](data_of) of its data file, or zero.
    pub(crate) fn of(found: &Metadata, data: u64) -> Left {
        Left {
            inode: found.ino(),
            size: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
            data,
        }
    }
}

impl Header {
    pub(super) fn new(size: u64, block: u64, since: u64) -> Header {
        Header {
            format: FORMAT.into(),
            size,
            block,
            since,
            used_by: None,
            image: None,
            of: None,
            problem: None,
            own: false,
        }
    }

    /// Reads the header. Returns `None` if the file is not a bitmap of this program.
    pub(super) fn read(file: &File) -> io::Result<Option<Header>> {
        let mut line = [0; LINE];
        match file.read_exact_at(&mut line, 0) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        let end = line.iter().position(|byte| *byte == b'\n').unwrap_or(LINE);
        let header: Option<Header> = serde_json::from_slice(&line[..end]).ok();
        Ok(header.filter(Header::makes_sense))
    }

    fn makes_sense(&self) -> bool {
        self.format == FORMAT && super::limits::is_granularity(self.size, self.block)
    }

    /// Writes the header durably.
    pub(super) fn write(&self, file: &File) -> io::Result<()> {
        let mut line = serde_json::to_vec(self)?;
        if line.len() >= LINE {
            return Err(io::Error::other("the header is full"));
        }
        line.resize(LINE - 1, b' ');
        line.push(b'\n');
        file.write_all_at(&line, 0)?;
        file.sync_data()
    }
}

/// Marks the file as lost. Async-signal-safe.
pub(super) fn tell_lost(file: &File) {
    // If the write fails, the file is too short, which is detected, too.
    let _ = rustix::io::pwrite(file, &[1], LOST);
}

pub(super) fn was_lost(file: &File) -> io::Result<bool> {
    let mut lost = [0];
    file.read_exact_at(&mut lost, LOST)?;
    Ok(lost != [0])
}
