//! Changes of an image's internal snapshots, while the disk's users wait.

use fathom_core::DiskError;
use fathom_formats::offline::snapshot::{create, delete, list, now};
use fathom_formats::served::ImageDisk;
use fathom_formats::{Error, Result};
use fathom_metrics::SnapshotInfo;
use std::sync::OnceLock;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Takes a snapshot with this name.
    Take(String),
    /// Deletes the snapshot with this name or ID.
    Delete(String),
}

/// A change of the snapshots, and its result.
pub struct SnapshotWork {
    change: Change,
    /// All snapshots after the change.
    done: OnceLock<Vec<SnapshotInfo>>,
}

impl SnapshotWork {
    pub fn new(change: Change) -> SnapshotWork {
        SnapshotWork {
            change,
            done: OnceLock::new(),
        }
    }

    /// Changes the snapshots of an image that is not in use. May block. The error is for the user:
    /// the snapshots are unchanged, unless the error occurred after the change.
    pub fn run(&self, image: &ImageDisk) -> std::result::Result<(), String> {
        let changed = image.alone(|file| {
            match &self.change {
                Change::Take(name) => {
                    if list(file)?.iter().any(|one| one.name == name.as_bytes()) {
                        let problem = format!(
                            "a snapshot named '{name}' already exists; choose another name"
                        );
                        return Err(Error::Usage(problem));
                    }
                    create(file, name, now())?
                }
                Change::Delete(which) => delete(file, which)?,
            };
            Ok(list(file))
        });
        let listed = changed.map_err(|error| error.to_string())?;
        let all = listed.map_err(|error| {
            format!("the change was made, but the snapshots cannot be listed: {error}")
        })?;
        // (The change is made only once.)
        let _ = self.done.set(all.iter().map(SnapshotInfo::from).collect());
        Ok(())
    }

    /// Returns all snapshots after the change, or `None` before the change.
    pub fn done(&self) -> Option<&[SnapshotInfo]> {
        self.done.get().map(Vec::as_slice)
    }
}

/// Returns all snapshots of an image, which may be in use. May block. The error is for the user.
pub fn all_of(image: &ImageDisk) -> std::result::Result<Vec<SnapshotInfo>, String> {
    let all = image.look(|file| -> Result<_> { list(file) });
    let all = all.map_err(|error: DiskError| error.to_string())?;
    Ok(all.iter().map(SnapshotInfo::from).collect())
}
