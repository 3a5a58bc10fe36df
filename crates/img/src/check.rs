//! `fathom img check`

use crate::error::{Error, of};
use crate::open::{OpenOptions, format_of, open_bare, open_locked};
use fathom_formats::Format;
use fathom_formats::offline::check as checks;
use fathom_formats::served::Storage;
use fathom_storage::Location;

pub use checks::{Options as CheckOptions, Repair, Report};

/// Checks an image and, if the options request a repair, repairs it. `say` receives a line for each
/// problem.
pub fn check(
    location: &Location,
    format: Option<Format>,
    options: &CheckOptions,
    force_share: bool,
    say: &mut dyn FnMut(&str),
) -> Result<(Format, Report), Error> {
    let open = OpenOptions {
        format,
        ..match options.repair {
            Repair::Nothing => OpenOptions::looking(force_share),
            _ => OpenOptions::writing(None),
        }
    };
    let path = location.name();
    if open_bare(location, &open)?.is_some() {
        return Err(Error::Raw { path });
    }
    let image = open_locked(location, &open)?;
    let format = format_of(&image, format)?;
    if !format.has_tables() {
        return Err(Error::Raw { path });
    }
    let report = checks::check(image.bytes(), format, options, say).map_err(of(&path))?;
    Ok((format, report))
}
