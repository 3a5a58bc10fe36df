//! Backing chains.

use super::Info;
use crate::img::{Format, open_read_only, resolve};
use crate::{Error, Result};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Images of one chain.
pub const MAX_CHAIN: usize = 1024;

/// The image and all below it. Below the top, a format that the image above
/// names is believed; one that it does not name is seen from the first bytes,
/// which is harmless here since nothing but headers is read and shown.
pub fn chain(path: &Path, file: &File, format: Option<Format>) -> Result<Vec<Info>> {
    let mut seen = vec![identity(file)?];
    let mut infos = vec![Info::read(path, file, format)?];
    while let Some(top) = infos.last()
        && let Some(name) = top.image.backing_file()
    {
        let below = resolve(&top.path, name)?;
        let told = |error: Error| {
            let (name, above) = (below.display(), top.path.display());
            Error::Invalid(format!("backing file {name} of {above}: {error}"))
        };
        if infos.len() == MAX_CHAIN {
            return Err(told(Error::invalid("the chain has more than 1024 images")));
        }
        let format = match top.image.backing_format() {
            Some(name) => Some(Format::from_name(&name).map_err(told)?),
            None => None,
        };
        let file = open_read_only(&below)
            .map_err(Error::io("cannot be opened"))
            .map_err(told)?;
        let id = identity(&file).map_err(told)?;
        if seen.contains(&id) {
            return Err(told(Error::invalid("the chain comes back to an image")));
        }
        seen.push(id);
        let info = Info::read(&below, &file, format).map_err(told)?;
        infos.push(info);
    }
    Ok(infos)
}

fn identity(file: &File) -> Result<(u64, u64)> {
    let metadata = file.metadata().map_err(Error::io("cannot be examined"))?;
    Ok((metadata.dev(), metadata.ino()))
}
