//! The bitmaps that a qcow2 image has itself. While the disk is in use they are files as others are, and afterwards the image
//! has them, too, as QEMU wants them there.
//!
//! What the image says counts, if it can be believed: whoever changes the disk has marked them as in use before. If not, this
//! server was killed, and the files count; or somebody else was, and all is dirty.
//!
//! Whoever takes a disk into use may not make files. Those of bitmaps that others have made are made beforehand; where that
//! was too early, a bitmap is in memory until the disk is left.

use super::all::{Bitmaps, State, remove};
use super::bitmap::{Bitmap, Now, allocate, sync_dir};
use super::header::Header;
use super::limits::{MOST, MOST_BITS, check_bitmap_name, is_granularity};
use super::place::Place;
use super::status::BitmapStatus;
use crate::blocks::BITS;
use fathom_core::DiskError;
use fathom_formats::offline::bitmap::{Listed, list_some};
use fathom_formats::served::{ImageDisk, OwnBitmap};
use fathom_units::cause;
use std::fs::File;
use std::io;
use std::sync::Arc;

const DIED: &str = "the image was not closed cleanly";

const RESTORED: &str =
    "its virtual machine knew of changes that the image lacked when the bitmap was begun";

/// Those that were closed and not used since miss something.
fn give_up_closed(bitmaps: &mut [Arc<Bitmap>], why: &str) {
    let closed = bitmaps.iter_mut().filter(|bitmap| bitmap.was_closed());
    for bitmap in closed.filter_map(Arc::get_mut) {
        bitmap.give_up(why);
    }
}

/// Bits that all of an image's bitmaps have.
const MOST_BITS_OF_ALL: u64 = 4 * MOST_BITS;

/// Whether a bitmap can be recorded here. (There may be any number of any size in an image.)
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

/// What the image says of those that can be.
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
    /// Whether they are in the image while the disk is not in use.
    pub fn are_in_image(&self) -> bool {
        self.image.is_some()
    }

    /// Before the disk of so many bytes is in use: makes what cannot be made then.
    pub fn prepare(&self, size: u64) {
        if let (Ok(place), Some(image)) = (&self.place, &self.image)
            && self.state().size.is_none()
        {
            prepare(place, size, image);
        }
    }

    /// The disk is not in use, and there may be reasons why its image is to stay as it is: they are taken from there, and
    /// left beside it.
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
            // (As long as nobody else can have it.)
            state.close(place, place.image(), Some(&[]));
            Ok(done)
        });
        done.unwrap_or_else(|error| Err(error.to_string()))
    }
}

impl State {
    /// Whether this one may be removed.
    pub(super) fn may_go(&self, name: &str) -> Result<(), String> {
        match self.fixed.iter().any(|fixed| fixed == name) {
            false => Ok(()),
            true => Err(format!(
                "bitmap '{name}': in the image, which must not change until its virtual machine \
                 has connected, which may know of changes that are not in the image"
            )),
        }
    }

    /// Takes those of the image, of a disk of so many bytes, that has just been taken into use. Gives their names.
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
            // (Who has had it since cannot be seen.)
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
            // Somebody else has had it since, and died.
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
                        // (Who has made it larger may have made it smaller before.)
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
            // Each has come into being without the other.
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

    /// Somebody has removed them from the image.
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

    /// Likewise, of a disk that is not in use: what there will be.
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

    /// All that belong into the image of a disk of so many bytes, one after the other.
    pub(super) fn for_image(&self, size: u64) -> impl Iterator<Item = OwnBitmap> {
        self.current
            .iter()
            .map(move |bitmap| bitmap.for_image(size))
    }
}

/// Makes the files of those that the image has, as far as it can be told now.
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
        // (Another process may have made one.)
        if error.kind() != io::ErrorKind::AlreadyExists {
            remove(&path);
        }
    })?;
    sync_dir(&path)
}

impl Bitmap {
    /// What these bits say, of so many bytes each, is dirty.
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
            // (After they were read: see there.)
            words: self.problem().is_none().then_some(words),
        }
    }
}
