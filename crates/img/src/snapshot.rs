//! `fathom img snapshot`

use crate::error::{Error, of, usage};
use crate::open::{OpenOptions, format_of, missing, open_locked};
use fathom_files::ImageFile;
use fathom_formats::Format;
use fathom_formats::offline::edit::room_for_tables;
use fathom_formats::offline::{Image, snapshot as work};
use fathom_formats::served::Storage;
use fathom_storage::Location;

pub use fathom_formats::offline::info::SnapshotList;

/// A change to an image's snapshots. An existing snapshot is named by its name or ID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotChange {
    /// Creates a snapshot with this name.
    Create(String),
    /// Reverts the disk to this snapshot.
    Apply(String),
    /// Deletes this snapshot.
    Delete(String),
}

/// Lists the snapshots of an image. The list is empty if the format has no snapshots. `format`
/// `None` detects the format. `force_share` allows reading while other processes write.
pub fn snapshots(
    location: &Location,
    format: Option<Format>,
    force_share: bool,
) -> Result<SnapshotList, Error> {
    let image = open_locked(location, &OpenOptions::looking(force_share))?;
    let list = match format_of(&image, format)? {
        Format::Qcow2 => work::list(image.bytes()).map_err(of(image.path()))?,
        _ => Vec::new(),
    };
    Ok(SnapshotList(list))
}

/// Changes an image's snapshots, and returns the affected one. After a failure, a power cut or a
/// kill, the image is either unchanged or completely changed.
pub fn change_snapshots(
    location: &Location,
    format: Option<Format>,
    change: &SnapshotChange,
) -> Result<SnapshotList, Error> {
    let image = open_locked(location, &OpenOptions::writing(None))?;
    let format = format_of(&image, format)?;
    if format != Format::Qcow2 {
        let problem = format!("{format} images have no internal snapshots; only qcow2 images have");
        return Err(usage(image.path(), problem));
    }
    let file = image.bytes();
    let done = match change {
        SnapshotChange::Create(name) => work::create(file, name, work::now()),
        SnapshotChange::Apply(which) => work::apply(file, which),
        SnapshotChange::Delete(which) => work::delete(file, which),
    };
    done.map(|snapshot| SnapshotList(vec![snapshot]))
        .map_err(of(image.path()))
        .map_err(|error| error.needing(|| missing(&image, tables(file))))
}

/// Returns the maximum number of bytes that the new tables may allocate.
fn tables(file: &dyn ImageFile) -> u64 {
    let len = file.len().unwrap_or(0);
    match Image::read(file, Format::Qcow2) {
        Ok(Image::Qcow2(header)) => room_for_tables(&header, header.l1_entries.into(), len),
        _ => 0,
    }
}
