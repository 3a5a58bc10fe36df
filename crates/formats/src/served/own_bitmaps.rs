//! The bitmaps inside a qcow2 image, while a user of the disk records changes.
//!
//! The enabled bitmaps are marked as in use before the first write, as QEMU does it. After a kill
//! of this process, the next user of the image therefore does not take them for valid. At
//! deactivation the recorded bitmaps replace them: bits, tables and directory go to free clusters.
//! When all of that is durable, a single write of the header's first sector switches to it.

use super::activate::miss_writes;
use super::active::Layer;
use super::alloc::Run;
use super::disk::ImageDisk;
use super::io::{BlockingIo, Buf, Errno, Io};
use super::layout::Layout;
use super::problem::told;
use super::storage::Storage;
use super::tables::{Tables, Unlinked};
use crate::offline::bitmap::{Bits, MAX_BITS, is_believed};
use crate::offline::edit::switch;
use crate::offline::info::read_bitmaps;
use crate::qcow2::bitmap::{Bitmap, FLAG_AUTO, MAX_BITMAPS, MAX_DIRECTORY_BYTES, TableEntry};
use crate::qcow2::first_cluster;
use crate::qcow2::{self, BitmapsExtension, Extension, Header};
use crate::{Error, HostOffset, Result};
use fathom_core::DiskError;
use std::io;
use std::sync::atomic::Ordering;

/// An enabled bitmap of an image, or one to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnBitmap {
    /// Name of the bitmap in the image.
    pub name: String,
    /// Bytes of the disk per bit.
    pub granularity: u64,
    /// Bits from the lowest one of the first word on; bits beyond the disk's end have no meaning.
    /// `None`: unknown, so all blocks count as dirty.
    pub words: Option<Vec<u64>>,
}

/// Number of bits of a word.
const BITS: u64 = u64::BITS as u64;

impl ImageDisk {
    /// Returns whether the image can contain bitmaps.
    pub fn can_have_bitmaps(&self) -> bool {
        self.chain.can_have_bitmaps
    }

    /// Returns whether the last activation restored changes that a killed server had in memory.
    pub fn has_restored(&self) -> bool {
        self.has_restored.load(Ordering::Relaxed)
    }

    /// Takes the enabled bitmaps over from the image, and returns the names of all others.
    ///
    /// The disk has just been activated with [`OwnBitmaps::Recorded`](super::OwnBitmaps::Recorded),
    /// and nothing was written yet. `is_wanted` is called for each enabled bitmap with its name and
    /// granularity. `take` receives each wanted one with its bits, and returns whether it keeps it.
    ///
    /// The bitmaps taken are marked as in use, and are lost to the next user of the image unless
    /// they are [stored](Self::deactivate_with) again. The others stay in the image; the enabled
    /// ones miss writes from now on.
    pub fn take_bitmaps(
        &self,
        is_wanted: &mut dyn FnMut(&str, u64) -> bool,
        take: &mut dyn FnMut(OwnBitmap) -> bool,
    ) -> std::result::Result<Vec<Vec<u8>>, DiskError> {
        let file = &self.chain.storages[0];
        let has_more = self.has_restored();
        let mut take = |own: OwnBitmap| {
            take(OwnBitmap {
                // The bitmaps miss the changes that were just restored.
                words: own.words.filter(|_| !has_more),
                ..own
            })
        };
        let (taken, others) = taken(&**file, is_wanted, &mut take).map_err(told(file.path()))?;
        *self.taken.lock() = taken;
        Ok(others)
    }

    /// Deactivates the disk and stores these bitmaps in the image, with those that were not taken.
    ///
    /// Returns the names of the bitmaps that were stored, even if another step has failed.
    pub fn deactivate_with(
        &self,
        bitmaps: &mut dyn Iterator<Item = OwnBitmap>,
    ) -> (std::result::Result<(), DiskError>, Vec<String>) {
        let mut there = Vec::new();
        let ended = self.end(&mut |layers| match self.leave(layers, bitmaps) {
            Ok(left) => there = left,
            Err(problem) => {
                let path = self.path().display();
                tracing::error!("{path}: its bitmaps stay in files next to it: {problem}");
            }
        });
        (ended, there)
    }

    fn leave(
        &self,
        layers: &[Layer],
        bitmaps: &mut dyn Iterator<Item = OwnBitmap>,
    ) -> Result<Vec<String>> {
        let taken = self.taken.lock();
        let mut bitmaps = bitmaps.peekable();
        if taken.is_empty() && bitmaps.peek().is_none() || !self.can_have_bitmaps() {
            return Ok(Vec::new());
        }
        let Some(Layer::Tables(tables)) = layers.first() else {
            return Err(Error::unsupported("its format has no bitmaps"));
        };
        let io = BlockingIo(&self.chain.storages);
        let leaving = Leaving {
            tables,
            io: &io,
            runs: Vec::new(),
        };
        leaving.leave(&taken, &mut bitmaps)
    }
}

/// Passes the enabled bitmaps to `take`; returns the names of those taken, and of all others.
fn taken(
    file: &dyn Storage,
    is_wanted: &mut dyn FnMut(&str, u64) -> bool,
    take: &mut dyn FnMut(OwnBitmap) -> bool,
) -> Result<(Vec<String>, Vec<Vec<u8>>)> {
    let mut header = Header::parse(&first_cluster(file.bytes())?)?;
    let (mut taken, mut others) = (Vec::new(), Vec::new());
    // (Problems of the bitmaps are reported below.)
    for bitmap in read_bitmaps(file.bytes(), &header).unwrap_or_default() {
        let (name, granularity) = (String::from_utf8(bitmap.name.clone()), bitmap.granularity());
        let is_enabled = bitmap.is_plainly_enabled();
        let Some(name) = name
            .ok()
            .filter(|name| is_enabled && is_wanted(name, granularity))
        else {
            others.push(bitmap.name);
            continue;
        };
        let words = match is_believed(&bitmap) {
            true => words(file, &header, &bitmap),
            false => None,
        };
        let own = OwnBitmap {
            name: name.clone(),
            granularity,
            words,
        };
        match take(own) {
            true => taken.push(name),
            false => others.push(bitmap.name),
        }
    }
    if !miss_writes(file, &mut header, taken.len()) {
        let autoclear = header.autoclear.to_be_bytes();
        let written = file.bytes().write_at(&autoclear, qcow2::AUTOCLEAR_AT);
        let written = written.and_then(|()| file.bytes().sync());
        written.map_err(Error::io("cannot write its header"))?;
    }
    Ok((taken, others))
}

/// Returns a bitmap's words; `None` if they cannot be read.
fn words(file: &dyn Storage, header: &Header, bitmap: &Bitmap) -> Option<Vec<u64>> {
    let words = Bits::read(file.bytes(), header, bitmap).and_then(|bits| bits.words());
    let path = file.path().display();
    let tell = |problem: &Error| tracing::warn!("{path}: all blocks count as dirty: {problem}");
    words.inspect_err(tell).ok()
}

/// Stores bitmaps in an image that is being deactivated.
struct Leaving<'a> {
    tables: &'a Tables,
    io: &'a BlockingIo<'a>,
    /// Clusters that were allocated for the bitmaps.
    runs: Vec<Run>,
}

impl Leaving<'_> {
    /// Replaces the bitmaps in `taken` by `bitmaps`. After an error the image is unchanged.
    fn leave(
        mut self,
        taken: &[String],
        bitmaps: &mut dyn Iterator<Item = OwnBitmap>,
    ) -> Result<Vec<String>> {
        let left = self.replace(taken, bitmaps);
        // (Unless the header on disk may refer to them.)
        if left.is_err() && self.tables.state().header.is_none() {
            self.runs.iter().for_each(|run| self.tables.give_back(run));
        }
        left
    }

    fn replace(
        &mut self,
        taken: &[String],
        bitmaps: &mut dyn Iterator<Item = OwnBitmap>,
    ) -> Result<Vec<String>> {
        let file = self.tables.file.bytes();
        let first = first_cluster(file)?;
        let old = Header::parse(&first)?;
        if old.version < 3 {
            return Err(Error::unsupported("an image of version 2 has no bitmaps"));
        }
        let (gone, others): (Vec<_>, Vec<_>) = { read_bitmaps(file, &old)?.into_iter() }
            .partition(|bitmap| taken.iter().any(|name| name.as_bytes() == bitmap.name));
        let (mut all, mut left) = (Vec::new(), Vec::new());
        for bitmap in bitmaps {
            let name = bitmap.name.clone();
            let is_there = others.iter().any(|other| other.name == name.as_bytes());
            if is_there || self.bits_of(&bitmap) > MAX_BITS {
                let path = self.tables.file.path().display();
                tracing::error!(
                    "{path}: bitmap '{name}' stays in a file next to it, because the image has \
                     no space for it"
                );
                continue;
            }
            all.push(self.write(bitmap)?);
            left.push(name);
        }
        // (The others come last, so that the next activation takes the same ones.)
        all.extend(others);
        let extension = self.write_directory(&all)?;
        let mut new = old.clone();
        let is_other = |e: &Extension| !matches!(e, Extension::Bitmaps(_));
        new.extensions.retain(is_other);
        new.autoclear &= !qcow2::AUTOCLEAR_BITMAPS;
        if let Some(extension) = extension {
            new.extensions.push(Extension::Bitmaps(extension));
            new.autoclear |= qcow2::AUTOCLEAR_BITMAPS;
        }
        let switch = switch(&first, &old, &new)?;
        Header::parse(&switch.applied_to(&first))?;
        if let Some((at, bytes)) = &switch.before {
            let written = file.write_at(bytes, *at);
            written.map_err(Error::io("cannot write its header"))?;
        }
        let switched = self.tables.switch_header(self.io, &switch.sector);
        done(switched)?;
        self.forget(&old, &gone)?;
        Ok(left)
    }

    fn bits_of(&self, bitmap: &OwnBitmap) -> u64 {
        (self.tables.size() & !511).div_ceil(bitmap.granularity)
    }

    /// Writes a bitmap's bits and table, and returns its directory entry.
    fn write(&mut self, bitmap: OwnBitmap) -> Result<Bitmap> {
        let bits = self.bits_of(&bitmap);
        let cluster = self.tables.layout.cluster_size();
        let per_cluster = cluster * 8;
        let mut table = Vec::new();
        for at in (0..bits).step_by(per_cluster as usize) {
            let of = at..bits.min(at + per_cluster);
            let entry = match &bitmap.words {
                None => TableEntry::ALL_ONES,
                Some(words) => self.write_bits(words, of)?,
            };
            table.extend(entry.0.to_be_bytes());
        }
        let table_entries = table.len() / 8;
        Ok(Bitmap {
            table_offset: self.write_new(table)?,
            table_entries: table_entries as u32,
            flags: FLAG_AUTO,
            granularity_bits: bitmap.granularity.ilog2() as u8,
            name: bitmap.name.into_bytes(),
            extra: Vec::new(),
        })
    }

    /// Writes these bits, which fill one cluster; bits without a word count as dirty.
    fn write_bits(&mut self, words: &[u64], bits: std::ops::Range<u64>) -> Result<TableEntry> {
        let mut bytes = Vec::new();
        let (mut ones, mut zeroes) = (true, true);
        for at in (bits.start..bits.end).step_by(BITS as usize) {
            let there = (bits.end - at).min(BITS);
            let mask = u64::MAX >> (BITS - there);
            let word = words.get((at / BITS) as usize).unwrap_or(&u64::MAX) & mask;
            ones &= word == mask;
            zeroes &= word == 0;
            bytes.extend(word.to_le_bytes());
        }
        match (zeroes, ones) {
            (true, _) => Ok(TableEntry(0)),
            (_, true) => Ok(TableEntry::ALL_ONES),
            _ => Ok(TableEntry(self.write_new(bytes)?.0)),
        }
    }

    fn write_directory(&mut self, all: &[Bitmap]) -> Result<Option<BitmapsExtension>> {
        if all.is_empty() {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        all.iter().for_each(|bitmap| bitmap.encode(&mut bytes));
        let directory_size = bytes.len() as u64;
        if directory_size > MAX_DIRECTORY_BYTES || all.len() as u64 > u64::from(MAX_BITMAPS) {
            return Err(Error::unsupported("too many bitmaps"));
        }
        Ok(Some(BitmapsExtension {
            count: all.len() as u32,
            reserved: 0,
            directory_size,
            directory_offset: self.write_new(bytes)?,
        }))
    }

    /// Writes these bytes to adjacent new clusters and returns their offset.
    fn write_new(&mut self, mut bytes: Vec<u8>) -> Result<HostOffset> {
        let layout = &self.tables.layout;
        let whole = (bytes.len() as u64).next_multiple_of(layout.cluster_size());
        bytes.resize(whole as usize, 0);
        let clusters = whole >> layout.cluster_bits();
        if let Layout::Qcow2(g) = layout
            && clusters >= g.refcount_block_entries()
        {
            return Err(Error::unsupported(format!(
                "a table of its bitmaps would have {clusters} clusters in a row, too many while \
                 the disk is served"
            )));
        }
        let run = done(self.tables.allocate(self.io, clusters, true))?;
        let place = run.start(layout.cluster_bits());
        self.runs.push(run);
        let mut buf = Buf::new(bytes.len());
        buf.bytes_mut().copy_from_slice(&bytes);
        done(self.io.write(self.tables.storage, place, buf))?;
        Ok(place)
    }

    /// Releases the old directory and these bitmaps, which nothing on disk refers to any more.
    fn forget(&self, old: &Header, gone: &[Bitmap]) -> Result<()> {
        let (g, file) = (old.geometry(), self.tables.file.bytes());
        let mut unlinked = Vec::new();
        for bitmap in gone {
            let len = u64::from(bitmap.table_entries) * 8;
            // (An invalid bitmap is left alone; a check reports the clusters leaked by that.)
            if !bitmap.has_bits_of_a_size(&g) {
                continue;
            }
            unlinked.push(Unlinked::new(bitmap.table_offset, len));
            for entry in crate::offline::bitmap::read_table(file, &g, bitmap).unwrap_or_default() {
                if let Ok(Some(place)) = entry.cluster(&g) {
                    unlinked.push(Unlinked::new(place, g.cluster_size()));
                }
            }
        }
        let mut state = self.tables.state();
        if let Some(directory) = old.bitmaps() {
            let (at, len) = (directory.directory_offset, directory.directory_size);
            state.alloc.metadata.remove_bytes(at, len);
            unlinked.push(Unlinked::new(at, len));
        }
        state.unlinked.extend(unlinked);
        self.tables.set_dirty(&mut state);
        Ok(())
    }
}

/// Returns the result of work that need not wait, since the image has no other user.
fn done<T>(work: impl Future<Output = std::result::Result<T, Errno>>) -> Result<T> {
    let done = super::disk::at_once(work).unwrap_or(Err(libc::EBUSY));
    done.map_err(|errno| Error::io("cannot write the image")(io::Error::from_raw_os_error(errno)))
}
