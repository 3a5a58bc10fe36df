//! Marks of images that cannot have extended attributes.
//!
//! Each mark is a file in the server's definition directory.

use super::mark::{MAX_MARK, Superseded};
use crate::lasting::{Sameness, compare};
use fathom_units::cause;
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Subdirectory of the definition directory that holds the records.
const NAME: &str = "superseded";

/// Maximum number of records that are read.
const MAX_RECORDS: usize = 10_000;

static DIRECTORY: RwLock<Option<PathBuf>> = RwLock::new(None);

/// Sets the definition directory in which this process keeps its records. No other server may use
/// the directory.
pub fn set_directory(definitions: &Path) {
    let mut directory = DIRECTORY.write();
    *directory = Some(definitions.join(NAME));
}

fn directory() -> Option<PathBuf> {
    let directory = DIRECTORY.read();
    directory.clone()
}

#[derive(Serialize, Deserialize)]
struct Record {
    location: String,
    /// The image's lasting identity, see [`lasting_id`](crate::lasting::lasting_id).
    id: Option<String>,
    mark: Superseded,
}

impl Record {
    /// Returns whether the record belongs to the image at `location`.
    ///
    /// The identities decide if they can be compared, because a device may get another name, and a
    /// name may lead to another device. Otherwise the location decides.
    fn is_of(&self, location: &str, id: Option<&str>) -> bool {
        let sameness = match (self.id.as_deref(), id) {
            (Some(own), Some(id)) => compare(own, id),
            _ => Sameness::Unknown,
        };
        match sameness {
            Sameness::Same => true,
            Sameness::Different => false,
            Sameness::Unknown => self.location == location,
        }
    }
}

/// Reads all records with their paths.
fn all(directory: &Path) -> Vec<(PathBuf, Record)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let paths = paths.filter(|path| path.extension().is_some_and(|end| end == "json"));
    let read = paths
        .take(MAX_RECORDS)
        .filter_map(|path| Some((path.clone(), read(&path)?)));
    read.collect()
}

fn read(path: &Path) -> Option<Record> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = File::options().read(true).custom_flags(flags).open(path);
    let mut text = Vec::new();
    let most = 4 * MAX_MARK as u64;
    file.and_then(|file| file.take(most).read_to_end(&mut text))
        .ok()?;
    serde_json::from_slice(&text).ok()
}

pub(super) fn find(location: &str, id: Option<&str>) -> Option<Superseded> {
    let all = all(&directory()?).into_iter();
    let mut own = all.filter(|(_, record)| record.is_of(location, id));
    own.next().map(|(_, record)| record.mark)
}

/// Writes the image's record durably, and replaces an existing one.
pub(super) fn keep(location: &str, id: Option<&str>, mark: &Superseded) -> Result<(), String> {
    let directory = directory().ok_or("the server has no directory for a record (disks-dir)")?;
    let failed = |error: io::Error| {
        format!(
            "{}: cannot write the file: {}",
            directory.display(),
            cause(error)
        )
    };
    let before = all(&directory);
    let before = before.iter().find(|(_, record)| record.is_of(location, id));
    let record = Record {
        location: location.to_owned(),
        id: id.map(str::to_owned),
        mark: mark.clone(),
    };
    let write = || -> io::Result<()> {
        match DirBuilder::new().mode(0o755).create(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let mut file = tempfile::Builder::new()
            .prefix("image-")
            .suffix(".json")
            .permissions(Permissions::from_mode(0o600))
            .tempfile_in(&directory)?;
        file.write_all(&serde_json::to_vec(&record)?)?;
        file.as_file().sync_all()?;
        match before {
            Some((path, _)) => drop(file.persist(path).map_err(|error| error.error)?),
            None => drop(file.keep().map_err(|error| error.error)?),
        }
        File::open(&directory)?.sync_all()?;
        // The directory itself may be new.
        directory
            .parent()
            .map_or(Ok(()), |above| File::open(above)?.sync_all())
    };
    write().map_err(failed)
}

/// Removes the image's records durably.
pub(super) fn forget(location: &str, id: Option<&str>) -> Result<(), String> {
    let Some(directory) = directory() else {
        return Ok(());
    };
    let own = all(&directory).into_iter();
    let own: Vec<_> = own
        .filter(|(_, record)| record.is_of(location, id))
        .collect();
    if own.is_empty() {
        return Ok(());
    }
    let removed = own.iter().try_for_each(|(path, _)| fs::remove_file(path));
    removed
        .and_then(|()| File::open(&directory)?.sync_all())
        .map_err(|error| {
            format!(
                "{}: cannot remove the mark: {}",
                directory.display(),
                cause(error)
            )
        })
}
