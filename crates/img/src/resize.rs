//! `fathom img resize`

use crate::below::Backing;
use crate::error::{Error, of, usage};
use crate::open::{OpenOptions, format_of, missing, open_locked};
use fathom_files::ImageFile;
use fathom_formats::Format;
use fathom_formats::offline::Image;
use fathom_formats::offline::edit::room_for_tables;
use fathom_formats::offline::resize::{Below, Resize, resize as work};
use fathom_formats::served::Storage;
use fathom_stack::{KeyRing, StoredImage, data_file, no_data_file};
use fathom_storage::Location;
use fathom_units::NewSize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use fathom_formats::offline::create::Preallocation;

/// Options for resizing a disk.
#[derive(Clone, Debug)]
pub struct ResizeOptions {
    /// New size of the disk.
    pub size: NewSize,
    /// How to allocate the added space.
    pub preallocation: Preallocation,
    /// Allow the disk to shrink, which discards the data beyond the new end.
    pub shrink: bool,
    /// Directories in which the image may name files, besides its own directory.
    pub allow_dirs: Vec<PathBuf>,
    /// Path of the external data file, overriding the name in the image.
    pub data_file: Option<PathBuf>,
    /// Keys that unlock the backing images.
    pub keys: KeyRing,
}

/// Result of resizing a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resized {
    /// Format of the image.
    pub format: Format,
    /// Size of the disk before, in bytes.
    pub old: u64,
    /// Size of the disk now, in bytes.
    pub new: u64,
}

/// Resizes the disk of an image. After a failure, a power cut or a kill, the disk has either the
/// old or the new size.
pub fn resize(
    location: &Location,
    format: Option<Format>,
    options: &ResizeOptions,
) -> Result<Resized, Error> {
    let image = open_locked(location, &OpenOptions::writing(None))?;
    let format = format_of(&image, format)?;
    let (path, file) = (image.path(), image.bytes());
    let header = Image::read(file, format).map_err(of(path))?;
    let old = header.size();
    let new = new_size(path, old, options)?;
    if !format.has_tables() && !image.is_file() && new != old {
        let problem = "the size of a device cannot be changed here";
        return Err(usage(path, problem));
    }
    let data = open_data_file(path, &header, options.data_file.as_deref())?;
    let below = match new > old {
        true => Backing::open(&image, &header, &options.allow_dirs, &options.keys)?,
        false => None,
    };
    let to = Resize {
        size: new,
        preallocation: options.preallocation,
        data_file: data.as_ref().map(|d| d.bytes()),
        below: below.as_ref().map(|b| b as &dyn Below),
    };
    if new != old {
        let done = work(file, format, &to).map_err(of(path));
        done.map_err(|error| error.needing(|| missing(&image, needed(file, &header, &to))))?;
    }
    Ok(Resized { format, old, new })
}

/// Returns the maximum number of bytes that the resize may allocate.
fn needed(file: &dyn ImageFile, image: &Image, to: &Resize) -> u64 {
    let data = match to.preallocation {
        Preallocation::Falloc | Preallocation::Full => to.size.saturating_sub(image.size()),
        Preallocation::Off | Preallocation::Metadata => 0,
    };
    let len = file.len().unwrap_or(0) + data;
    match image {
        Image::Qcow2(header) => {
            let l1_entries = header.geometry().l1_entries_for(to.size);
            data + room_for_tables(header, l1_entries, len)
        }
        Image::Raw(_) | Image::Qed(_) | Image::Luks(_) | Image::Foreign(_) => data,
    }
}

fn new_size(path: &Path, old: u64, options: &ResizeOptions) -> Result<u64, Error> {
    let new = options.size.apply(old);
    let new = new.filter(|new| (1..=i64::MAX as u64).contains(new));
    let Some(new) = new else {
        let problem =
            format!("the new size is not from 1 byte to 8 EiB; the disk has {old} bytes now");
        return Err(usage(path, problem));
    };
    if new < old && !options.shrink {
        let problem = format!(
            "the disk would shrink from {old} to {new} bytes, and lose the data beyond; add \
             --shrink if that data is not needed"
        );
        return Err(usage(path, problem));
    }
    if new <= old && options.preallocation != Preallocation::Off {
        let problem = "preallocation applies only to a disk that grows";
        return Err(usage(path, problem));
    }
    Ok(new)
}

/// Opens the external data file, and locks it like the image.
fn open_data_file(
    image: &Path,
    header: &Image,
    given: Option<&Path>,
) -> Result<Option<Arc<StoredImage>>, Error> {
    let Some(name) = header.data_file() else {
        return match given {
            Some(_) => Err(no_data_file(image).into()),
            None => Ok(None),
        };
    };
    let location = Location::file(data_file(image, name, given)?);
    open_locked(&location, &OpenOptions::writing(None)).map(Some)
}
