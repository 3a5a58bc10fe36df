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

/// Images of one chain.
const MAX_CHAIN: usize = 1024;

/// How to look at an image.
#[derive(Clone, Debug, Default)]
pub struct InfoOptions {
    /// None means to look at the image.
    pub format: Option<Format>,
    /// Read the image even while others write.
    pub force_share: bool,
    /// Describe all images below it, too.
    pub chain: bool,
    /// Where backing files may be, besides the image's own directory.
    pub allow_dirs: Vec<PathBuf>,
}

/// Describes an image, or it and all below it; or the disk of an NBD URI.
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

/// An image below another one.
pub(crate) struct Link {
    /// Its path is what the images' names say.
    pub(crate) info: Info,
    /// It is not locked.
    pub(crate) image: StoredImage,
}

/// All images below `image`, where they may be, opened like this. A format that the image
/// above names is believed; one that it does not name is seen from the first bytes, which is harmless
/// since nothing but headers is read and shown.
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
        // As the images name them: relative names begin where the first one does.
        let shown = match at.location().path() {
            Some(_) => seen_from(&Location::file(&above.path), name)?.name(),
            None => found.location().name(),
        };
        let info = info_of(&shown, &found, format)?;
        links.push(Link { info, image: found });
    }
}
