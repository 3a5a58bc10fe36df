//! The bitmaps of a disk that nobody serves, for tools.

use super::all::Bitmaps;
use super::bitmap::{Bitmap, Looked, NotOpened, Now};
use super::place::Place;
use super::status::BitmapStatus;
use fathom_storage::Location;
use rustix::process::geteuid;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::Path;

/// A bitmap's file, as far as it is known. The error is for the user.
type Found = (String, Result<Looked, String>);

impl Bitmaps {
    /// Those beside the image that is there, or in `dir` if that is said. Whoever changes them has locked the image. The
    /// error says why there can be none.
    pub fn unserved(location: &Location, dir: Option<&Path>) -> Result<Bitmaps, String> {
        Ok(Bitmaps::new(Ok(Place::of(location, dir)?), None))
    }

    /// All that are not in the image, of a disk of so many bytes; and what cannot be told, for the user. Nothing is
    /// changed, and others may use them.
    pub fn look(&self, size: u64) -> Result<(Vec<BitmapStatus>, Vec<String>), String> {
        let place = self.place.as_ref().map_err(Clone::clone)?;
        let (mut all, mut problems) = (Vec::new(), Vec::new());
        for (name, found) in found(place)? {
            match found {
                // (It counts as it is in the image.)
                Ok(found) if found.header.own => {}
                Ok(found) => all.push(status(name, found, size)),
                Err(problem) => problems.push(problem),
            }
        }
        Ok((all, problems))
    }

    /// Changes them, if all that are there are of this disk and can be used: the directory may be another one than was
    /// meant. What is made is the image's owner's.
    pub fn change_unserved(
        &self,
        change: impl FnOnce(&Bitmaps) -> Result<(), String>,
    ) -> Result<(), String> {
        let place = self.place.as_ref().map_err(Clone::clone)?;
        let now = now_of(place);
        for (name, found) in found(place)? {
            if found?.is_of_another(&now) {
                let path = place.path(&name);
                return Err(format!(
                    "{}: is of another disk, or of another file in its place: where are this one's bitmaps?",
                    path.display()
                ));
            }
        }
        let was_there = place.dir.exists();
        change(self)?;
        hand_over(place, was_there).map_err(|error| format!("{}: {error}", place.dir.display()))
    }
}

fn now_of(place: &Place) -> Now<'_> {
    Now {
        boot: &place.boot,
        of: place.of.as_deref(),
        image: place.image(),
    }
}

/// Those that are there.
fn found(place: &Place) -> Result<Vec<Found>, String> {
    let told = |path: &Path, error: io::Error| format!("{}: {error}", path.display());
    let names = match place.names() {
        Err(error) if error.kind() == io::ErrorKind::NotFound && place.is_beside() => vec![],
        names => names.map_err(|error| told(&place.dir, error))?,
    };
    let mut all = Vec::new();
    for name in names {
        let path = place.path(&name);
        // (Somebody may use it, and the image, meanwhile.)
        match Bitmap::look(&path, &now_of(place)) {
            Ok(found) => all.push((name, Ok(found))),
            // (It is nobody's, or somebody has removed it meanwhile.)
            Err(NotOpened::Strange(_)) => {}
            Err(NotOpened::Failed(error)) if error.kind() == io::ErrorKind::NotFound => {}
            Err(NotOpened::Failed(error)) => all.push((name, Err(told(&path, error)))),
        }
    }
    Ok(all)
}

fn status(name: String, found: Looked, size: u64) -> BitmapStatus {
    let header = found.header;
    let status = BitmapStatus::of_file(name, header.block, header.since);
    status.says(found.dirty.bytes(size), found.problem, size)
}

/// A server that has fewer rights than whoever uses a tool is to use them, too.
fn hand_over(place: &Place, was_there: bool) -> io::Result<()> {
    let user = geteuid();
    let dir = match File::open(&place.dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        _ if !user.is_root() => return Ok(()),
        dir => dir?,
    };
    let mut owner = dir.metadata()?;
    if let Some(image) = place.image.as_ref().filter(|_| !was_there) {
        owner = fs::metadata(image)?;
        give(&dir, &owner)?;
    }
    for name in place.names()? {
        // (Others may put other files in their places meanwhile, which are not to be given to them.)
        if let Ok(file) = Bitmap::file(&place.path(&name))
            && file.metadata()?.uid() == user.as_raw()
        {
            give(&file, &owner)?;
        }
    }
    Ok(())
}

fn give(file: &File, owner: &Metadata) -> io::Result<()> {
    fchown(file, Some(owner.uid()), Some(owner.gid()))
}
