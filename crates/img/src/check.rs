//! `fathom img check`

use crate::error::{Error, io_error, of};
use crate::open::open_writable;
use crate::source::{connect, export};
use fathom_formats::Format;
use fathom_formats::offline::check as checks;
use fathom_formats::offline::open_read_only;
use fathom_storage::lock_image;
use std::path::Path;

pub use checks::{Options as CheckOptions, Repair, Report};

/// Checks an image, and repairs it if the options say so. `say` gets a line
/// for each problem.
pub fn check(
    path: &Path,
    format: Option<Format>,
    options: &CheckOptions,
    force_share: bool,
    say: &mut dyn FnMut(&str),
) -> Result<(Format, Report), Error> {
    if let Some(uri) = export(path, format)? {
        connect(&uri)?;
        let path = path.to_owned();
        return Err(Error::Raw { path });
    }
    let writes = options.repair != Repair::Nothing;
    let file = match writes {
        true => open_writable(path, false)?,
        false => open_read_only(path).map_err(io_error(path, "cannot be opened"))?,
    };
    if writes || !force_share {
        lock_image(path, &file, writes)?;
    }
    let format = match format {
        Some(format) => format,
        None => Format::probe(&file).map_err(of(path))?,
    };
    if format == Format::Raw {
        let path = path.to_owned();
        return Err(Error::Raw { path });
    }
    let report = checks::check(&file, format, options, say).map_err(of(path))?;
    Ok((format, report))
}
