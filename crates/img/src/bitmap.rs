//! `fathom img bitmap`

use crate::error::{Error, io_error, of, usage};
use crate::open::{identity, open_writable};
use fathom_formats::Format;
use fathom_formats::offline::bitmap::{Bitmaps, Bits, Change, list};
use fathom_formats::offline::info::Info;
use fathom_formats::offline::{Image, open_read_only};
use fathom_storage::lock_image;
use std::fs::File;
use std::path::{Path, PathBuf};

pub use fathom_formats::offline::bitmap::Listed;

/// What is done to a bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BitmapChange {
    /// Make it, with the granularity that the options say.
    Add,
    /// Delete it.
    Remove,
    /// Nothing is dirty any more.
    Clear,
    /// Record writes.
    Enable,
    /// Record no more.
    Disable,
    /// Take in what is dirty in the bitmap of this name.
    Merge(String),
}

/// The rest of what the user says.
#[derive(Clone, Debug, Default)]
pub struct BitmapOptions {
    /// None means to look at the image.
    pub format: Option<Format>,
    /// Bytes that a bit of a new bitmap stands for.
    pub granularity: Option<u64>,
    /// The image that has the bitmaps to be merged: by default the same.
    pub source: Option<PathBuf>,
    /// See `format`.
    pub source_format: Option<Format>,
}

/// Changes a bitmap of an image in all these ways, one after the other: all of them are made, or
/// none.
pub fn bitmap(
    path: &Path,
    name: &str,
    changes: &[BitmapChange],
    options: &BitmapOptions,
) -> Result<(), Error> {
    let file = open_writable(path, false)?;
    lock_image(path, &file, true)?;
    check_format(path, &file, options.format)?;
    let source = match &options.source {
        Some(source) => Source::open(source, options.source_format, &file)?,
        None => None,
    };
    let mut bitmaps = Bitmaps::open(&file).map_err(of(path))?;
    for change in changes {
        let bits;
        let change = match (change, &source) {
            (BitmapChange::Add, _) => Change::Add(options.granularity),
            (BitmapChange::Remove, _) => Change::Remove,
            (BitmapChange::Clear, _) => Change::Clear,
            (BitmapChange::Enable, _) => Change::Enable,
            (BitmapChange::Disable, _) => Change::Disable,
            (BitmapChange::Merge(from), None) => Change::Merge(from),
            (BitmapChange::Merge(from), Some(source)) => {
                bits = source.bits(from)?;
                Change::MergeFrom(&bits)
            }
        };
        bitmaps.change(name, change).map_err(of(path))?;
    }
    bitmaps.commit().map_err(of(path))
}

/// The bitmaps of an image. `force_share` reads it even while others write.
pub fn bitmaps(
    path: &Path,
    format: Option<Format>,
    force_share: bool,
) -> Result<Vec<Listed>, Error> {
    let file = open_read_only(path).map_err(io_error(path, "cannot be opened"))?;
    if !force_share {
        lock_image(path, &file, false)?;
    }
    check_format(path, &file, format)?;
    list(&file).map_err(of(path))
}

/// Another image that has bitmaps.
struct Source {
    path: PathBuf,
    file: File,
    info: Info,
}

impl Source {
    /// `None`: it is the image itself, which is locked already.
    fn open(path: &Path, format: Option<Format>, own: &File) -> Result<Option<Source>, Error> {
        let file = open_read_only(path).map_err(io_error(path, "cannot be opened"))?;
        if identity(&file).ok() == identity(own).ok() {
            return Ok(None);
        }
        lock_image(path, &file, false)?;
        check_format(path, &file, format)?;
        Ok(Some(Source {
            info: Info::read(path, &file, format).map_err(of(path))?,
            path: path.to_owned(),
            file,
        }))
    }

    fn bits(&self, name: &str) -> Result<Bits<'_>, Error> {
        let found = self.info.bitmaps.iter().find(|b| b.name == name.as_bytes());
        let (Some(bitmap), Image::Qcow2(header)) = (found, &self.info.image) else {
            return Err(usage(&self.path, format!("has no bitmap '{name}'")));
        };
        Bits::read(&self.file, header, bitmap).map_err(of(&self.path))
    }
}

fn check_format(path: &Path, file: &File, format: Option<Format>) -> Result<(), Error> {
    let format = match format {
        Some(format) => format,
        None => Format::probe(file).map_err(of(path))?,
    };
    match format {
        Format::Qcow2 => Ok(()),
        other => Err(usage(
            path,
            format!("is a {other} image: only qcow2 images have bitmaps"),
        )),
    }
}
