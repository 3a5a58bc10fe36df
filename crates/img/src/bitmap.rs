//! `fathom img bitmap`

use crate::error::{Error, of, usage};
use crate::open::{
    OpenOptions, format_of, header_of, identity_of, info_of, open_bare, open_locked,
};
use fathom_formats::offline::Image;
use fathom_formats::offline::bitmap::{self as own, Bits, Change};
use fathom_formats::offline::info::Info;
use fathom_formats::served::Storage;
use fathom_formats::{Format, resolve};
use fathom_stack::{BitmapStatus, Bitmaps, StoredImage};
use fathom_storage::Location;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A change to a dirty bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BitmapChange {
    /// Creates the bitmap with the granularity given in the options.
    Add,
    /// Deletes the bitmap.
    Remove,
    /// Marks all blocks as clean.
    Clear,
    /// Starts recording writes.
    Enable,
    /// Stops recording writes.
    Disable,
    /// Adds the dirty blocks of the bitmap with this name.
    Merge(String),
}

/// Further options for changing bitmaps.
#[derive(Clone, Debug, Default)]
pub struct BitmapOptions {
    /// Format of the image. `None`: detect it.
    pub format: Option<Format>,
    /// Granularity of a new bitmap: number of bytes of the disk per bit.
    pub granularity: Option<u64>,
    /// The image that contains the bitmaps to merge. `None`: the changed image itself.
    pub source: Option<Location>,
    /// Format of `source`. `None`: detect it.
    pub source_format: Option<Format>,
    /// Directory of the bitmaps that are stored outside images. `None`: next to the image.
    pub dir: Option<PathBuf>,
}

/// Applies all changes, in order, to a bitmap of an image: either all take effect, or none. A
/// bitmap stored next to the image accepts only one change at a time.
pub fn bitmap(
    location: &Location,
    name: &str,
    changes: &[BitmapChange],
    options: &BitmapOptions,
) -> Result<(), Error> {
    let found = Found::open(location, OpenOptions::writing(options.format))?;
    let image = match &found.image {
        Some(image) if found.has_own => image,
        _ => return change_beside(&found, location, name, changes, options),
    };
    if found.has_beside(location, name, options)? {
        return change_beside(&found, location, name, changes, options);
    }
    let source = match &options.source {
        Some(source) => Source::open(source, options.source_format, image)?,
        None => None,
    };
    let told = of(image.path());
    let mut bitmaps = own::Bitmaps::open(image.bytes()).map_err(&told)?;
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

/// A dirty bitmap of an image.
#[derive(Clone, Debug)]
pub enum Listed {
    /// A bitmap stored in the image.
    Own(own::Listed),
    /// A bitmap stored in files next to the image.
    Beside(BitmapStatus),
}

impl Listed {
    /// Returns the name of the bitmap, for display.
    pub fn name(&self) -> String {
        match self {
            Listed::Own(own) => own.name(),
            Listed::Beside(status) => status.name.clone(),
        }
    }

    /// Returns the granularity: number of bytes of the disk per bit.
    pub fn granularity(&self) -> u64 {
        match self {
            Listed::Own(own) => own.bitmap.granularity(),
            Listed::Beside(status) => status.granularity,
        }
    }

    /// Returns the number of dirty bytes of the disk, if it is known.
    pub fn dirty(&self) -> Option<u64> {
        match self {
            Listed::Own(own) => own.dirty,
            Listed::Beside(status) => Some(status.dirty),
        }
    }

    /// Returns the flags, named as in `qemu-img info`, plus `beside` for a bitmap stored next to
    /// the image.
    pub fn flags(&self) -> Vec<&'static str> {
        match self {
            Listed::Own(own) => own.flags(),
            Listed::Beside(_) => vec!["auto", "beside"],
        }
    }

    /// Returns why the whole disk counts as dirty, if it does.
    pub fn problem(&self) -> Option<&str> {
        match self {
            Listed::Own(_) => None,
            Listed::Beside(status) => status.problem.as_deref(),
        }
    }
}

/// Lists the bitmaps of an image; those stored next to it, or in `dir`, come last. `force_share`
/// allows reading while other processes write. `tell` receives a message for each unreadable
/// bitmap.
pub fn bitmaps(
    location: &Location,
    format: Option<Format>,
    dir: Option<&Path>,
    force_share: bool,
    tell: &mut dyn FnMut(&str),
) -> Result<Vec<Listed>, Error> {
    let options = OpenOptions {
        format,
        ..OpenOptions::looking(force_share)
    };
    let found = Found::open(location, options)?;
    let mut all = Vec::new();
    if let Some(image) = found.image.as_ref().filter(|_| found.has_own) {
        let own = own::list(image.bytes()).map_err(of(image.path()))?;
        all.extend(own.into_iter().map(Listed::Own));
    }
    match found.beside(location, dir) {
        Ok(beside) => {
            let beside = beside.look(found.size);
            let (beside, problems) = beside.map_err(|problem| usage(&location.name(), problem))?;
            problems.iter().for_each(|problem| tell(problem));
            all.extend(beside.into_iter().map(Listed::Beside));
        }
        // Some locations, such as Ceph, have no place next to the image.
        Err(_) if found.has_own => {}
        Err(problem) => {
            return Err(usage(&location.name(), format!("no bitmaps: {problem}")));
        }
    }
    Ok(all)
}

/// The disk whose bitmaps are listed or changed. The disk is locked as far as its storage supports
/// locks.
struct Found {
    /// Storage of the image. `None`: the disk of an NBD server.
    image: Option<Arc<StoredImage>>,
    /// Size of the disk in bytes.
    size: u64,
    /// Whether the format can store bitmaps in the image.
    has_own: bool,
    /// Path of the external data file, if the image has one.
    data: Option<PathBuf>,
}

impl Found {
    /// Returns the bitmaps stored outside the image.
    fn beside(&self, location: &Location, dir: Option<&Path>) -> Result<Bitmaps, String> {
        Bitmaps::unserved(location, dir, self.data.clone())
    }

    /// Returns whether the named bitmap is stored next to an image that could store it itself. For
    /// example, a killed server may leave such a bitmap.
    fn has_beside(
        &self,
        location: &Location,
        name: &str,
        options: &BitmapOptions,
    ) -> Result<bool, Error> {
        let Ok(beside) = self.beside(location, options.dir.as_deref()) else {
            return Ok(false);
        };
        let looked = beside.look(self.size);
        let (all, _) = looked.map_err(|problem| usage(&location.name(), problem))?;
        // A server may serve the file as a raw disk in which the guest has written a qcow2 header.
        if !all.is_empty() && options.format.is_none() {
            let problem = "looks like a qcow2 image, but its bitmaps are in files next to it; pass -f raw \
                 or -f qcow2";
            return Err(usage(&location.name(), problem));
        }
        Ok(all.iter().any(|bitmap| bitmap.name == name))
    }

    fn open(location: &Location, options: OpenOptions) -> Result<Found, Error> {
        if let Some(disk) = open_bare(location, &options)? {
            return Ok(Found {
                image: None,
                size: disk.info().size,
                has_own: false,
                data: None,
            });
        }
        let image = open_locked(location, &options)?;
        let header = header_of(&image, format_of(&image, options.format)?)?;
        if let Image::Foreign(foreign) = &header {
            let what = foreign.kind;
            return Err(usage(
                image.path(),
                format!("a {what} image, which can only be read; it has no bitmaps"),
            ));
        }
        Ok(Found {
            size: header.size(),
            has_own: matches!(&header, Image::Qcow2(header) if header.version >= 3),
            data: { header.data_file() }.and_then(|name| resolve(image.path(), name).ok()),
            image: Some(image),
        })
    }
}

/// Changes a bitmap that is not stored in the image.
fn change_beside(
    found: &Found,
    location: &Location,
    name: &str,
    changes: &[BitmapChange],
    options: &BitmapOptions,
) -> Result<(), Error> {
    let told = |problem: String| usage(&location.name(), problem);
    if options.source.is_some() {
        return Err(told(
            "the bitmaps in files next to an image merge only with each other; omit the source \
             file"
                .into(),
        ));
    }
    let bitmaps = found
        .beside(location, options.dir.as_deref())
        .map_err(|problem| told(format!("no bitmaps: {problem}")))?;
    let size = found.size;
    // No server serves the disk, so no request is in flight.
    let mut unused = || Ok(());
    let done = bitmaps.change_unserved(|bitmaps| match changes {
        [BitmapChange::Add] => bitmaps.add(name, size, options.granularity, &mut unused),
        [BitmapChange::Remove] => bitmaps.remove(name, size),
        [BitmapChange::Clear] => bitmaps.clear(name, size, &mut unused),
        [BitmapChange::Enable | BitmapChange::Disable] => {
            Err("a bitmap in a file next to an image cannot be disabled; remove it instead".into())
        }
        changes => merged(changes).and_then(|from| bitmaps.merge(name, &from, size)),
    });
    done.map_err(told)
}

/// Returns the names of the bitmaps to merge. Returns an error if `changes` contains any other
/// change.
fn merged(changes: &[BitmapChange]) -> Result<Vec<String>, String> {
    let merged = changes.iter().map(|change| match change {
        BitmapChange::Merge(from) => Ok(from.clone()),
        _ => Err(
            "only one action at a time is possible for bitmaps in files next to an image"
                .to_owned(),
        ),
    });
    merged.collect()
}

/// Another image, from which bitmaps are merged.
struct Source {
    image: Arc<StoredImage>,
    info: Info,
}

impl Source {
    /// Opens and locks the source image. Returns `None` if it is the changed image, which is
    /// already locked.
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
            return Err(usage(self.image.path(), format!("no bitmap '{name}'")));
        };
        Bits::read(self.image.bytes(), header, bitmap).map_err(of(self.image.path()))
    }
}

fn check_format(image: &StoredImage, format: Option<Format>) -> Result<(), Error> {
    match format_of(image, format)? {
        Format::Qcow2 => Ok(()),
        other => Err(usage(
            image.path(),
            format!("a {other} image, and only qcow2 images have bitmaps"),
        )),
    }
}
