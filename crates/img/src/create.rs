//! `fathom img create`

use crate::error::{Error, of, usage};
use crate::open::{identity, identity_of, open_target, refuse_same};
use fathom_files::ImageFile;
use fathom_formats::offline::create as creation;
use fathom_formats::resolve;
use fathom_storage::lock_image;
use std::fs::File;
use std::path::Path;

pub use creation::{Backing, Options as CreateOptions};

/// Makes an image. Its size is that of the backing file where none is given,
/// and goes into the options; `unsafe_backing` does without looking at the
/// backing file. Returns the size.
///
/// What the file had in it is lost, unless something is wrong with the
/// options. A file that was not there is not left behind after a failure.
pub fn create(path: &Path, options: &CreateOptions, unsafe_backing: bool) -> Result<u64, Error> {
    options.validate().map_err(of(path))?;
    let size = size_of(path, options, unsafe_backing)?;
    let (file, is_new) = open_target(path)?;
    let made = create_in(path, &file, options, size);
    if made.is_err() && is_new {
        // The error that there is says more than one about this would.
        let _ = std::fs::remove_file(path);
    }
    made.map(|()| size)
}

/// Makes an image in this file, whose name is, or is to be, `path`.
pub(crate) fn create_in(
    path: &Path,
    file: &File,
    options: &CreateOptions,
    size: u64,
) -> Result<(), Error> {
    let below = match &options.backing {
        Some(backing) => identity_of(&resolve(path, backing.name.as_bytes()).map_err(of(path))?),
        None => None,
    };
    let same = "is the new image's backing file, too: choose another name";
    refuse_same(path, file, below, same)?;
    lock_image(path, file, true)?;
    let data = open_data_file(path, file, options, below)?;
    let data = data.as_ref().map(|d| d as &dyn ImageFile);
    creation::create(file, data, options, size).map_err(of(path))
}

pub(crate) fn size_of(
    path: &Path,
    options: &CreateOptions,
    unsafe_backing: bool,
) -> Result<u64, Error> {
    let backing = match &options.backing {
        Some(backing) if !unsafe_backing => {
            Some(creation::backing_size(path, backing).map_err(of(path))?)
        }
        Some(backing) if backing.format.is_none() => {
            let problem = format!(
                "the format of backing file {} is needed, too: -F",
                backing.name
            );
            return Err(usage(path, problem));
        }
        _ => None,
    };
    let size = options.size.or(backing);
    size.ok_or_else(|| usage(path, "a new image needs a size, such as 10G"))
}

fn open_data_file(
    image: &Path,
    image_file: &File,
    options: &CreateOptions,
    below: Option<(u64, u64)>,
) -> Result<Option<File>, Error> {
    let Some(name) = &options.qcow2.data_file else {
        return Ok(None);
    };
    let path = resolve(image, name.as_bytes()).map_err(of(image))?;
    let (file, _) = open_target(&path)?;
    let own = identity(image_file).ok();
    refuse_same(&path, &file, own, "is the new image itself, too")?;
    refuse_same(&path, &file, below, "is the new image's backing file, too")?;
    lock_image(&path, &file, true)?;
    Ok(Some(file))
}
