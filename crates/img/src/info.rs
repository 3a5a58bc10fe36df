//! `fathom img info`

use crate::error::{Error, of, usage};
use crate::open::{OpenOptions, info_of, open_bare, open_locked};
use fathom_formats::Format;
use fathom_formats::offline::info as infos;
use fathom_formats::served::Storage;
use fathom_stack::{ImageOpener, StoredImage, seen_from};
use fathom_storage::Location;
use std::path::PathBuf;

pub use infos::Info;

/// Maximum number of images in a backing chain.
const MAX_CHAIN: usize = 1024;

/// Options for describing an image.
#[derive(Clone, Debug, Default)]
pub struct InfoOptions {
    /// Format of the image. `None`: detect it.
    pub format: Option<Format>,
    /// Read the image even while other processes write to it.
    pub force_share: bool,
    /// Also describe all images of the backing chain.
    pub chain: bool,
    /// Directories in which backing files may be, besides the image's own directory.
    pub allow_dirs: Vec<PathBuf>,
}

/// Describes an image and, optionally, its backing chain, or the disk of an NBD URI.
pub fn info(location: &Location, options: &InfoOptions) -> Result<Vec<Info>, Error> {
    let open = OpenOptions {
        format: options.format,
        ..OpenOptions::looking(options.force_share)
    };
    if let Some(disk) = open_bare(location, &open)? {
        let (name, kind) = (location.name(), location.kind().name);
        return Ok(vec![Info::of_disk(&name, disk.info().size, kind)]);
    }
    let image = open_locked(location, &open)?;
    let top = info_of(&location.name(), &image, options.format)?;
    let shared = OpenOptions {
        allow_dirs: options.allow_dirs.clone(),
        ..OpenOptions::looking(true)
    };
    let below = match options.chain {
        true => below(&image, &top, &shared)?,
        false => Vec::new(),
    };
    let below = below.into_iter().map(|link| link.info);
    Ok(std::iter::once(top).chain(below).collect())
}

/// An image of a backing chain, other than the top image.
pub(crate) struct Link {
    /// Description of the image. The path in the description is built from the names stored in the
    /// images.
    pub(crate) info: Info,
    /// Storage of the image, which is not locked.
    pub(crate) image: StoredImage,
}

/// Opens all images of the backing chain of `image`, each in a directory where it may be.
///
/// The format that an overlay names for its backing image is trusted. A missing format is detected
/// from the first bytes, which is harmless: only headers are read and shown.
pub(crate) fn below(
    image: &StoredImage,
    top: &Info,
    options: &OpenOptions,
) -> Result<Vec<Link>, Error> {
    let opener = ImageOpener::of(image.location(), &options.storage(), &options.allow_dirs)?;
    let mut seen = vec![image.identity()];
    let mut links: Vec<Link> = Vec::new();
    loop {
        let (above, at) = match links.last() {
            Some(link) => (&link.info, &link.image),
            None => (top, image),
        };
        let Some(name) = above.image.backing_file() else {
            return Ok(links);
        };
        let found = opener.open_named(at.path(), name, false)?;
        let own = found.identity();
        if seen.contains(&own) || seen.len() == MAX_CHAIN {
            let problem = format!(
                "the chain of backing files contains {} twice, or has more than {MAX_CHAIN} \
                 images",
                found.path().display()
            );
            return Err(usage(&top.path, problem));
        }
        seen.push(own);
        let format = above.image.backing_format();
        let format = format.map(|name| Format::from_name(&name)).transpose();
        let format = format.map_err(of(at.path()))?;
        // Show paths as the images name them: relative to the path of the top image.
        let shown = match at.location().path() {
            Some(_) => seen_from(&Location::file(&above.path), name)?.name(),
            None => found.location().name(),
        };
        let info = info_of(&shown, &found, format)?;
        links.push(Link { info, image: found });
    }
}
