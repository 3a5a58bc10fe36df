//! Finds the files of an image.

use super::storage::Foreign;
use super::tables::Tables;
use crate::Image;
use crate::foreign::{Part, describe_with, refused};
use crate::served::helpers::Helpers;
use crate::served::problem::told;
use crate::served::storage::{Opener, Storage};
use fathom_core::DiskError;
use fathom_foreign::{Description, Kind, Start};
use std::sync::Arc;

/// Returns the storage of the disk's bytes, and the description of the image.
pub(in crate::served) fn open(
    file: Arc<dyn Storage>,
    kind: Kind,
    opener: &dyn Opener,
    helpers: &Helpers,
) -> Result<(Arc<dyn Storage>, Description), DiskError> {
    let tables = tables(file, kind, opener)?;
    let description = tables.description();
    Ok((Arc::new(Foreign::new(tables, helpers)), description))
}

/// Reads the header of an image that may be in several files, which `opener` finds.
pub fn read_foreign(
    file: &dyn Storage,
    kind: Kind,
    opener: &dyn Opener,
) -> Result<Image, DiskError> {
    let (start, parts) = find(file, kind, opener)?;
    let parts: Vec<_> = parts.iter().map(|part| Part(part.bytes())).collect();
    let found = describe_with(&start, file.bytes(), &parts);
    let found = found.map_err(told(file.path()))?;
    Ok(Image::Foreign(Box::new(found)))
}

fn tables(file: Arc<dyn Storage>, kind: Kind, opener: &dyn Opener) -> Result<Tables, DiskError> {
    let (start, mut files) = find(&*file, kind, opener)?;
    files.insert(0, file);
    Tables::read(files, kind, &start)
}

/// Reads the start of the file, and opens the other files that it names.
fn find(
    file: &dyn Storage,
    kind: Kind,
    opener: &dyn Opener,
) -> Result<(Start, Vec<Arc<dyn Storage>>), DiskError> {
    let start = Start::read(kind, &Part(file.bytes()));
    let start = start.map_err(|error| told(file.path())(refused(error)))?;
    let names = start.names().iter();
    // (A colon in a bare name would end the name of a protocol.)
    let parts = names.map(|name| opener.open(file.path(), format!("./{name}").as_bytes(), false));
    let parts = parts.collect::<Result<Vec<_>, _>>()?;
    Ok((start, parts))
}
