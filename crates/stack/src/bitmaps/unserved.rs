//! The bitmaps of a disk that nobody serves, for tools.

use super::all::Bitmaps;
use super::bitmap::{Bitmap, Looked, NotOpened, Now};
use super::place::Place;
use super::status::BitmapStatus;
use fathom_storage::Location;
use fathom_units::cause;
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::panic;
use std::path::{Path, PathBuf};
use std::thread;

/// A bitmap's file, as far as it is known. The error is for the user.
type Found = (String, Result<Looked, String>);

impl Bitmaps {
    /// Those beside the image that is there, or in `dir` if that is said. `data`: the file that its data is in, if that is
    /// another one. Whoever changes them has locked the image. The error says why there can be none.
    pub fn unserved(
        location: &Location,
        dir: Option<&Path>,
        data: Option<PathBuf>,
    ) -> Result<Bitmaps, String> {
        let place = Place {
            data,
            ..Place::of(location, dir)?
        };
        Ok(Bitmaps::new(Ok(place), None))
    }

    /// All that are not in the image, of a disk of so many bytes; and what cannot be told, for the user. Nothing is
    /// changed, and others may use them.
    pub fn look(&self, size: u64) -> Result<(Vec<BitmapStatus>, Vec<String>), String> {
        let place = self.place.as_ref().map_err(Clone::clone)?;
        let (mut all, mut problems) = (Vec::new(), Vec::new());
        for (name, found) in found(place, place.is_beside())? {
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
    /// meant. It is done with the rights of the owner of the directory, or if there is none of the image: a server that
    /// has no more is to use them, and whoever may write there gains nothing by it.
    pub fn change_unserved(
        &self,
        change: impl FnOnce(&Bitmaps) -> Result<(), String> + Send,
    ) -> Result<(), String> {
        let place = self.place.as_ref().map_err(Clone::clone)?;
        let owner = match (fs::metadata(&place.dir), &place.image) {
            (Ok(dir), _) => Some(dir),
            (Err(_), Some(image)) => fs::metadata(image).ok(),
            (Err(_), None) => None,
        };
        let owner = owner.filter(|owner| geteuid().is_root() && owner.uid() != 0);
        let Some(owner) = owner else {
            return self.change_own(place, change);
        };
        let work = || {
            become_owner(&owner)?;
            let changed = self.change_own(place, change);
            changed.map_err(|problem| format!("{problem} (as user {}, the owner)", owner.uid()))
        };
        // (They are the thread's.)
        let done = thread::scope(|scope| scope.spawn(work).join());
        done.unwrap_or_else(|panic| panic::resume_unwind(panic))
    }

    fn change_own(
        &self,
        place: &Place,
        change: impl FnOnce(&Bitmaps) -> Result<(), String>,
    ) -> Result<(), String> {
        let now = now_of(place);
        for (name, found) in found(place, !place.dir.exists())? {
            if found?.is_of_another(&now) {
                let path = place.path(&name);
                return Err(format!(
                    "{}: belongs to another disk, or to another file of that name; name the \
                     directory with this disk's bitmaps",
                    path.display()
                ));
            }
        }
        change(self)
    }
}

/// This thread has no other rights than that from now on.
fn become_owner(owner: &Metadata) -> Result<(), String> {
    let (user, group) = (Uid::from_raw(owner.uid()), Gid::from_raw(owner.gid()));
    set_thread_groups(&[])
        .and_then(|()| set_thread_res_gid(group, group, group))
        .and_then(|()| set_thread_res_uid(user, user, user))
        .map_err(|error| format!("cannot become user {}: {}", owner.uid(), cause(error)))
}

fn now_of(place: &Place) -> Now<'_> {
    Now {
        boot: &place.boot,
        of: place.of.as_deref(),
        image: place.image(),
    }
}

/// Those that are there. The directory need not be there if it `may_lack`.
fn found(place: &Place, may_lack: bool) -> Result<Vec<Found>, String> {
    let told = |path: &Path, error: io::Error| format!("{}: {}", path.display(), cause(error));
    let names = match place.names() {
        Err(error) if error.kind() == io::ErrorKind::NotFound && may_lack => vec![],
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
            Err(NotOpened::Failed(error) | NotOpened::Broken(error)) => {
                all.push((name, Err(told(&path, error))));
            }
        }
    }
    Ok(all)
}

fn status(name: String, found: Looked, size: u64) -> BitmapStatus {
    let header = found.header;
    let status = BitmapStatus::of_file(name, header.block, header.since);
    status.says(found.dirty.bytes(size), found.problem, size)
}
