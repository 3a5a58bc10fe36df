//! `fathom img resize`

use crate::below::Backing;
use crate::error::{Error, of, usage};
use crate::open::{missing, open_writable};
use fathom_files::ImageFile;
use fathom_formats::Format;
use fathom_formats::offline::Image;
use fathom_formats::offline::edit::room_for_tables;
use fathom_formats::offline::resize::{Below, Resize, resize as work};
use fathom_stack::{data_file, no_data_file};
use fathom_storage::lock_image;
use std::fs::File;
use std::path::{Path, PathBuf};

pub use fathom_formats::offline::create::Preallocation;

/// A size, or how much it changes; in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewSize {
    /// That many bytes.
    To(u64),
    /// More than now.
    Plus(u64),
    /// Less than now.
    Minus(u64),
}

/// How a disk is resized.
#[derive(Clone, Debug)]
pub struct ResizeOptions {
    /// What it is to be.
    pub size: NewSize,
    /// How what is new is allocated.
    pub preallocation: Preallocation,
    /// What is behind the new end may be lost.
    pub shrink: bool,
    /// Directories, other than the image's own, in which it may name files.
    pub allow_dirs: Vec<PathBuf>,
    /// The external data file, whatever the image calls it.
    pub data_file: Option<PathBuf>,
}

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resized {
    /// The image's format.
    pub format: Format,
    /// Bytes of the disk before.
    pub old: u64,
    /// Bytes of the disk now.
    pub new: u64,
}

/// Resizes the disk of an image. A failure, a power cut or a kill leaves the old size or the new
/// one.
pub fn resize(
    path: &Path,
    format: Option<Format>,
    options: &ResizeOptions,
) -> Result<Resized, Error> {
    let file = open_writable(path, false)?;
    lock_image(path, &file, true)?;
    let format = match format {
        Some(format) => format,
        None => Format::probe(&file).map_err(of(path))?,
    };
    let image = Image::read(&file, format).map_err(of(path))?;
    let old = image.size();
    let new = new_size(path, old, options)?;
    if format == Format::Raw && !is_regular(&file) && new != old {
        let problem = "is a device, which has the size it has";
        return Err(usage(path, problem));
    }
    let data = open_data_file(path, &image, options.data_file.as_deref())?;
    let below = match new > old {
        true => Backing::open(path, &image, &options.allow_dirs)?,
        false => None,
    };
    let to = Resize {
        size: new,
        preallocation: options.preallocation,
        data_file: data.as_ref().map(|d| d as &dyn ImageFile),
        below: below.as_ref().map(|b| b as &dyn Below),
    };
    if new != old {
        let done = work(&file, format, &to).map_err(of(path));
        done.map_err(|error| error.needing(|| missing(&file, needed(&file, &image, &to))))?;
    }
    Ok(Resized { format, old, new })
}

/// Bytes that the new size may take.
fn needed(file: &File, image: &Image, to: &Resize) -> u64 {
    let data = match to.preallocation {
        Preallocation::Falloc | Preallocation::Full => to.size.saturating_sub(image.size()),
        Preallocation::Off | Preallocation::Metadata => 0,
    };
    let len = ImageFile::len(file).unwrap_or(0) + data;
    match image {
        Image::Qcow2(header) => {
            let l1_entries = header.geometry().l1_entries_for(to.size);
            data + room_for_tables(header, l1_entries, len)
        }
        Image::Raw { .. } | Image::Qed(..) => data,
    }
}

fn is_regular(file: &File) -> bool {
    file.metadata().is_ok_and(|m| m.is_file())
}

fn new_size(path: &Path, old: u64, options: &ResizeOptions) -> Result<u64, Error> {
    let new = match options.size {
        NewSize::To(size) => Some(size),
        NewSize::Plus(more) => old.checked_add(more),
        NewSize::Minus(less) => old.checked_sub(less),
    };
    let new = new.filter(|new| (1..=i64::MAX as u64).contains(new));
    let Some(new) = new else {
        let problem = format!("the new size is not 1 byte to 8 EiB; the disk has {old} bytes now");
        return Err(usage(path, problem));
    };
    if new < old && !options.shrink {
        let problem = format!(
            "would shrink from {old} to {new} bytes, and what is behind that would be lost: use \
             --shrink if nothing there is needed"
        );
        return Err(usage(path, problem));
    }
    if new <= old && options.preallocation != Preallocation::Off {
        let problem = "preallocation is for a disk that becomes larger";
        return Err(usage(path, problem));
    }
    Ok(new)
}

/// The external data file, locked like the image.
fn open_data_file(
    image: &Path,
    header: &Image,
    given: Option<&Path>,
) -> Result<Option<File>, Error> {
    let name = match header {
        Image::Qcow2(header) if header.geometry().data_file => header.data_file(),
        _ => None,
    };
    let Some(name) = name else {
        return match given {
            Some(_) => Err(no_data_file(image).into()),
            None => Ok(None),
        };
    };
    let path = data_file(image, name, given)?;
    let file = open_writable(path, false)?;
    lock_image(path, &file, true)?;
    Ok(Some(file))
}
