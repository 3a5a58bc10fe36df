//! A bitmap in use.

use super::header::{self, Header, Left};
use super::mapping::Mapping;
use fathom_core::blocks::{BITS, Grid, bits, run, words_for};
use fathom_units::cause;
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, MemfdFlags, SeekFrom, fallocate, memfd_create, seek};
use rustix::io::Errno;
use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Records which blocks of a disk may have been changed since the bitmap was created.
pub(crate) struct Bitmap {
    /// The name, which may change.
    name: Mutex<Arc<str>>,
    grid: Grid,
    file: Arc<File>,
    map: Mapping,
    since: u64,
    problem: Option<String>,
    /// Whether the image has the bitmap, too.
    own: bool,
    of: Option<String>,
    before: Before,
    /// Whether the bitmap has no file that others can find.
    in_memory: bool,
}

/// State of a bitmap before it was taken into use.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    New,
    Closed,
    /// In use by a server that was killed.
    Left,
}

const LOST: &str = "its file was truncated, or could not be read, while it was in use";

const UNFINISHED: &str = "the server ended while the bitmap was read from the image";
const ELSEWHERE: &str = "the image was replaced by another file";
const LEFT_SO: &str = "all of the bitmap was dirty when the image was closed";
const DATA_CHANGED: &str = "another program has changed the image's data file";
const OTHER_DISK: &str = "it belongs to another disk";

/// Why a file is not used.
#[derive(Debug)]
pub(super) enum NotOpened {
    /// The file is not a bitmap of this program, and is not touched.
    Strange(&'static str),
    /// The file may be a bitmap, but cannot be opened.
    Failed(io::Error),
    /// The file is a bitmap, but cannot be used.
    Broken(io::Error),
}

const STRANGE: NotOpened = NotOpened::Strange("not a bitmap");

impl From<io::Error> for NotOpened {
    fn from(error: io::Error) -> NotOpened {
        NotOpened::Failed(error)
    }
}

/// The present state, to which a bitmap's header is compared.
pub(super) struct Now<'a> {
    /// The boot identifier of this machine.
    pub(super) boot: &'a str,
    /// State of the image's file, if the disk has one, and otherwise a digest of the disk's name.
    pub(super) image: Option<Left>,
    pub(super) of: Option<&'a str>,
}

/// The contents of a bitmap's file that is only inspected.
pub(super) struct Looked {
    pub(super) header: Header,
    pub(super) dirty: Dirty,
    pub(super) problem: Option<String>,
}

impl Looked {
    /// Returns whether the bitmap belongs to another disk.
    pub(super) fn is_of_another(&self, now: &Now<'_>) -> bool {
        self.header.of.as_deref() != now.of || Left::are_of_two_files(self.header.image, now.image)
    }
}

/// The mode in which a file is opened.
#[derive(PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

impl Bitmap {
    /// Creates a file at this path with an empty bitmap, in use.
    pub(super) fn make(
        path: &Path,
        name: &str,
        header: Header,
        now: &Now<'_>,
    ) -> io::Result<Bitmap> {
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)?;
        let made = Bitmap::in_use(file, name, header, now);
        // `create_new` fails before this point if another program has created the file.
        made.inspect_err(|_| drop(std::fs::remove_file(path)))
    }

    /// Opens the file at this path. The file's contents count only if they are known to be right.
    pub(super) fn open(path: &Path, name: &str, now: &Now<'_>) -> Result<Bitmap, NotOpened> {
        let (file, header) = open_own(path, Access::Write)?;
        Bitmap::taken(file, header, path, name, now).map_err(NotOpened::Broken)
    }

    fn taken(
        file: File,
        mut header: Header,
        path: &Path,
        name: &str,
        now: &Now<'_>,
    ) -> io::Result<Bitmap> {
        only_name(&file)?;
        // While the header names a problem, everything is dirty, even where bits are clear.
        if header.problem.is_none()
            && let Some(problem) = problem_of(&file, &header, now)?
        {
            // A bitmap that is also in the image need not be valid here.
            if !header.own {
                tracing::warn!("{}: all blocks count as dirty: {problem}", path.display());
            }
            header.problem = Some(problem);
        }
        let before = match header.used_by {
            None => Before::Closed,
            Some(_) => Before::Left,
        };
        let opened = Bitmap::in_use(file, name, header, now)?;
        Ok(Bitmap { before, ..opened })
    }

    /// Inspects the file at this path, which may be in use.
    ///
    /// The result says why the contents are not known to be right, if so.
    pub(super) fn look(path: &Path, now: &Now<'_>) -> Result<Looked, NotOpened> {
        let (file, header) = open_own(path, Access::Read)?;
        only_name(&file).map_err(NotOpened::Broken)?;
        let problem = match header.problem.clone() {
            None => problem_of(&file, &header, now)?,
            problem => problem,
        };
        let dirty = match problem {
            Some(_) => Dirty::all(header.size),
            None => Dirty::read(&file, &header)?,
        };
        Ok(Looked {
            header,
            dirty,
            problem,
        })
    }

    /// Creates a bitmap without a file that others can find; it is gone when this process ends.
    pub(super) fn in_memory(name: &str, header: Header, now: &Now<'_>) -> io::Result<Bitmap> {
        let file = memfd_create("fathom-bitmap", MemfdFlags::CLOEXEC)?;
        let made = Bitmap::in_use(file.into(), name, header, now)?;
        Ok(Bitmap {
            in_memory: true,
            ..made
        })
    }

    /// Starts the bitmap's file again with this header and the blocks that `fill` marks.
    ///
    /// Until that is done, the file says that everything is dirty.
    pub(super) fn begin_anew(
        self,
        header: Header,
        now: &Now<'_>,
        fill: impl FnOnce(&Bitmap),
    ) -> io::Result<Bitmap> {
        let (file, name) = (self.file.try_clone()?, self.name());
        drop(self);
        let unfinished = Header {
            problem: Some(UNFINISHED.into()),
            ..header
        };
        unfinished.write(&file)?;
        // Cutting the file here also removes the mark of a lost file.
        file.set_len(header::LINE as u64)?;
        let mut anew = Bitmap::in_use(file, &name, unfinished, now)?;
        fill(&anew);
        anew.problem = None;
        anew.header(Some(now.boot), now.image, None, anew.own)
            .write(&anew.file)?;
        Ok(anew)
    }

    fn in_use(file: File, name: &str, mut header: Header, now: &Now<'_>) -> io::Result<Bitmap> {
        allocate(&file, &header)?;
        header.used_by = Some(now.boot.into());
        header.of = now.of.map(str::to_owned);
        // Shows later whether another file has taken the image's place.
        header.image = now.image;
        let grid = Grid::new(header.size, header.block);
        let file = Arc::new(file);
        let map = Mapping::new(&file, header::LEN, words_for(grid.count()))?;
        // The header comes last: from then on others trust the bits.
        header.write(&file)?;
        Ok(Bitmap {
            name: Mutex::new(name.into()),
            grid,
            file,
            map,
            since: header.since,
            problem: header.problem,
            own: header.own,
            of: header.of,
            before: Before::New,
            in_memory: false,
        })
    }

    /// Closes the bitmap durably. The bitmap stays valid while the image's file is unchanged.
    ///
    /// No worker marks the bitmap any more. `own`: whether the image has the bitmap, too. After an
    /// error the file must be removed.
    pub(super) fn close(&self, image: Option<Left>, own: bool) -> io::Result<()> {
        let written = self.map.sync();
        let problem = match written {
            // The image says that everything is dirty, and the image's version counts.
            Ok(()) if own => self.problem().map(|_| LEFT_SO.into()),
            Ok(()) => self.problem(),
            Err(error) => Some(format!("cannot write the bitmap: {}", cause(error))),
        };
        self.header(None, image, problem, own).write(&self.file)
    }

    fn header(
        &self,
        used_by: Option<&str>,
        image: Option<Left>,
        problem: Option<String>,
        own: bool,
    ) -> Header {
        Header {
            used_by: used_by.map(str::to_owned),
            image,
            problem,
            own,
            of: self.of.clone(),
            ..Header::new(self.grid.size, self.grid.block(), self.since)
        }
    }

    /// Marks a range that may be changed from now on.
    #[inline]
    pub(crate) fn mark(&self, offset: u64, len: u64) {
        for (word, mask) in bits(self.map.words(), self.grid.touched(offset, len)) {
            if word.load(Ordering::Relaxed) & mask != mask {
                word.fetch_or(mask, Ordering::Release);
            }
        }
    }

    /// Returns a copy of the bitmap.
    pub(super) fn copy(&self) -> Dirty {
        let words = self.map.words().iter();
        let words = words.map(|word| AtomicU64::new(word.load(Ordering::Acquire)));
        Dirty {
            grid: self.grid,
            words: words.collect(),
        }
    }

    /// Returns the words for a disk of `size` bytes, where added space is dirty.
    pub(super) fn words_for(&self, size: u64) -> Vec<u64> {
        let words = self.map.words().iter();
        let mut words = Vec::from_iter(words.map(|word| word.load(Ordering::Acquire)));
        if size > self.grid.size {
            // The last block may have been short, so it is dirty, too. Space without words counts
            // as dirty.
            let first = self.grid.size / self.grid.block();
            if let Some(word) = words.get_mut((first / BITS) as usize) {
                *word |= u64::MAX << (first % BITS);
            }
        }
        words
    }

    pub(super) fn name(&self) -> Arc<str> {
        self.name.lock().clone()
    }

    /// Changes the name by which others find the bitmap.
    pub(super) fn rename(&self, name: &str) {
        *self.name.lock() = name.into();
    }

    /// Marks everything that is dirty in `other`.
    pub(super) fn add(&self, other: &Bitmap) {
        let (said, size) = (other.copy(), self.grid.size);
        if other.problem().is_some() {
            return self.mark(0, size);
        }
        let mut at = 0;
        while at < size {
            let (is_dirty, end) = said.part(at..size);
            if is_dirty {
                self.mark(at, end - at);
            }
            at = end;
        }
    }

    pub(super) fn is_own(&self) -> bool {
        self.own
    }

    /// Returns whether the image's version of the bitmap counts, if it is valid.
    ///
    /// The result is true only if the bitmap belongs to this image.
    pub(super) fn is_as_in_image(&self) -> bool {
        // A program that records changes in the image also changes the bitmap there first.
        let is_unknown_there = [ELSEWHERE, OTHER_DISK, DATA_CHANGED]
            .map(Some)
            .contains(&self.problem.as_deref());
        self.own && !self.in_memory && !is_unknown_there
    }

    /// Makes everything dirty, since the bitmap misses changes after it was closed.
    ///
    /// Must not be called while workers mark the bitmap.
    pub(super) fn give_up(&mut self, why: &str) {
        self.problem.get_or_insert_with(|| why.into());
    }

    /// Returns whether a killed server left the bitmap and its version in the image.
    pub(super) fn was_killed(&self) -> bool {
        self.own && self.before == Before::Left
    }

    pub(super) fn was_closed(&self) -> bool {
        self.before == Before::Closed
    }

    /// Returns the size in bytes of the disk when the bitmap was created.
    pub(super) fn size(&self) -> u64 {
        self.grid.size
    }

    pub(super) fn is_in_memory(&self) -> bool {
        self.in_memory
    }

    pub(super) fn since(&self) -> u64 {
        self.since
    }

    pub(super) fn block(&self) -> u64 {
        self.grid.block()
    }

    /// Makes all marks durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.map.sync()
    }

    /// Returns why everything counts as dirty, if so. Call it after reading the bits.
    pub(super) fn problem(&self) -> Option<String> {
        let is_whole = |found: Metadata| found.len() >= file_len(&self.grid);
        let is_there = !self.map.is_lost() && self.file.metadata().is_ok_and(is_whole);
        match is_there {
            true => self.problem.clone(),
            false => Some(LOST.into()),
        }
    }
}

pub(super) fn sync_dir(path: &Path) -> io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    File::open(dir.unwrap_or(Path::new(".")))?.sync_all()
}

/// Returns the length of a bitmap's file. A page exists as a whole, or not at all.
fn file_len(grid: &Grid) -> u64 {
    header::LEN + (8 * words_for(grid.count()) as u64).next_multiple_of(header::LEN)
}

/// Allocates the file, so that a worker that marks a block never finds the file system full.
pub(super) fn allocate(file: &File, header: &Header) -> io::Result<()> {
    let len = file_len(&Grid::new(header.size, header.block));
    Ok(fallocate(file, FallocateFlags::empty(), 0, len)?)
}

/// Opens a bitmap's file, not a link: others with fewer rights may write to the directory.
fn open_own(path: &Path, access: Access) -> Result<(File, Header), NotOpened> {
    let file = open_file(path, access)?;
    let header = Header::read(&file)?.ok_or(STRANGE)?;
    Ok((file, header))
}

/// Rejects a file with several links, since another user may have linked a file here to have it
/// changed.
fn only_name(file: &File) -> io::Result<()> {
    match file.metadata()?.nlink() {
        1 => Ok(()),
        _ => Err(io::Error::other("the file has another name, too")),
    }
}

fn open_file(path: &Path, access: Access) -> Result<File, NotOpened> {
    let mut options = File::options();
    let flags = libc::O_NOCTTY | libc::O_NONBLOCK | libc::O_NOFOLLOW;
    let opened = options
        .read(true)
        .write(access == Access::Write)
        .custom_flags(flags)
        .open(path);
    let strange = Err(NotOpened::Strange("not a file of its own"));
    // A link, a directory, a socket, or a running program.
    let is_strange = |error: &io::Error| {
        let errno = error.raw_os_error();
        [libc::ELOOP, libc::EISDIR, libc::ENXIO, libc::ETXTBSY]
            .map(Some)
            .contains(&errno)
    };
    let file = match opened {
        Err(error) if is_strange(&error) => return strange,
        opened => opened?,
    };
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => strange,
    }
}

/// Returns whether an unfinished bitmap file may be removed.
///
/// The file must be a bitmap, or be allocated and have no data yet.
pub(super) fn is_left_over(path: &Path) -> bool {
    let Ok(file) = open_file(path, Access::Read) else {
        return false;
    };
    let has_room = file.metadata().is_ok_and(|found| found.len() > header::LEN);
    let is_blank = has_room && seek(&file, SeekFrom::Data(0)) == Err(Errno::NXIO);
    is_blank || Header::read(&file).is_ok_and(|header| header.is_some())
}

/// Returns whether the path is a regular file, as bitmaps of an image are.
pub(super) fn is_file(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|found| found.is_file())
}

/// Returns why the contents of the file are not known to be right.
fn problem_of(file: &File, header: &Header, now: &Now<'_>) -> io::Result<Option<String>> {
    let grid = Grid::new(header.size, header.block);
    if file.metadata()?.len() < file_len(&grid) {
        return Ok(Some("its file was truncated".into()));
    }
    if header::was_lost(file)? {
        return Ok(Some(LOST.into()));
    }
    if Left::are_of_two_files(header.image, now.image) {
        return Ok(Some(ELSEWHERE.into()));
    }
    if header.of.as_deref() != now.of {
        return Ok(Some(OTHER_DISK.into()));
    }
    Ok(match &header.used_by {
        // The previous user has died, and all its marks are in the file.
        Some(boot) if boot == now.boot => None,
        Some(_) => Some("the machine went down while the bitmap recorded writes".into()),
        None if Left::differ_in_data(header.image, now.image) => Some(DATA_CHANGED.into()),
        None if header.image != now.image => Some("another program has changed the image".into()),
        None => None,
    })
}

/// A copy of a bitmap.
pub struct Dirty {
    grid: Grid,
    words: Box<[AtomicU64]>,
}

impl Dirty {
    /// Returns a value in which everything is dirty.
    pub(super) fn all(size: u64) -> Dirty {
        Dirty {
            grid: Grid::new(0, super::limits::granularity(size)),
            words: Box::default(),
        }
    }

    /// Reads the bits of a complete file.
    fn read(file: &File, header: &Header) -> io::Result<Dirty> {
        let grid = Grid::new(header.size, header.block);
        let mut bytes = vec![0; 8 * words_for(grid.count())];
        file.read_exact_at(&mut bytes, header::LEN)?;
        let words = bytes
            .chunks_exact(8)
            .map(|word| word.try_into().expect("8 bytes"));
        let words = words.map(|word| AtomicU64::new(u64::from_ne_bytes(word)));
        Ok(Dirty {
            grid,
            words: words.collect(),
        })
    }

    /// Returns whether the range begins with dirty bytes, and where that ends.
    ///
    /// Bytes beyond the bits are dirty.
    pub fn part(&self, range: Range<u64>) -> (bool, u64) {
        let len = range.end.saturating_sub(range.start);
        let blocks = self.grid.touched(range.start, len);
        if blocks.is_empty() {
            return (true, range.end);
        }
        let at_first = |set| run(&self.words, blocks.clone(), set);
        let dirty = at_first(true).filter(|found| found.start == blocks.start);
        let part = dirty.clone().or_else(|| at_first(false));
        let end = part.map_or(range.end, |part| self.grid.bytes(part).end);
        (dirty.is_some(), end.min(range.end))
    }

    /// Returns the number of dirty bytes of a disk of this size.
    pub fn bytes(&self, size: u64) -> u64 {
        let ones = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        let blocks: u64 = self.words.iter().map(ones).sum();
        let beyond = size.saturating_sub(self.grid.size);
        // The last block may be short.
        (blocks * self.grid.block()).min(self.grid.size.min(size)) + beyond
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_bitmap_that_begins_anew_is_valid() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let now = Now {
            boot: "one",
            image: None,
            of: None,
        };
        let header = Header::new(1 << 20, 64 << 10, 1);
        let bitmap = Bitmap::make(&path, "a", header.clone(), &now).unwrap();
        header::tell_lost(&bitmap.file);
        let looked = || Bitmap::look(&path, &now).unwrap();
        assert_eq!(looked().problem.as_deref(), Some(LOST));
        let anew = bitmap.begin_anew(header, &now, |anew| anew.mark(0, 1));
        assert_eq!(anew.unwrap().problem(), None);
        assert_eq!(looked().problem, None);
        assert_eq!(looked().dirty.bytes(1 << 20), 64 << 10);
    }
}
