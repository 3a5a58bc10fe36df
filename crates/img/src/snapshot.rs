//! `fathom img snapshot`

use crate::error::{Error, io_error, of, usage};
use crate::open::{missing, open_writable};
use fathom_files::ImageFile;
use fathom_formats::Format;
use fathom_formats::offline::edit::room_for_tables;
use fathom_formats::offline::{Image, open_read_only, snapshot as work};
use fathom_storage::lock_image;
use std::fs::File;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

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
    path: &Path,
    format: Option<Format>,
    force_share: bool,
) -> Result<SnapshotList, Error> {
    let file = open_read_only(path).map_err(io_error(path, "cannot be opened"))?;
    if !force_share {
        lock_image(path, &file, false)?;
    }
    let list = match format_of(path, &file, format)? {
        Format::Qcow2 => work::list(&file).map_err(of(path))?,
        _ => Vec::new(),
    };
    Ok(SnapshotList(list))
}

/// Changes an image's snapshots; returns the one that was meant. A failure, a power cut or a kill
/// leaves the image as it was, or as it was to be.
pub fn change_snapshots(
    path: &Path,
    format: Option<Format>,
    change: &SnapshotChange,
) -> Result<SnapshotList, Error> {
    let file = open_writable(path, false)?;
    lock_image(path, &file, true)?;
    let format = format_of(path, &file, format)?;
    if format != Format::Qcow2 {
        let problem = format!("{format} images have no internal snapshots, only qcow2 has");
        return Err(usage(path, problem));
    }
    let done = match change {
        SnapshotChange::Create(name) => work::create(&file, name, now()),
        SnapshotChange::Apply(which) => work::apply(&file, which),
        SnapshotChange::Delete(which) => work::delete(&file, which),
    };
    done.map(|snapshot| SnapshotList(vec![snapshot]))
        .map_err(of(path))
        .map_err(|error| error.needing(|| missing(&file, tables(&file))))
}

/// Bytes that the new tables may take.
fn tables(file: &File) -> u64 {
    let len = ImageFile::len(file).unwrap_or(0);
    match Image::read(file, Format::Qcow2) {
        Ok(Image::Qcow2(header)) => room_for_tables(&header, header.l1_entries.into(), len),
        _ => 0,
    }
}

fn format_of(path: &Path, file: &File, format: Option<Format>) -> Result<Format, Error> {
    match format {
        Some(format) => Ok(format),
        None => Format::probe(file).map_err(of(path)),
    }
}

/// Seconds since the epoch, as far as 32 bits go, and nanoseconds.
fn now() -> (u32, u32) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default();
    let seconds = u32::try_from(now.as_secs()).unwrap_or(u32::MAX);
    (seconds, now.subsec_nanos())
}
