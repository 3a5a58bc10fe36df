//! `fathom img create`

use crate::error::{Error, of, usage};
use crate::open::{OpenOptions, header_of, identity_of, open};
use crate::target::Target;
use fathom_formats::offline::create as creation;
use fathom_formats::served::{Keys, Storage};
use fathom_stack::{KeyRing, StoredImage, seen_from};
use fathom_storage::Location;

pub use creation::{Backing, Options as CreateOptions};

/// Result of creating an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Created {
    /// Size of the disk in bytes.
    pub size: u64,
    /// The disk reads as zeroes, except for the contents of its backing file. If `false`, the disk
    /// may read as the previous contents of a device.
    pub reads_as_zeroes: bool,
}

/// Creates an image.
///
/// Without a size in the options, the disk has the size of its backing file. With `unsafe_backing`,
/// the backing file is not opened. If the options request encryption, the first key encrypts the
/// image.
///
/// The previous contents of an existing target are lost, unless the options are invalid. After a
/// failure, a target that did not exist before is removed.
pub fn create(
    location: &Location,
    options: &CreateOptions,
    unsafe_backing: bool,
    keys: &KeyRing,
) -> Result<Created, Error> {
    options.validate().map_err(of(&location.name()))?;
    let size = size_of(location, options, unsafe_backing)?;
    let writing = OpenOptions::writing(Some(options.format));
    // The identity check finds a data file that is the image itself only if the image has a name.
    let named = options.qcow2.data_file.is_some();
    let target = Target::open(location, named, &writing)?;
    let reads_as_zeroes = create_in(&target, location, options, size, keys)?;
    target.complete()?;
    Ok(Created {
        size,
        reads_as_zeroes,
    })
}

/// Creates an image in a target and locks it. `location` is the target's final location. Returns
/// [`Created::reads_as_zeroes`].
pub(crate) fn create_in(
    target: &Target,
    location: &Location,
    options: &CreateOptions,
    size: u64,
    keys: &KeyRing,
) -> Result<bool, Error> {
    let path = location.name();
    let keys = match options.encryption.is_wanted {
        true => keys.keys().map_err(|problem| usage(&path, problem))?,
        false => Keys::default(),
    };
    if options.encryption.is_wanted && keys.is_empty() {
        return Err(usage(
            &path,
            "an encrypted image needs a key; name one with --key",
        ));
    }
    let below = match &options.backing {
        Some(backing) => {
            // A remote backing file cannot be any of this host's files.
            let below = seen_from(location, backing.name.as_bytes());
            below.ok().and_then(|below| identity_of(&below))
        }
        None => None,
    };
    let image = target.image();
    if below == Some(image.identity()) {
        let problem = "the new image would be its own backing file; choose another name";
        return Err(usage(image.path(), problem));
    }
    image.disk().activate()?;
    let data = open_data_file(location, image, options, below)?;
    let bytes = data.as_ref().map(|data| data.image().bytes());
    let made = creation::create(image.bytes(), bytes, options, size, keys.first());
    made.map_err(of(image.path()))?;
    let reads_as_zeroes = creation::reads_as_zeroes(image.bytes(), bytes, options);
    data.map_or(Ok(()), Target::complete)?;
    Ok(reads_as_zeroes)
}

pub(crate) fn size_of(
    location: &Location,
    options: &CreateOptions,
    unsafe_backing: bool,
) -> Result<u64, Error> {
    let path = location.name();
    let backing = match &options.backing {
        Some(backing) if !unsafe_backing => Some(backing_size(location, backing)?),
        Some(backing) if backing.format.is_none() => {
            let problem = format!(
                "the format of backing file {} is not given; add -F",
                backing.name
            );
            return Err(usage(&path, problem));
        }
        _ => None,
    };
    let size = options.size.or(backing);
    size.ok_or_else(|| usage(&path, "no size given; add one, such as 10G"))
}

/// Returns the size of the disk in the backing file of a new image at `location`.
fn backing_size(location: &Location, backing: &Backing) -> Result<u64, Error> {
    let told = of(&location.name());
    let below = seen_from(location, backing.name.as_bytes())?;
    let image = open(&below, &OpenOptions::looking(true))
        .map_err(|error| usage(&location.name(), format!("backing file {error}")))?;
    match backing.format {
        Some(format) if format.is_only_read() => Ok(header_of(&image, format)?.size()),
        format => creation::backing_size(image.path(), image.bytes(), format).map_err(told),
    }
}

/// Opens and locks the external data file, if the options name one.
fn open_data_file(
    location: &Location,
    image: &StoredImage,
    options: &CreateOptions,
    below: Option<(u64, u64)>,
) -> Result<Option<Target>, Error> {
    let Some(name) = &options.qcow2.data_file else {
        return Ok(None);
    };
    let place = seen_from(location, name.as_bytes())?;
    if place.path().is_none() {
        let problem = "a data file cannot be in another image; omit data_file";
        return Err(usage(&location.name(), problem));
    }
    let there = identity_of(&place);
    let same = match there {
        Some(_) if there == Some(image.identity()) => {
            Some("the new image would be its own data file; choose another name")
        }
        Some(_) if there == below => {
            Some("the new image's data file is also its backing file; choose another name")
        }
        _ => None,
    };
    if let Some(problem) = same {
        return Err(usage(&place.name(), problem));
    }
    let data = Target::open(&place, true, &OpenOptions::writing(Some(options.format)))?;
    data.image().disk().activate()?;
    Ok(Some(data))
}
