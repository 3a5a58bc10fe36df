//! All bitmaps of a disk.

use super::bitmap::{Bitmap, Dirty, NotOpened, Now, sync_dir};
use super::header::{Header, Left};
use super::limits::{
    self, LEAST_GRANULARITY, MOST, MOST_BITS, MOST_GRANULARITY, check_bitmap_name, is_granularity,
};
use super::place::Place;
use super::status::BitmapStatus;
use fathom_core::DiskError;
use fathom_formats::served::ImageDisk;
use fathom_units::cause;
use parking_lot::{Mutex, MutexGuard};
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The bitmaps of a disk.
pub struct Bitmaps {
    /// The place of the bitmaps. The error says why the disk has no bitmaps.
    pub(super) place: Result<Place, String>,
    /// The image that holds the bitmaps while the disk is not in use.
    pub(super) image: Option<Arc<ImageDisk>>,
    state: Mutex<State>,
    /// The bitmaps that workers mark. Requests may wait for this lock, so it is held only briefly.
    marked: Mutex<Marked>,
    /// A number that changes whenever `marked` changes.
    epoch: AtomicU64,
}

/// The bitmaps that a worker marks.
pub(crate) type Marked = Arc<[Arc<Bitmap>]>;

/// Returns once each worker has marked its requests in flight in the published bitmaps.
pub type MarkInFlight<'a> = &'a mut dyn FnMut() -> Result<(), String>;

#[derive(Default)]
pub(super) struct State {
    /// Size of the disk in bytes; `None` while the disk is not in use.
    pub(super) size: Option<u64>,
    /// The locked directory, while it exists and is in use.
    pub(super) dir: Option<File>,
    pub(super) current: Vec<Arc<Bitmap>>,
    pub(super) successors: Vec<Arc<Bitmap>>,
    /// Names of bitmaps in the image that are not recorded, and stay there.
    pub(super) others: Vec<Vec<u8>>,
    /// Names of bitmaps that must stay in the image for now.
    pub(super) fixed: Vec<String>,
    /// Names and start times of successors while the disk is not in use, when nothing changes.
    pending: Vec<(String, u64)>,
}

pub(super) fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos() as u64)
}

fn unknown(name: &str) -> String {
    format!("no bitmap '{name}'")
}

impl Bitmaps {
    /// Creates the bitmaps. `image` holds them while the disk is not in use.
    pub(crate) fn new(place: Result<Place, String>, image: Option<Arc<ImageDisk>>) -> Bitmaps {
        Bitmaps {
            place,
            image,
            state: Mutex::default(),
            marked: Mutex::new(Arc::new([])),
            epoch: AtomicU64::new(0),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn place(&self) -> Result<&Place, String> {
        self.place.as_ref().map_err(Clone::clone)
    }

    /// Returns a number that changes whenever the bitmaps to mark change.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    pub(crate) fn marked(&self) -> (u64, Marked) {
        let marked = self.marked.lock();
        (self.epoch(), marked.clone())
    }

    /// Publishes the bitmaps that workers mark.
    ///
    /// A worker takes the bitmaps over before it submits its next request, or when it is asked to
    /// look. The worker then marks its requests in flight in these bitmaps.
    fn tell_workers(&self, state: &State) {
        let all = state.all().cloned().collect();
        let mut marked = self.marked.lock();
        *marked = all;
        self.epoch.fetch_add(1, Ordering::Release);
    }

    /// Opens the bitmaps before the disk of `size` bytes is used. `image` is the state of the image
    /// file when this process took it into use.
    ///
    /// # Errors
    /// A message for the user. The disk must not be changed then, since no bitmap would record it.
    pub(crate) fn open(&self, size: u64, image: Option<Left>) -> Result<(), String> {
        let Ok(place) = &self.place else {
            return Ok(());
        };
        let mut state = self.state();
        state.open(place, size, image)?;
        if let Some(own) = &self.image {
            let taken = state.take_own(place, size, own);
            taken.map_err(|error| {
                state.close(place, image, None);
                error.to_string()
            })?;
        }
        self.tell_workers(&state);
        Ok(())
    }

    /// Closes the bitmaps when the disk is not used any more. `end` writes the disk's state to the
    /// image, and `how_left` then returns the state of the file.
    pub(crate) fn close(
        &self,
        end: impl FnOnce() -> Result<(), DiskError>,
        how_left: impl FnOnce() -> Option<Left>,
    ) -> Result<(), DiskError> {
        let Ok(place) = &self.place else {
            return end();
        };
        let mut state = self.state();
        let (ended, left) = match (&self.image, state.size) {
            (Some(image), Some(size)) => image.deactivate_with(&mut state.for_image(size)),
            _ => (end(), Vec::new()),
        };
        match &ended {
            Ok(()) => state.close(place, how_left(), Some(&left)),
            // The contents of the image are unknown, as if the process had died.
            Err(_) => *state = State::default(),
        }
        self.tell_workers(&state);
        ended
    }

    /// Marks everything from `offset` on, which a resize may change.
    pub(crate) fn mark_from(&self, offset: u64) {
        self.state()
            .all()
            .for_each(|bitmap| bitmap.mark(offset, u64::MAX));
    }

    pub(crate) fn resized(&self, size: u64) {
        let mut state = self.state();
        state.size = state.size.map(|_| size);
    }

    /// Calls `work` with the bitmaps open, whether or not the disk is in use.
    fn with<T>(
        &self,
        size: u64,
        work: impl FnOnce(&Place, &mut State) -> Result<T, String>,
    ) -> Result<T, String> {
        let place = self.place()?;
        let mut state = self.state();
        if state.size.is_some() {
            return work(place, &mut state);
        }
        let image = place.image();
        state.open(place, size, image)?;
        let outcome = work(place, &mut state);
        // A change of the image by another program since `open` is detected later.
        state.close(place, image, None);
        outcome
    }

    /// Calls `work`, which changes the image of an unused disk but not the disk's data. The bitmaps
    /// remain valid.
    pub fn keep_through<T>(
        &self,
        size: u64,
        work: impl FnOnce() -> Result<T, String>,
    ) -> Result<T, String> {
        let Ok(place) = &self.place else {
            return work();
        };
        let mut state = self.state();
        if state.size.is_some() {
            return work();
        }
        state.open(place, size, place.image())?;
        let outcome = work();
        state.close(place, place.image(), None);
        outcome
    }

    /// Like [`Bitmaps::with`], for work that may change the set of bitmaps.
    fn change<T>(
        &self,
        size: u64,
        work: impl FnOnce(&Place, &mut State) -> Result<T, String>,
    ) -> Result<T, String> {
        let work = |place: &Place, state: &mut State| {
            let outcome = work(place, state);
            self.tell_workers(state);
            outcome
        };
        match &self.image {
            Some(image) if self.state().size.is_none() => self.with_own(size, image, work),
            _ => self.with(size, work),
        }
    }

    /// Lists all bitmaps of a disk of `size` bytes.
    pub fn list(&self, size: u64) -> Result<Vec<BitmapStatus>, String> {
        let is_idle = self.state().size.is_none();
        self.with(size, |_, state| {
            let list = state.list(size);
            match &self.image {
                Some(image) if is_idle => state.list_own(image, size, list),
                _ => Ok(list),
            }
        })
    }

    /// Adds an empty bitmap, and has `mark_in_flight` make the workers mark requests in flight.
    ///
    /// If that fails, the bitmap is not added, since it could miss a change. A tool that works on
    /// an unserved disk has no requests in flight.
    pub fn add(
        &self,
        name: &str,
        size: u64,
        granularity: Option<u64>,
        mark_in_flight: MarkInFlight<'_>,
    ) -> Result<(), String> {
        check_bitmap_name(name)?;
        let block = granularity.unwrap_or_else(|| limits::granularity(size));
        if !is_granularity(size, block) {
            return Err(format!(
                "granularity {block}: not a power of two from {LEAST_GRANULARITY} to \
                 {MOST_GRANULARITY} with which the bitmap has at most {MOST_BITS} bits"
            ));
        }
        self.change(size, |place, state| {
            state.has_room_for(place, name)?;
            let header = Header::new(size, block, now());
            let (new, path) = (place.dir.join(format!(".{name}.new")), place.path(name));
            let failed = |error| format!("bitmap '{name}': not created: {}", cause(error));
            let made = state.make(place, &new, name, header).map_err(failed)?;
            let put = fs::rename(&new, &path);
            put.inspect_err(|_| drop(fs::remove_file(&new)))
                .and_then(|()| sync_dir(&path).inspect_err(|_| drop(fs::remove_file(&path))))
                .map_err(failed)?;
            state.current.push(Arc::new(made));
            self.tell_workers(state);
            mark_in_flight().map_err(|problem| {
                state.current.pop();
                remove(&path);
                format!("bitmap '{name}': not added: {problem}")
            })
        })
    }

    /// Removes a bitmap.
    pub fn remove(&self, name: &str, size: u64) -> Result<(), String> {
        self.change(size, |place, state| {
            state.may_go(name)?;
            state.drop_successor(place, name);
            let at = { state.current.iter() }.position(|bitmap| *bitmap.name() == *name);
            let at = at.ok_or_else(|| unknown(name))?;
            if !state.current[at].is_in_memory() {
                let path = place.path(name);
                let removed = fs::remove_file(&path).and_then(|()| sync_dir(&path));
                removed
                    .map_err(|error| format!("bitmap '{name}': not removed: {}", cause(error)))?;
            }
            state.current.remove(at);
            if state.all().next().is_none()
                && place.is_beside()
                && fs::remove_dir(&place.dir).is_ok()
            {
                state.dir = None;
            }
            Ok(())
        })
    }

    /// Begins a successor of this bitmap, which need not exist, and returns the successor's
    /// identifier.
    ///
    /// Later changes are marked in both. An earlier successor is replaced. Requests in flight need
    /// not be marked in the successor: the caller drains them before the instant from which the
    /// successor counts (`Tap::hold`).
    pub fn begin_successor(&self, name: &str) -> Result<u64, String> {
        check_bitmap_name(name)?;
        let place = self.place()?;
        let mut state = self.state();
        let since = state.begin_successor(place, name)?;
        self.tell_workers(&state);
        Ok(since)
    }

    /// Clears a bitmap, and has `mark_in_flight` make the workers mark requests in flight.
    ///
    /// If that fails, the bitmap is unchanged. A successor that a backup has begun is dropped.
    pub fn clear(
        &self,
        name: &str,
        size: u64,
        mark_in_flight: MarkInFlight<'_>,
    ) -> Result<(), String> {
        self.change(size, |place, state| {
            state.find(name).ok_or_else(|| unknown(name))?;
            state.begin_successor(place, name)?;
            self.tell_workers(state);
            mark_in_flight().map_err(|problem| {
                state.drop_successor(place, name);
                format!("bitmap '{name}': not cleared: {problem}")
            })?;
            state.advance(place, name, None)
        })
    }

    /// Renames a bitmap.
    pub fn rename(&self, name: &str, to: &str, size: u64) -> Result<(), String> {
        check_bitmap_name(to)?;
        self.change(size, |place, state| state.rename(place, name, to))
    }

    /// Marks in this bitmap everything that is dirty in `others`, which are unchanged.
    pub fn merge(&self, name: &str, others: &[String], size: u64) -> Result<(), String> {
        self.change(size, |_, state| {
            let find = |name: &str| state.find(name).cloned().ok_or_else(|| unknown(name));
            let into = find(name)?;
            let others = others.iter().map(|other| find(other));
            let others = others.collect::<Result<Vec<_>, _>>()?;
            // A running backup does not contain these blocks, so they stay dirty after it advances,
            // too.
            let next = state.successors.iter().find(|next| *next.name() == *name);
            for bitmap in [Some(&into), next].into_iter().flatten() {
                others.iter().for_each(|other| bitmap.add(other));
            }
            Ok(())
        })
    }

    /// Returns a copy of a bitmap. Everything is dirty in a bitmap that does not exist.
    pub fn dirty(&self, name: &str) -> Dirty {
        let state = self.state();
        let found = state.find(name);
        let dirty = found.map(|bitmap| (bitmap.sync().is_ok(), bitmap.copy(), bitmap));
        // The copy may have been the first access that finds the bitmap unreadable.
        match dirty.filter(|(is_there, _, bitmap)| *is_there && bitmap.problem().is_none()) {
            Some((_, dirty, _)) => dirty,
            None => Dirty::all(state.size.unwrap_or(0)),
        }
    }

    /// Drops the successor of a bitmap, because the backup was not completed.
    pub fn drop_successor(&self, name: &str) {
        let Ok(place) = &self.place else {
            return;
        };
        let mut state = self.state();
        state.drop_successor(place, name);
        // The file of a successor that is not in use is removed when the bitmaps are opened next.
        state.pending.retain(|(pending, _)| pending != name);
        self.tell_workers(&state);
    }

    /// Replaces a bitmap by its successor, because the backup that began it is safe.
    ///
    /// `to` identifies the successor; `None` means any.
    pub fn advance(&self, name: &str, to: Option<u64>, size: u64) -> Result<(), String> {
        self.change(size, |place, state| state.advance(place, name, to))
    }
}

impl State {
    fn all(&self) -> impl Iterator<Item = &Arc<Bitmap>> {
        self.current.iter().chain(&self.successors)
    }

    pub(super) fn find(&self, name: &str) -> Option<&Arc<Bitmap>> {
        self.current.iter().find(|bitmap| *bitmap.name() == *name)
    }

    pub(super) fn open(
        &mut self,
        place: &Place,
        size: u64,
        image: Option<Left>,
    ) -> Result<(), String> {
        let at = |error| {
            format!(
                "cannot use the bitmaps in {}: {}",
                place.dir.display(),
                cause(error)
            )
        };
        self.dir = place.lock().map_err(at)?;
        if self.dir.is_some() {
            let pending = std::mem::take(&mut self.pending);
            let opened = self.open_all(place, image, &pending);
            if let Err(error) = opened {
                self.close(place, image, None);
                return Err(at(error));
            }
        }
        self.size = Some(size);
        Ok(())
    }

    fn open_all(
        &mut self,
        place: &Place,
        image: Option<Left>,
        pending: &[(String, u64)],
    ) -> io::Result<()> {
        let now = Now {
            boot: &place.boot,
            of: place.of.as_deref(),
            image,
        };
        place.tidy(pending)?;
        for name in place.names()? {
            let path = place.path(&name);
            match Bitmap::open(&path, &name, &now) {
                Ok(bitmap) => self.current.push(Arc::new(bitmap)),
                Err(NotOpened::Strange(why)) => {
                    tracing::warn!("{}: {why}; the bitmap is ignored", path.display());
                }
                // Users take precedence and need not wait for a bitmap that can be created again.
                // But no other program may trust an invalid bitmap, so its file is removed.
                Err(NotOpened::Failed(error)) if !place.has_only_bitmaps(&path) => {
                    tracing::error!(
                        "{}: {}; the bitmap is ignored",
                        path.display(),
                        cause(error)
                    );
                }
                Err(NotOpened::Failed(error) | NotOpened::Broken(error)) => {
                    tracing::error!(
                        "{}: {}; the bitmap is lost, and the next backup must be a full one",
                        path.display(),
                        cause(error)
                    );
                    fs::remove_file(&path)?;
                    sync_dir(&path)?;
                }
            }
        }
        // Another process that has used the disk has removed them or has made its own.
        for (name, since) in pending {
            let next = Bitmap::open(&place.next_path(name), name, &now);
            let next = next.ok().filter(|next| next.since() == *since);
            self.successors.extend(next.map(Arc::new));
        }
        Ok(())
    }

    /// Closes all bitmaps. `left`: names of those that the image has, too; `None`: as before.
    pub(super) fn close(&mut self, place: &Place, image: Option<Left>, left: Option<&[String]>) {
        let state = std::mem::take(self);
        let since = |next: &Arc<Bitmap>| (next.name().to_string(), next.since());
        self.pending = state.successors.iter().map(since).collect();
        let current = { state.current.iter() }.map(|bitmap| (bitmap, place.path(&bitmap.name())));
        let next = { state.successors.iter() }.map(|next| (next, place.next_path(&next.name())));
        for (bitmap, path) in current.chain(next) {
            let is_left = |names: &[String]| names.iter().any(|name| **name == *bitmap.name());
            if left.is_none() && bitmap.was_killed() {
                // The image still says that it is in use, so the file must not count as closed.
                continue;
            }
            let own = left.map_or(bitmap.is_own(), is_left);
            if let Err(error) = bitmap.close(image, own)
                && !bitmap.is_in_memory()
            {
                tracing::error!(
                    "{}: {}; the bitmap is lost, and the next backup must be a full one",
                    path.display(),
                    cause(error)
                );
                remove(&path);
            }
        }
        // The lock on the directory is released last.
        drop(state.dir);
    }

    pub(super) fn make(
        &mut self,
        place: &Place,
        path: &Path,
        name: &str,
        header: Header,
    ) -> io::Result<Bitmap> {
        if self.dir.is_none() {
            place.make()?;
            self.dir = place.lock()?;
        }
        let now = Now {
            boot: &place.boot,
            of: place.of.as_deref(),
            image: place.image(),
        };
        Bitmap::make(path, name, header, &now)
    }

    pub(super) fn has_room_for(&self, place: &Place, name: &str) -> Result<(), String> {
        self.is_free(name)?;
        let path = place.path(name);
        if path.symlink_metadata().is_ok() {
            let path = path.display();
            return Err(format!(
                "{path}: exists, and is not a usable bitmap; remove the file"
            ));
        }
        match self.current.len() < MOST {
            true => Ok(()),
            false => Err(format!(
                "{MOST} bitmaps exist, which is the limit; remove one"
            )),
        }
    }

    fn is_free(&self, name: &str) -> Result<(), String> {
        if self.find(name).is_some() {
            return Err(format!("a bitmap named '{name}' already exists"));
        }
        if self.others.iter().any(|other| other == name.as_bytes()) {
            return Err(format!(
                "the image has a bitmap '{name}' that records no writes; remove it first \
                 ('fathom img bitmap')"
            ));
        }
        Ok(())
    }

    fn rename(&mut self, place: &Place, name: &str, to: &str) -> Result<(), String> {
        self.may_go(name)?;
        let bitmap = self.find(name).ok_or_else(|| unknown(name))?.clone();
        let (from, path) = (place.path(name), place.path(to));
        self.is_free(to)?;
        if path.symlink_metadata().is_ok() {
            return Err(format!("a bitmap named '{to}' already exists"));
        }
        let renamed = match bitmap.is_in_memory() {
            true => Ok(()),
            false => fs::rename(&from, &path),
        };
        renamed.map_err(|error| format!("bitmap '{name}': not renamed: {}", cause(error)))?;
        bitmap.rename(to);
        let next = { self.successors.iter() }.find(|next| *next.name() == *name);
        if let Some(next) = next.cloned() {
            match fs::rename(place.next_path(name), place.next_path(to)) {
                Ok(()) => next.rename(to),
                // The bitmap can no longer advance to this successor.
                Err(_) => self.drop_successor(place, name),
            }
        }
        match bitmap.is_in_memory() {
            true => Ok(()),
            false => sync_dir(&path).map_err(cause),
        }
    }

    fn list(&self, size: u64) -> Vec<BitmapStatus> {
        let status = |bitmap: &Arc<Bitmap>| {
            let dirty = bitmap.copy().bytes(size);
            let problem = bitmap.problem();
            let next = { self.successors.iter() }.find(|next| next.name() == bitmap.name());
            let (name, block) = (bitmap.name().to_string(), bitmap.block());
            let status = BitmapStatus::of_file(name, block, bitmap.since());
            BitmapStatus {
                successor: next.map(|next| next.since()),
                ..status.says(dirty, problem, size)
            }
        };
        let mut list: Vec<_> = self.current.iter().map(status).collect();
        list.sort_by(|a, b| a.name.cmp(&b.name));
        list
    }
}

/// Removes the file of an invalid bitmap.
pub(super) fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::error!("{}: {}", path.display(), cause(error));
    }
}
