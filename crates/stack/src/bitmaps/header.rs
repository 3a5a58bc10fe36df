//! The beginning of a bitmap's file: a line of JSON.

use serde::{Deserialize, Serialize};
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::SystemTime;

/// Its bits begin here: a page, however large those are.
pub(super) const LEN: u64 = 64 << 10;

/// A sector, which is written as a whole or not at all.
const LINE: usize = 512;

/// Says that the file was found too short, or could not be read, while it was in use.
const LOST: u64 = 4096;

const FORMAT: &str = "fathom bitmap 1";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Header {
    pub(super) format: String,
    /// Bytes of the disk that it has bits for, and of what one bit stands for.
    pub(super) size: u64,
    pub(super) block: u64,
    /// When it was begun (nanoseconds since 1970), by which it is known.
    pub(super) since: u64,
    /// The boot of the machine that changes it now, or has died in the middle.
    pub(super) used_by: Option<String>,
    /// How the image's file was left, if it has one.
    pub(super) image: Option<Left>,
    /// Stands for what the disk is called, where other disks may be meant.
    #[serde(default)]
    pub(super) of: Option<String>,
    /// Why all is dirty.
    pub(super) problem: Option<String>,
    /// The image has it, too, and what that says counts if it can be believed.
    #[serde(default)]
    pub(super) own: bool,
}

/// A file that nobody has changed since looks like this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Left {
    inode: u64,
    size: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    changed: (i64, i64),
    /// Stands for how the file was left that its data is in, if that is another one.
    #[serde(default)]
    data: u64,
}

impl Left {
    /// The image is as it was, and its data is not, which is in another file.
    pub(super) fn differ_in_data(one: Option<Left>, other: Option<Left>) -> bool {
        let is_same = |(one, other): (Left, Left)| {
            one != other && Left { data: 0, ..one } == Left { data: 0, ..other }
        };
        one.zip(other).is_some_and(is_same)
    }

    /// They are known to be.
    pub(super) fn are_of_two_files(one: Option<Left>, other: Option<Left>) -> bool {
        one.zip(other)
            .is_some_and(|(one, other)| one.inode != other.inode)
    }
}

/// Stands for how the file is that an image's data is in, if that is another one. None: it could not be seen, and is never
/// as it was.
pub(crate) fn data_of(found: Option<&Metadata>) -> u64 {
    let said = match found {
        // (A device does not tell.)
        Some(found) if !found.is_file() => return 0,
        Some(found) => format!("{:?}", Left::of(found, found.dev())),
        None => format!("{:?}", SystemTime::now()),
    };
    let told = blake3::hash(said.as_bytes());
    u64::from_ne_bytes(*told.as_bytes().first_chunk().expect("there are 32"))
}

impl Left {
    /// `data`: [what stands for it](data_of), or 0.
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

    /// None: it is none of this program's.
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

    /// Durably.
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

/// Says so. Async-signal-safe.
pub(super) fn tell_lost(file: &File) {
    // (Where that cannot be written, the file is too short, which is seen.)
    let _ = rustix::io::pwrite(file, &[1], LOST);
}

pub(super) fn was_lost(file: &File) -> io::Result<bool> {
    let mut lost = [0];
    file.read_exact_at(&mut lost, LOST)?;
    Ok(lost != [0])
}
