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

/// What is done to an image's snapshots, by a name or (of one that is there) an ID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotChange {
    /// One is taken under that name.
    Create(String),
    /// The disk becomes what it was then.
    Apply(String),
    /// It is deleted.
    Delete(String),
}

/// The snapshots of an image; none of one in a format without snapshots. `format` `None` means to
/// look at the image. `force_share` reads it even while others write.
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

/// Changes an image's snapshots; returns the one that was meant. A failure, a power cut or a kill
/// leaves the image as it was, or as it was to be.
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

/// Bytes that the new tables may take.
fn tables(file: &dyn ImageFile) -> u64 {
    let len = file.len().unwrap_or(0);
    match Image::read(file, Format::Qcow2) {
        Ok(Image::Qcow2(header)) => room_for_tables(&header, header.l1_entries.into(), len),
        _ => 0,
    }
}
