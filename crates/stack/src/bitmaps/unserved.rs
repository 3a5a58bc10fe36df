//! The bitmaps of a disk that nobody serves, for tools.

use super::all::{BitmapStatus, Bitmaps};
use super::bitmap::{Bitmap, Looked, NotOpened, Now};
use super::place::Place;
use fathom_storage::Location;
use std::io;
use std::path::Path;

impl Bitmaps {
    /// Those beside the image that is there, or in `dir` if that is said. Whoever changes them has locked the image. The
    /// error says why there can be none.
    pub fn unserved(location: &Location, dir: Option<&Path>) -> Result<Bitmaps, String> {
        Ok(Bitmaps::new(Ok(Place::of(location, dir)?), None))
    }

    /// All that are not in the image. The disk has so many bytes. Nothing is changed, and others may use them.
    pub fn look(&self, size: u64) -> Result<Vec<BitmapStatus>, String> {
        let place = self.place.as_ref().map_err(Clone::clone)?;
        let at = |error: io::Error| format!("{}: {error}", place.dir.display());
        let now = Now {
            boot: &place.boot,
            of: place.of.as_deref(),
            image: place.image(),
        };
        let names = match place.names() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            names => names.map_err(at)?,
        };
        let mut all = Vec::new();
        for name in names {
            match Bitmap::look(&place.path(&name), &now) {
                // (It counts as it is in the image.)
                Ok(found) if found.header.own => {}
                Ok(found) => all.push(status(name, found, size)),
                // (It is nobody's, or somebody has removed it meanwhile.)
                Err(NotOpened::Strange(_)) => {}
                Err(NotOpened::Failed(error)) if error.kind() == io::ErrorKind::NotFound => {}
                Err(NotOpened::Failed(error)) => return Err(at(error)),
            }
        }
        Ok(all)
    }
}

fn status(name: String, found: Looked, size: u64) -> BitmapStatus {
    BitmapStatus {
        name,
        granularity: found.header.block,
        dirty: match found.problem {
            Some(_) => size,
            None => found.dirty.bytes(size),
        },
        since: Some(found.header.since).filter(|since| *since > 0),
        problem: found.problem,
        successor: None,
    }
}
