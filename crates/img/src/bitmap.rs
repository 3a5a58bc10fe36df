//! `fathom img bitmap`

use crate::error::{Error, of, usage};
use crate::open::{OpenOptions, format_of, identity_of, info_of, open_locked};
use fathom_formats::Format;
use fathom_formats::offline::Image;
use fathom_formats::offline::bitmap::{Bitmaps, Bits, Change, list};
use fathom_formats::offline::info::Info;
use fathom_formats::served::Storage;
use fathom_stack::StoredImage;
use fathom_storage::Location;
use std::sync::Arc;

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
    pub source: Option<Location>,
    /// See `format`.
    pub source_format: Option<Format>,
}

/// Changes a bitmap of an image in all these ways, one after the other: all of them are made, or
/// none.
pub fn bitmap(
    location: &Location,
    name: &str,
    changes: &[BitmapChange],
    options: &BitmapOptions,
) -> Result<(), Error> {
    let image = open_locked(location, &OpenOptions::writing(None))?;
    check_format(&image, options.format)?;
    let source = match &options.source {
        Some(source) => Source::open(source, options.source_format, &image)?,
        None => None,
    };
    let told = of(image.path());
    let mut bitmaps = Bitmaps::open(image.bytes()).map_err(&told)?;
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
        bitmaps.change(name, change).map_err(&told)?;
    }
    bitmaps.commit().map_err(&told)
}

/// The bitmaps of an image. `force_share` reads it even while others write.
pub fn bitmaps(
    location: &Location,
    format: Option<Format>,
    force_share: bool,
) -> Result<Vec<Listed>, Error> {
    let image = open_locked(location, &OpenOptions::looking(force_share))?;
    check_format(&image, format)?;
    list(image.bytes()).map_err(of(image.path()))
}

/// Another image that has bitmaps.
struct Source {
    image: Arc<StoredImage>,
    info: Info,
}

impl Source {
    /// `None`: it is the image itself, which is locked already.
    fn open(
        location: &Location,
        format: Option<Format>,
        own: &StoredImage,
    ) -> Result<Option<Source>, Error> {
        if identity_of(location) == Some(own.identity()) {
            return Ok(None);
        }
        let image = open_locked(location, &OpenOptions::looking(false))?;
        check_format(&image, format)?;
        let info = info_of(image.path(), &image, format)?;
        Ok(Some(Source { image, info }))
    }

    fn bits(&self, name: &str) -> Result<Bits<'_>, Error> {
        let found = self.info.bitmaps.iter().find(|b| b.name == name.as_bytes());
        let (Some(bitmap), Image::Qcow2(header)) = (found, &self.info.image) else {
            return Err(usage(self.image.path(), format!("has no bitmap '{name}'")));
        };
        Bits::read(self.image.bytes(), header, bitmap).map_err(of(self.image.path()))
    }
}

fn check_format(image: &StoredImage, format: Option<Format>) -> Result<(), Error> {
    match format_of(image, format)? {
        Format::Qcow2 => Ok(()),
        other => Err(usage(
            image.path(),
            format!("is a {other} image: only qcow2 images have bitmaps"),
        )),
    }
}
