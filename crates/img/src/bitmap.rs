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
    /// Where bitmaps are that no image has; by default beside the image.
    pub dir: Option<PathBuf>,
}

/// Changes a bitmap of an image in all these ways, one after the other: all of them are made, or
/// none. Of bitmaps that the image cannot have itself only one change is made at a time.
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

/// A bitmap of an image.
#[derive(Clone, Debug)]
pub enum Listed {
    /// It has it itself.
    Own(own::Listed),
    /// It is beside it.
    Beside(BitmapStatus),
}

impl Listed {
    /// Its name, for people.
    pub fn name(&self) -> String {
        match self {
            Listed::Own(own) => own.name(),
            Listed::Beside(status) => status.name.clone(),
        }
    }

    /// Bytes that a bit stands for.
    pub fn granularity(&self) -> u64 {
        match self {
            Listed::Own(own) => own.bitmap.granularity(),
            Listed::Beside(status) => status.granularity,
        }
    }

    /// Bytes of the disk that are dirty, where that is known.
    pub fn dirty(&self) -> Option<u64> {
        match self {
            Listed::Own(own) => own.dirty,
            Listed::Beside(status) => Some(status.dirty),
        }
    }

    /// As `qemu-img info` has them, and `beside` of one that the image does not have.
    pub fn flags(&self) -> Vec<&'static str> {
        match self {
            Listed::Own(own) => own.flags(),
            Listed::Beside(_) => vec!["auto", "beside"],
        }
    }

    /// Why all of the disk counts as dirty.
    pub fn problem(&self) -> Option<&str> {
        match self {
            Listed::Own(_) => None,
            Listed::Beside(status) => status.problem.as_deref(),
        }
    }
}

/// The bitmaps of an image, those beside it (or in `dir`) last. `force_share` reads it even while others write. `tell` is
/// told which cannot be read, and why.
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
        // (An image on Ceph, say.)
        Err(_) if found.has_own => {}
        Err(problem) => {
            return Err(usage(&location.name(), format!("no bitmaps: {problem}")));
        }
    }
    Ok(all)
}

/// What bitmaps are of, locked as far as that can be.
struct Found {
    /// None: an NBD server's disk.
    image: Option<Arc<StoredImage>>,
    /// Bytes of the disk.
    size: u64,
    /// The image can have bitmaps itself.
    has_own: bool,
    /// The file that its data is in, if that is another one.
    data: Option<PathBuf>,
}

impl Found {
    /// Those that are not in the image.
    fn beside(&self, location: &Location, dir: Option<&Path>) -> Result<Bitmaps, String> {
        Bitmaps::unserved(location, dir, self.data.clone())
    }

    /// Whether the bitmap that is meant is beside an image that can have bitmaps itself. (After a kill, say.)
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
        // Servers take it for a raw disk, perhaps, with what its guest has written to it.
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

/// Changes a bitmap that the image cannot have itself.
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
    // (Nobody serves the disk: no request is in flight.)
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

/// The names that are to be merged, if nothing else is to be done.
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
