//! Bitmaps of a disk that no server uses, for tools.

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

/// A bitmap's name and file contents. The error is a message for the user.
type Found = (String, Result<Looked, String>);

impl Bitmaps {
    /// Returns the bitmaps next to an image, or in `dir`. `data`: the external data file, if any.
    ///
    /// A caller that changes the bitmaps must have locked the image. The error says why there can
    /// be no bitmaps.
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

    /// Lists the bitmaps of a disk of `size` bytes that are not in the image.
    ///
    /// Also returns problems, for the user. Changes nothing; others may use the bitmaps meanwhile.
    pub fn look(&self, size: u64) -> Result<(Vec<BitmapStatus>, Vec<String>), String> {
        let place = self.place.as_ref().map_err(Clone::clone)?;
        let (mut all, mut problems) = (Vec::new(), Vec::new());
        for (name, found) in found(place, place.is_beside())? {
            match found {
                // The version in the image counts.
                Ok(found) if found.header.own => {}
                Ok(found) => all.push(status(name, found, size)),
                Err(problem) => problems.push(problem),
            }
        }
        Ok((all, problems))
    }

    /// Changes the bitmaps if all files in the directory belong to this disk and are usable.
    ///
    /// Otherwise the directory may be the wrong one. The change runs with the rights of the owner
    /// of the directory, or of the image if there is no directory. Therefore a server with those
    /// rights can use the files, and a user who may write to the directory gains no rights.
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
        // The new credentials apply to this thread only.
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

/// Gives this thread the rights of the owner, for good.
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

/// Inspects all bitmaps. The directory may be missing only if `may_lack` is true.
fn found(place: &Place, may_lack: bool) -> Result<Vec<Found>, String> {
    let told = |path: &Path, error: io::Error| format!("{}: {}", path.display(), cause(error));
    let names = match place.names() {
        Err(error) if error.kind() == io::ErrorKind::NotFound && may_lack => vec![],
        names => names.map_err(|error| told(&place.dir, error))?,
    };
    let mut all = Vec::new();
    for name in names {
        let path = place.path(&name);
        // Another process may use the bitmap and the image meanwhile.
        match Bitmap::look(&path, &now_of(place)) {
            Ok(found) => all.push((name, Ok(found))),
            // The file is not a bitmap, or another process has removed it meanwhile.
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
