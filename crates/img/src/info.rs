//! `fathom img info`

use crate::error::{Error, io_error, of, usage};
use crate::open::identity;
use crate::source::{connect, export};
use fathom_core::Disk;
use fathom_formats::offline::info as infos;
use fathom_formats::offline::open_read_only;
use fathom_formats::{Format, resolve};
use fathom_stack::AllowedDirs;
use fathom_storage::lock_image;
use std::fs::File;
use std::path::{Path, PathBuf};

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
pub fn info(path: &Path, options: &InfoOptions) -> Result<Vec<Info>, Error> {
    if let Some(uri) = export(path, options.format)? {
        let size = connect(&uri)?.info().size;
        return Ok(vec![Info::of_export(path, size)]);
    }
    let file = open_read_only(path).map_err(io_error(path, "cannot be opened"))?;
    if !options.force_share {
        lock_image(path, &file, false)?;
    }
    let top = Info::read(path, &file, options.format).map_err(of(path))?;
    let below = match options.chain {
        true => below(&file, &top, &options.allow_dirs)?,
        false => Vec::new(),
    };
    let below = below.into_iter().map(|link| link.info);
    Ok(std::iter::once(top).chain(below).collect())
}

/// An image below another one.
pub(crate) struct Link {
    /// Its path is what the images' names say.
    pub(crate) info: Info,
    /// Where it was found.
    pub(crate) path: PathBuf,
    pub(crate) file: File,
}

/// All images below the one in `file`, in the directories where they may be. A format that the image
/// above names is believed; one that it does not name is seen from the first bytes, which is harmless
/// since nothing but headers is read and shown.
pub(crate) fn below(file: &File, top: &Info, allow_dirs: &[PathBuf]) -> Result<Vec<Link>, Error> {
    let dirs = AllowedDirs::new(&top.path, allow_dirs)?;
    let same = |file: &File| identity(file).map_err(io_error(&top.path, "cannot be examined"));
    let mut seen = vec![same(file)?];
    let mut links: Vec<Link> = Vec::new();
    loop {
        let (above, at) = match links.last() {
            Some(link) => (&link.info, &link.path),
            None => (top, &top.path),
        };
        let Some(name) = above.image.backing_file() else {
            return Ok(links);
        };
        let (path, file) = dirs.open(at, name)?;
        let told = of(&path);
        let own = same(&file)?;
        if seen.contains(&own) || seen.len() == MAX_CHAIN {
            let problem = format!(
                "the chain of backing files comes back to {}, or has more than {MAX_CHAIN} images",
                path.display()
            );
            return Err(usage(&top.path, problem));
        }
        seen.push(own);
        let format = above.image.backing_format();
        let format = format.map(|name| Format::from_name(&name)).transpose();
        let shown = resolve(&above.path, name).map_err(&told)?;
        let info = Info::read(&shown, &file, format.map_err(of(at))?).map_err(&told)?;
        links.push(Link { info, path, file });
    }
}
