//! All bitmaps of a disk.

use super::bitmap::{Bitmap, Dirty, Now, sync_dir};
use super::header::{Header, Left};
use super::limits;
use super::limits::{
    LEAST_GRANULARITY, MOST, MOST_BITS, MOST_GRANULARITY, check_bitmap_name, granularity,
    is_granularity,
};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// What is told of a bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapStatus {
    pub name: String,
    /// Bytes that a bit stands for.
    pub granularity: u64,
    /// Bytes that count as changed.
    pub dirty: u64,
    /// When it was begun (seconds since 1970); 0: nobody knows.
    pub since: u64,
    /// Why all counts as changed, if that is so.
    pub problem: Option<String>,
    /// A backup has begun, or was made: when (seconds since 1970).
    pub successor: Option<u64>,
}

/// A disk's bitmaps.
pub struct Bitmaps {
    /// Where they are; the error says why there are none.
    place: Result<Place, String>,
    state: Mutex<State>,
    /// Changes whenever there are others to mark.
    epoch: AtomicU64,
}

#[derive(Clone)]
pub(crate) struct Place {
    /// The directory, which need not be there as long as there are none.
    pub(crate) dir: PathBuf,
    /// The image's file, if it is in one.
    pub(crate) image: Option<PathBuf>,
    /// The boot of this machine.
    pub(crate) boot: String,
}

#[derive(Default)]
struct State {
    /// Bytes of the disk; None: it is not in use.
    size: Option<u64>,
    current: Vec<Arc<Bitmap>>,
    successors: Vec<Arc<Bitmap>>,
    /// Of these bitmaps, while the disk is not in use: nobody has changed anything since.
    pending: Vec<String>,
}

/// What a worker marks.
pub(crate) type Marked = Box<[Arc<Bitmap>]>;

fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

impl Place {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Nobody's bitmap: names do not begin like this.
    fn next_path(&self, name: &str) -> PathBuf {
        self.dir.join(format!(".{name}.next"))
    }

    fn image(&self) -> io::Result<Option<Left>> {
        let image = self.image.as_ref();
        let found = image.map(fs::metadata).transpose()?;
        Ok(found.as_ref().map(Left::from))
    }

    /// The bitmaps that are there; what nobody needs is removed.
    fn names(&self, pending: &[String]) -> io::Result<Vec<String>> {
        let needed = Vec::from_iter(pending.iter().map(|name| self.next_path(name)));
        let files = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            files => files?,
        };
        let mut names = Vec::new();
        for file in files {
            let file = file?;
            let Ok(name) = file.file_name().into_string() else {
                continue;
            };
            if name.starts_with('.') && (name.ends_with(".next") || name.ends_with(".new")) {
                if !needed.contains(&file.path()) {
                    // The bitmap that it was to follow goes on in its place.
                    fs::remove_file(file.path())?;
                }
            } else if check_bitmap_name(&name).is_ok() {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }
}

impl Bitmaps {
    pub(crate) fn new(place: Result<Place, String>) -> Bitmaps {
        Bitmaps {
            place,
            state: Mutex::default(),
            epoch: AtomicU64::new(0),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self) -> Result<&Place, String> {
        self.place.as_ref().map_err(Clone::clone)
    }

    /// Changes whenever there are others to mark.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    pub(crate) fn marked(&self) -> (u64, Marked) {
        let state = self.state();
        let all = state.current.iter().chain(&state.successors);
        (self.epoch(), all.cloned().collect())
    }

    fn tell_workers(&self, _held: &State) {
        self.epoch.fetch_add(1, Ordering::Release);
    }

    /// How the image is before anybody uses it, which is for [`Bitmaps::open`].
    pub(crate) fn look(&self) -> Before {
        Before(self.place.as_ref().ok().map(Place::image))
    }

    /// The disk of so many bytes is about to be used. The error is for the user; nothing may be changed then,
    /// which would be marked nowhere.
    pub(crate) fn open(&self, size: u64, before: Before) -> Result<(), String> {
        let Ok(place) = &self.place else {
            return Ok(());
        };
        let mut state = self.state();
        let opened = state.open(place, size, before);
        let at = |error| {
            format!(
                "the bitmaps in {} cannot be used: {error}",
                place.dir.display()
            )
        };
        opened.map_err(at)?;
        self.tell_workers(&state);
        Ok(())
    }

    /// Nobody uses the disk any more, and what it has is in the image.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        if let Ok(place) = &self.place {
            state.close(place);
        }
        self.tell_workers(&state);
    }

    /// Likewise, but nobody knows what is in the image: as if the process had died.
    pub(crate) fn abandon(&self) {
        let mut state = self.state();
        let all = state.current.iter().chain(&state.successors);
        all.for_each(|bitmap| bitmap.unlock());
        *state = State::default();
        self.tell_workers(&state);
    }

    /// In use, whether the disk is or not.
    fn with<T>(
        &self,
        size: u64,
        work: impl FnOnce(&Place, &mut State) -> Result<T, String>,
    ) -> Result<T, String> {
        let place = self.place()?;
        let mut state = self.state();
        let is_idle = state.size.is_none();
        if is_idle {
            let before = Before(Some(place.image()));
            let opened = state.open(place, size, before);
            opened.map_err(|error| format!("{} cannot be used: {error}", place.dir.display()))?;
        }
        let outcome = work(place, &mut state);
        match is_idle {
            true => state.close(place),
            false => self.tell_workers(&state),
        }
        outcome
    }

    /// All of a disk of so many bytes.
    pub fn list(&self, size: u64) -> Result<Vec<BitmapStatus>, String> {
        self.with(size, |_, state| Ok(state.list(size)))
    }

    /// One more, in which nothing is dirty.
    pub fn add(&self, name: &str, size: u64, granularity: Option<u64>) -> Result<(), String> {
        check_bitmap_name(name)?;
        let block = granularity.unwrap_or_else(|| limits::granularity(size));
        if !is_granularity(size, block) {
            return Err(format!(
                "a bit cannot stand for {block} bytes: say a power of two from {LEAST_GRANULARITY} to \
                 {MOST_GRANULARITY}, of which the disk has {MOST_BITS} at most"
            ));
        }
        self.with(size, |place, state| {
            state.has_room_for(name)?;
            let header = Header::new(size, block, now());
            let new = place.dir.join(format!(".{name}.new"));
            let made = place.make(new.clone(), name, header);
            let made = made.and_then(|mut bitmap| {
                bitmap.take_place_of(place.path(name))?;
                Ok(bitmap)
            });
            let made = made.map_err(|error| {
                let _ = fs::remove_file(&new);
                format!("bitmap '{name}' cannot be made: {error}")
            })?;
            state.current.push(Arc::new(made));
            Ok(())
        })
    }

    /// One less.
    pub fn remove(&self, name: &str, size: u64) -> Result<(), String> {
        self.with(size, |place, state| {
            state.drop_successor(name);
            let at = { state.current.iter() }.position(|bitmap| bitmap.name() == name);
            let at = at.ok_or_else(|| unknown(name))?;
            let path = place.path(name);
            let removed = fs::remove_file(&path).and_then(|()| sync_dir(&path));
            removed.map_err(|error| format!("bitmap '{name}' cannot be removed: {error}"))?;
            state.current.remove(at);
            // (Where it was the last one.)
            let _ = fs::remove_dir(&place.dir);
            Ok(())
        })
    }

    /// What is changed from now on is marked in a successor of this bitmap, too, which need not be there. One
    /// from before is of no use any more.
    pub fn begin_successor(&self, name: &str) -> Result<(), String> {
        check_bitmap_name(name)?;
        let place = self.place()?;
        let mut state = self.state();
        let size = state.size.ok_or("the disk is not in use")?;
        let block = match state.find(name) {
            Some(bitmap) if is_granularity(size, bitmap.block()) => bitmap.block(),
            Some(_) => granularity(size),
            None => {
                state.has_room_for(name)?;
                granularity(size)
            }
        };
        state.drop_successor(name);
        let made = place.make(place.next_path(name), name, Header::new(size, block, now()));
        let made = made.map_err(|error| {
            let _ = fs::remove_file(place.next_path(name));
            format!("bitmap '{name}' cannot go on: {error}")
        })?;
        state.successors.push(Arc::new(made));
        self.tell_workers(&state);
        Ok(())
    }

    /// What this bitmap says now; of one that is not there, that all is dirty.
    pub fn dirty(&self, name: &str) -> Dirty {
        let state = self.state();
        let found = state.find(name).map(|bitmap| (bitmap.copy(), bitmap));
        // (It may be found out only now that it cannot be read.)
        match found.filter(|(_, bitmap)| bitmap.problem().is_none()) {
            Some((dirty, _)) => dirty,
            None => Dirty::all(state.size.unwrap_or(0)),
        }
    }

    /// No backup has been made.
    pub fn drop_successor(&self, name: &str) {
        let mut state = self.state();
        state.drop_successor(name);
        // (The file of one that is not in use is removed by the next user.)
        state.pending.retain(|pending| pending != name);
        self.tell_workers(&state);
    }

    /// The backup that was begun last is safe: what was dirty at its instant is no longer.
    pub fn advance(&self, name: &str, size: u64) -> Result<(), String> {
        self.with(size, |place, state| state.advance(place, name))
    }
}

impl State {
    fn advance(&mut self, place: &Place, name: &str) -> Result<(), String> {
        let state = self;
        let at = { state.successors.iter() }.position(|next| next.name() == name);
        let at = at.ok_or_else(|| {
            format!(
                "no backup that was begun with bitmap '{name}' has ended well since the server was started: the bitmap \
                 stays as it is"
            )
        })?;
        let next = &state.successors[at];
        if let Some(problem) = next.problem() {
            return Err(format!("bitmap '{name}' stays as it is: {problem}"));
        }
        let moved = fs::rename(next.path(), place.path(name));
        moved.map_err(|error| format!("bitmap '{name}' stays as it is: {error}"))?;
        // (If the machine goes down before this is durable, both count as all dirty.)
        sync_dir(&place.path(name)).map_err(|error| error.to_string())?;
        let next = state.successors.remove(at);
        state.current.retain(|bitmap| bitmap.name() != name);
        state.current.push(next);
        Ok(())
    }
}

fn unknown(name: &str) -> String {
    format!("there is no bitmap '{name}'")
}

/// How the image was.
pub(crate) struct Before(Option<io::Result<Option<Left>>>);

impl Place {
    fn make(&self, path: PathBuf, name: &str, header: Header) -> io::Result<Bitmap> {
        fs::create_dir(&self.dir).or_else(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => Ok(()),
            _ => Err(error),
        })?;
        sync_dir(&self.dir)?;
        let now = Now {
            boot: &self.boot,
            image: None,
        };
        Bitmap::make(path, name, header, &now)
    }
}

impl State {
    fn open(&mut self, place: &Place, size: u64, before: Before) -> io::Result<()> {
        let names = place.names(&self.pending)?;
        let image = match before.0 {
            Some(image) if !names.is_empty() || !self.pending.is_empty() => image?,
            _ => None,
        };
        let now = Now {
            boot: &place.boot,
            image,
        };
        let open = |path: PathBuf, name: &String| {
            Bitmap::open(path, name, &now)
                .map(Arc::new)
                .map_err(|error| io::Error::other(format!("{name}: {error}")))
        };
        let current = names.iter().map(|name| open(place.path(name), name));
        let current = current.collect::<Result<_, _>>()?;
        // (Others who have used the disk have removed them.)
        let pending = std::mem::take(&mut self.pending);
        let pending = pending.iter().map(|name| open(place.next_path(name), name));
        *self = State {
            size: Some(size),
            current,
            successors: pending.filter_map(Result::ok).collect(),
            pending: Vec::new(),
        };
        Ok(())
    }

    fn close(&mut self, place: &Place) {
        let (current, successors) = (
            std::mem::take(&mut self.current),
            std::mem::take(&mut self.successors),
        );
        let pending = successors.iter().map(|next| next.name().into()).collect();
        *self = State {
            pending,
            ..State::default()
        };
        if current.is_empty() && successors.is_empty() {
            return;
        }
        let image = place.image();
        for bitmap in current.into_iter().chain(successors) {
            let closed = match &image {
                Ok(image) => bitmap.close(*image),
                Err(error) => {
                    bitmap.unlock();
                    Err(io::Error::new(error.kind(), error.to_string()))
                }
            };
            if let Err(error) = closed {
                tracing::error!("{}: {error}", bitmap.path().display());
            }
        }
    }

    fn find(&self, name: &str) -> Option<&Arc<Bitmap>> {
        self.current.iter().find(|bitmap| bitmap.name() == name)
    }

    fn has_room_for(&self, name: &str) -> Result<(), String> {
        if self.find(name).is_some() {
            return Err(format!("there is a bitmap '{name}' already"));
        }
        match self.current.len() < MOST {
            true => Ok(()),
            false => Err(format!("there are {MOST} bitmaps already")),
        }
    }

    fn drop_successor(&mut self, name: &str) {
        for next in self.successors.extract_if(.., |next| next.name() == name) {
            remove(next.path());
        }
    }

    fn list(&self, size: u64) -> Vec<BitmapStatus> {
        let status = |bitmap: &Arc<Bitmap>| {
            let dirty = bitmap.copy().bytes(size);
            let problem = bitmap.problem().map(str::to_owned);
            let next = { self.successors.iter() }.find(|next| next.name() == bitmap.name());
            BitmapStatus {
                name: bitmap.name().into(),
                granularity: bitmap.block(),
                dirty: match problem {
                    Some(_) => size,
                    None => dirty,
                },
                since: bitmap.since(),
                problem,
                successor: next.map(|next| next.since()),
            }
        };
        self.current.iter().map(status).collect()
    }
}

/// A file that says nothing that is not said elsewhere.
fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::error!("{}: {error}", path.display());
    }
}
