//! Bitmaps that a qcow2 image holds itself. While the disk is in use they are files like others;
//! afterwards the image has them, too, in QEMU's format.
//!
//! The image's version counts if it is valid: a program that changes the disk first marks the
//! bitmaps as in use. If they are marked so, either this server was killed, and the files count.
//! Or another program was killed, and everything is dirty.
//!
//! A process that takes a disk into use may lack the right to create files. Therefore the files for
//! bitmaps that others have made are created beforehand. Where that was too early, a bitmap is in
//! memory until the disk is released.

use super::all::{Bitmaps, State, remove};
use super::bitmap::{Bitmap, Now, allocate, sync_dir};
use super::header::Header;
use super::limits::{MOST, MOST_BITS, check_bitmap_name, is_granularity};
use super::place::Place;
use super::status::BitmapStatus;
use fathom_core::DiskError;
use fathom_core::blocks::BITS;
use fathom_formats::offline::bitmap::{Listed, list_some};
use fathom_formats::served::{ImageDisk, OwnBitmap};
use fathom_units::cause;
use std::fs::File;
use std::io;
use std::sync::Arc;

const DIED: &str = "the image was not closed cleanly";

const RESTORED: &str =
    "its virtual machine knew of changes that the image lacked when the bitmap was begun";

/// Gives up the bitmaps that were closed and not used since: they miss changes.
fn give_up_closed(bitmaps: &mut [Arc<Bitmap>], why: &str) {
    let closed = bitmaps.iter_mut().filter(|bitmap| bitmap.was_closed());
    for bitmap in closed.filter_map(Arc::get_mut) {
        bitmap.give_up(why);
    }
}

/// Maximum number of bits of all bitmaps of an image.
const MOST_BITS_OF_ALL: u64 = 4 * MOST_BITS;

/// Returns a function that says whether a bitmap can be recorded here.
///
/// An image may have any number of bitmaps of any size.
fn can_be(size: u64) -> impl FnMut(&str, u64) -> bool {
    let (mut left, mut bits_left) = (MOST, MOST_BITS_OF_ALL);
    move |name, granularity| {
        if check_bitmap_name(name).is_err() || !is_granularity(size, granularity) || left == 0 {
            return false;
        }
        let bits = size.div_ceil(granularity);
        let can_be = bits <= bits_left;
        if can_be {
            left -= 1;
            bits_left -= bits;
        }
        can_be
    }
}

/// Lists the bitmaps of the image that can be recorded.
fn own_of(image: &ImageDisk, size: u64) -> Result<Vec<Listed>, DiskError> {
    let mut can_be = can_be(size);
    image.look(|file| {
        list_some(file, &mut |bitmap| {
            let name = str::from_utf8(&bitmap.name);
            bitmap.is_plainly_enabled() && name.is_ok_and(|name| can_be(name, bitmap.granularity()))
        })
    })
}

impl Bitmaps {
    /// Returns whether the bitmaps are in the image while the disk is not in use.
    pub fn are_in_image(&self) -> bool {
        self.image.is_some()
    }

    /// Creates the files that cannot be created while the disk of `size` bytes is in use.
    pub fn prepare(&self, size: u64) {
        if let (Ok(place), Some(image)) = (&self.place, &self.image)
            && self.state().size.is_none()
        {
            prepare(place, size, image);
        }
    }

    /// Calls `work` with the bitmaps of an image whose disk is not in use.
    ///
    /// The image may have to stay unchanged. Therefore the bitmaps are read from the image, and the
    /// result is left in files next to it.
    pub(super) fn with_own<T>(
        &self,
        size: u64,
        image: &ImageDisk,
        work: impl FnOnce(&Place, &mut State) -> Result<T, String>,
    ) -> Result<T, String> {
        let place = self.place.as_ref().map_err(Clone::clone)?;
        self.prepare(size);
        let mut state = self.state();
        let done = image.alone(|_| {
            if let Err(problem) = state.open(place, size, place.image()) {
                return Ok(Err(problem));
            }
            let taken = state.take_own(place, size, image);
            let done = taken.map_err(|error| error.to_string()).and_then(|there| {
                state.fixed = there;
                work(place, &mut state)
            });
            // Closed before anybody else can use the image.
            state.close(place, place.image(), Some(&[]));
            Ok(done)
        });
        done.unwrap_or_else(|error| Err(error.to_string()))
    }
}

impl State {
    /// Returns an error if this bitmap must not be removed or renamed.
    pub(super) fn may_go(&self, name: &str) -> Result<(), String> {
        match self.fixed.iter().any(|fixed| fixed == name) {
            false => Ok(()),
            true => Err(format!(
                "bitmap '{name}': in the image, which must not change until its virtual machine \
                 has connected, which may know of changes that are not in the image"
            )),
        }
    }

    /// Takes over the bitmaps of the image, which is in use now, and returns their names.
    pub(super) fn take_own(
        &mut self,
        place: &Place,
        size: u64,
        image: &ImageDisk,
    ) -> Result<Vec<String>, DiskError> {
        let mut there = Vec::new();
        let others = image.take_bitmaps(&mut can_be(size), &mut |own| {
            let name = own.name.clone();
            there.push(name.clone());
            let taken = self.take(place, size, own);
            let tell = |error: &io::Error| {
                let path = place.path(&name);
                tracing::error!(
                    "{}: {}; the bitmap misses writes",
                    path.display(),
                    cause(error)
                );
            };
            taken.inspect_err(tell).is_ok()
        })?;
        self.others = others;
        if image.has_restored() {
            give_up_closed(&mut self.current, RESTORED);
        }
        if place.image.is_none() {
            // Other users of the image in the meantime cannot be detected.
            self.successors.clear();
        }
        self.drop_removed(place, &there);
        for bitmap in self.current.iter().filter(|bitmap| bitmap.is_own()) {
            if let Some(problem) = bitmap.problem() {
                let path = place.path(&bitmap.name());
                tracing::warn!("{}: all blocks count as dirty: {problem}", path.display());
            }
        }
        Ok(there)
    }

    fn take(&mut self, place: &Place, size: u64, own: OwnBitmap) -> io::Result<()> {
        let now = Now {
            boot: &place.boot,
            of: place.of.as_deref(),
            image: place.image(),
        };
        let at = { self.current.iter() }.position(|there| *there.name() == *own.name);
        let mut header = Header::new(size, own.granularity, 0);
        header.own = true;
        match (at, &own.words) {
            // Another program has used the bitmap since, and was killed.
            (Some(at), None) if self.current[at].is_own() => {
                give_up_closed(&mut self.current[at..=at], DIED);
                return Ok(());
            }
            (Some(_), None) => return Ok(()),
            (Some(at), Some(words)) if self.current[at].is_as_in_image() => {
                header.since = self.current[at].since();
                let there = Arc::into_inner(self.current.remove(at));
                let before = there.as_ref().map_or(0, Bitmap::size);
                let begun =
                    there.ok_or_else(|| io::Error::other("another program marks the bitmap"));
                let begun = begun.and_then(|there| {
                    there.begin_anew(header.clone(), &now, |anew| {
                        anew.add_words(words, own.granularity);
                        // A disk that was enlarged may have been shrunk before.
                        anew.mark(before, size.saturating_sub(before));
                    })
                });
                let path = place.path(&own.name);
                match begun {
                    Ok(anew) => {
                        self.current.push(Arc::new(anew));
                        return Ok(());
                    }
                    Err(error) => {
                        tracing::error!(
                            "{}: {}; the bitmap is kept in memory",
                            path.display(),
                            cause(error)
                        );
                        remove(&path);
                    }
                }
            }
            // The bitmap in the image and the one in the file were created independently.
            (Some(at), Some(words)) => {
                self.current[at].add_words(words, own.granularity);
                return Ok(());
            }
            (None, _) => {}
        }
        if self.current.len() >= MOST {
            return Err(io::Error::other("too many bitmaps"));
        }
        header.problem = own.words.is_none().then(|| DIED.into());
        let new = Bitmap::in_memory(&own.name, header, &now)?;
        let words = own.words.iter();
        words.for_each(|words| new.add_words(words, own.granularity));
        self.current.push(Arc::new(new));
        Ok(())
    }

    /// Drops bitmaps that another program has removed from the image.
    fn drop_removed(&mut self, place: &Place, there: &[String]) {
        let is_gone = |bitmap: &Arc<Bitmap>| {
            bitmap.is_own()
                && bitmap.problem().is_some()
                && !there.contains(&bitmap.name().to_string())
        };
        let (gone, kept) = std::mem::take(&mut self.current)
            .into_iter()
            .partition(is_gone);
        self.current = kept;
        let gone: Vec<Arc<Bitmap>> = gone;
        gone.iter()
            .for_each(|bitmap| remove(&place.path(&bitmap.name())));
    }

    /// Lists the bitmaps of a disk that is not in use, as they will be when it is.
    pub(super) fn list_own(
        &self,
        image: &ImageDisk,
        size: u64,
        mut list: Vec<BitmapStatus>,
    ) -> Result<Vec<BitmapStatus>, String> {
        let all = own_of(image, size).map_err(|error| error.to_string())?;
        let is_own = |name: &str| self.find(name).is_some_and(|there| there.is_own());
        let is_as_in_image = |name: &str| {
            let there = self.find(name);
            there.is_some_and(|there| there.is_as_in_image())
        };
        let is_in_image = |name: &str| all.iter().any(|own| own.name() == name);
        list.retain(|there| {
            there.problem.is_none() || !is_own(&there.name) || is_in_image(&there.name)
        });
        for own in &all {
            let there = { list.iter_mut() }.find(|there| there.name == own.name());
            let is_here = there.is_some();
            let status = BitmapStatus {
                name: own.name(),
                granularity: own.bitmap.granularity(),
                dirty: own.dirty.unwrap_or(size),
                since: there.as_ref().and_then(|there| there.since),
                problem: own.dirty.is_none().then(|| DIED.into()),
                successor: there.as_ref().and_then(|there| there.successor),
            };
            match there {
                Some(there) if own.dirty.is_some() && is_as_in_image(&there.name) => {
                    *there = status;
                }
                None if !is_here => list.push(status),
                _ => {}
            }
        }
        list.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(list)
    }

    /// Returns all bitmaps to be written into the image of a disk of `size` bytes.
    pub(super) fn for_image(&self, size: u64) -> impl Iterator<Item = OwnBitmap> {
        self.current
            .iter()
            .map(move |bitmap| bitmap.for_image(size))
    }
}

/// Creates files for the bitmaps in the image, as far as they are known now.
fn prepare(place: &Place, size: u64, image: &ImageDisk) {
    for own in own_of(image, size).unwrap_or_default() {
        let (name, granularity) = (own.name(), own.bitmap.granularity());
        if place.path(&name).exists() {
            continue;
        }
        let header = Header {
            problem: Some(DIED.into()),
            own: true,
            ..Header::new(size, granularity, 0)
        };
        if let Err(error) = make_file(place, &name, &header) {
            let path = place.path(&name);
            tracing::warn!(
                "{}: {}; the bitmap is kept in memory",
                path.display(),
                cause(error)
            );
        }
    }
}

fn make_file(place: &Place, name: &str, header: &Header) -> io::Result<()> {
    place.make()?;
    let path = place.path(name);
    let new = File::options().write(true).create_new(true).open(&path);
    let written = new.and_then(|file| {
        allocate(&file, header)?;
        header.write(&file)
    });
    written.inspect_err(|error| {
        // Another process may have created the file.
        if error.kind() != io::ErrorKind::AlreadyExists {
            remove(&path);
        }
    })?;
    sync_dir(&path)
}

impl Bitmap {
    /// Marks everything that these bits mark, with `granularity` bytes per bit.
    fn add_words(&self, words: &[u64], granularity: u64) {
        for (at, word) in words.iter().enumerate() {
            let (mut at, mut rest) = (at as u64 * BITS, *word);
            while rest != 0 {
                let zeroes = rest.trailing_zeros();
                at += u64::from(zeroes);
                rest >>= zeroes;
                let ones = rest.trailing_ones();
                self.mark(
                    at.saturating_mul(granularity),
                    u64::from(ones) * granularity,
                );
                at += u64::from(ones);
                rest = rest.checked_shr(ones).unwrap_or(0);
            }
        }
    }

    fn for_image(&self, size: u64) -> OwnBitmap {
        let words = self.words_for(size);
        OwnBitmap {
            name: self.name().to_string(),
            granularity: self.block(),
            // The problem must be read after the bits; see `Bitmap::problem`.
            words: self.problem().is_none().then_some(words),
        }
    }
}
