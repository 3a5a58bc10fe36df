//! `fathom img bitmap`: persistent bitmaps of a qcow2 image, which record the parts of its disk
//! that have been written since some point in time.
//!
//! All changes of one [`Bitmaps`] are one [`Editor::commit`], which describes the result of a power
//! cut. The directory and the tables are written to free clusters. The header's first sector then
//! switches to the new directory and sets the autoclear bit that marks bitmaps as consistent.

mod bits;
mod copy;
mod list;
mod merge;
mod resize;
mod unrecorded;

pub use bits::Bits;
pub(crate) use bits::{check_tables, read_table};
pub use copy::{Broken, copy};
pub use list::{Listed, list, list_some};
pub(crate) use unrecorded::mark_unrecorded;

use crate::offline::edit::Editor;
use crate::qcow2::bitmap::{
    Bitmap, FLAG_AUTO, FLAG_EXTRA_DATA_COMPATIBLE, FLAG_IN_USE, MAX_BITMAPS, MAX_BITS_BYTES,
    MAX_DIRECTORY_BYTES, TableEntry,
};
use crate::qcow2::{AUTOCLEAR_BITMAPS, BitmapsExtension, Extension};
use crate::{Error, HostOffset, Result};
use bits::printable;
use fathom_files::ImageFile;

/// Maximum number of bits of one bitmap that QEMU accepts.
pub(crate) const MAX_BITS: u64 = MAX_BITS_BYTES * 8;
/// Maximum number of table entries in memory at once, which take 256 MiB.
const MAX_TABLE_ENTRIES: u64 = 32 << 20;
/// Maximum length of a bitmap's name in bytes.
const MAX_NAME: usize = 1023;

/// A change of one bitmap.
#[derive(Clone, Copy)]
pub enum Change<'a> {
    /// Adds an empty, enabled bitmap. The value is the granularity in bytes. The default is the
    /// cluster size, but at least 4 KiB and at most 64 KiB.
    Add(Option<u64>),
    /// Removes the bitmap.
    Remove,
    /// Marks everything as clean.
    Clear,
    /// Enables the bitmap, which then records writes.
    Enable,
    /// Disables the bitmap, which then records no writes.
    Disable,
    /// Merges another bitmap of the image into this one.
    Merge(&'a str),
    /// Merges a bitmap of another image, whose disk has the same size, into this one.
    MergeFrom(&'a Bits<'a>),
}

/// The bitmaps of an image that is not in use, for changes. If dropped without a commit, the image
/// is unchanged.
pub struct Bitmaps<'a> {
    editor: Editor<'a>,
    bitmaps: Vec<Held>,
}

/// A bitmap as it will be after the commit.
struct Held {
    bitmap: Bitmap,
    /// The bitmap's table, once it differs from the one on disk, which has been released then.
    table: Option<Vec<TableEntry>>,
}

impl From<Bitmap> for Held {
    fn from(bitmap: Bitmap) -> Held {
        let table = None;
        Held { bitmap, table }
    }
}

impl<'a> Bitmaps<'a> {
    /// Opens the bitmaps of an image if its header marks them as consistent. If not, the commit
    /// drops the bitmaps extension.
    pub fn open(file: &'a dyn ImageFile) -> Result<Bitmaps<'a>> {
        Bitmaps::of(Editor::open(file)?)
    }

    /// Makes one change, in memory and in free clusters.
    pub fn change(&mut self, name: &str, change: Change) -> Result<()> {
        match change {
            Change::Add(granularity) => self.add(name.as_bytes(), granularity),
            Change::Remove => self.remove(name),
            Change::Clear => self.clear(name),
            Change::Enable => self.set_enabled(name, true),
            Change::Disable => self.set_enabled(name, false),
            Change::Merge(source) => {
                let source = self.bits(self.usable(source)?)?;
                self.merge(name, &source)
            }
            Change::MergeFrom(source) => self.merge(name, source),
        }
    }

    /// Makes all changes durable at once.
    pub fn commit(mut self) -> Result<()> {
        self.store_tables()?;
        let old = self.editor.header().bitmaps().copied();
        let extension = self.store_directory()?;
        if let Some(old) = old {
            self.editor
                .release(old.directory_offset, old.directory_size)?;
        }
        let header = self.editor.header_mut();
        let is_other = |e: &Extension| !matches!(e, Extension::Bitmaps(_));
        header.extensions.retain(is_other);
        header.autoclear &= !AUTOCLEAR_BITMAPS;
        if let Some(extension) = extension {
            header.extensions.push(Extension::Bitmaps(extension));
            header.autoclear |= AUTOCLEAR_BITMAPS;
        }
        self.editor.commit()
    }

    /// Size of the disk in bytes.
    fn disk_size(&self) -> u64 {
        self.editor.header().size & !511
    }

    fn find(&self, name: &[u8]) -> Option<usize> {
        self.bitmaps.iter().position(|b| b.bitmap.name == name)
    }

    /// Returns the index of the bitmap with that name, usable or not.
    fn index(&self, name: &str) -> Result<usize> {
        let found = self.find(name.as_bytes());
        found.ok_or_else(|| {
            Error::usage(format!(
                "no bitmap '{name}'; --list lists the image's bitmaps"
            ))
        })
    }

    /// Returns the index of a bitmap that may be read and changed.
    fn usable(&self, name: &str) -> Result<usize> {
        let index = self.index(name)?;
        check_usable(&self.bitmaps[index].bitmap)?;
        Ok(index)
    }

    fn add(&mut self, name: &[u8], granularity: Option<u64>) -> Result<()> {
        let g = self.editor.geometry();
        if g.version < 3 {
            return Err(Error::unsupported(
                "an image of version 2 (compat=0.10) has no bitmaps; convert it with 'fathom img \
                 amend -o compat=1.1'",
            ));
        }
        if name.is_empty() || name.len() > MAX_NAME || name.contains(&0) {
            return Err(Error::usage(
                "a bitmap's name has 1 to 1023 bytes, none of them 0",
            ));
        }
        if self.find(name).is_some() {
            let name = printable(name);
            return Err(Error::usage(format!(
                "a bitmap named '{name}' already exists"
            )));
        }
        if self.bitmaps.len() as u64 >= u64::from(MAX_BITMAPS) {
            return Err(Error::unsupported(format!(
                "the image has {MAX_BITMAPS} bitmaps, which is the limit"
            )));
        }
        let granularity = granularity.unwrap_or(g.cluster_size().clamp(4096, 65536));
        if !granularity.is_power_of_two() || !(512..=1 << 31).contains(&granularity) {
            return Err(Error::usage(format!(
                "granularity {granularity}: not a power of two from 512 to 2G"
            )));
        }
        let mut bitmap = Bitmap {
            table_offset: HostOffset(0),
            table_entries: 0,
            flags: FLAG_AUTO,
            granularity_bits: granularity.ilog2() as u8,
            name: name.to_vec(),
            extra: Vec::new(),
        };
        let size = self.disk_size();
        if size == 0 || size.div_ceil(granularity) > MAX_BITS {
            return Err(Error::usage(format!(
                "granularity {granularity}: a bitmap of a disk of {size} bytes would not have 1 \
                 to {MAX_BITS} bits"
            )));
        }
        let entries = g.clusters_of(bitmap.bytes_for(size));
        self.check_memory(entries)?;
        bitmap.table_entries = entries as u32;
        self.bitmaps.push(Held {
            bitmap,
            table: Some(vec![TableEntry(0); entries as usize]),
        });
        Ok(())
    }

    fn remove(&mut self, name: &str) -> Result<()> {
        let index = self.index(name)?;
        for entry in self.take_table(index)? {
            self.release(entry)?;
        }
        self.bitmaps.remove(index);
        Ok(())
    }

    fn clear(&mut self, name: &str) -> Result<()> {
        let index = self.usable(name)?;
        let mut table = self.take_table(index)?;
        for entry in &mut table {
            self.release(*entry)?;
            *entry = TableEntry(0);
        }
        self.bitmaps[index].table = Some(table);
        Ok(())
    }

    fn set_enabled(&mut self, name: &str, enabled: bool) -> Result<()> {
        let index = self.usable(name)?;
        let flags = &mut self.bitmaps[index].bitmap.flags;
        *flags = match enabled {
            true => *flags | FLAG_AUTO,
            false => *flags & !FLAG_AUTO,
        };
        Ok(())
    }

    /// Returns a bitmap's bits, including the pending changes.
    fn bits(&self, index: usize) -> Result<Bits<'a>> {
        let (file, header, held) = (
            self.editor.file(),
            self.editor.header(),
            &self.bitmaps[index],
        );
        match &held.table {
            Some(table) => Ok(Bits::new(file, header, &held.bitmap, table.clone())),
            None => Bits::read(file, header, &held.bitmap),
        }
    }

    /// Fails if `entries` more table entries in memory would exceed the limit.
    fn check_memory(&self, entries: u64) -> Result<()> {
        let tables = self.bitmaps.iter().filter_map(|held| held.table.as_ref());
        let kept: usize = tables.map(Vec::len).sum();
        match kept as u64 + entries <= MAX_TABLE_ENTRIES {
            true => Ok(()),
            false => Err(Error::unsupported(format!(
                "the tables of its bitmaps would exceed {} MiB of memory; remove bitmaps first",
                (MAX_TABLE_ENTRIES * 8) >> 20
            ))),
        }
    }

    /// Removes and returns a bitmap's table. If the table is still the one on disk, it is read and
    /// its clusters are released.
    fn take_table(&mut self, index: usize) -> Result<Vec<TableEntry>> {
        if let Some(table) = self.bitmaps[index].table.take() {
            return Ok(table);
        }
        let (g, bitmap) = (self.editor.geometry(), &self.bitmaps[index].bitmap);
        self.check_memory(u64::from(bitmap.table_entries))?;
        let table = bits::read_table(self.editor.file(), &g, bitmap)?;
        let (offset, len) = (bitmap.table_offset, u64::from(bitmap.table_entries) * 8);
        self.editor.release(offset, len)?;
        Ok(table)
    }

    /// Removes the reference to the cluster of bits that an entry refers to.
    fn release(&mut self, entry: TableEntry) -> Result<()> {
        let g = self.editor.geometry();
        let place = entry.cluster(&g);
        match place.map_err(|e| Error::invalid(format!("bitmap table: {e}")))? {
            Some(place) => self.editor.release(place, g.cluster_size()),
            None => Ok(()),
        }
    }

    fn store_tables(&mut self) -> Result<()> {
        let g = self.editor.geometry();
        for held in &mut self.bitmaps {
            let Some(table) = &held.table else {
                continue;
            };
            let words = table.iter().flat_map(|entry| entry.0.to_be_bytes());
            let mut bytes: Vec<u8> = words.collect();
            bytes.resize(bytes.len().next_multiple_of(g.cluster_size() as usize), 0);
            let place = self.editor.allocate(g.clusters_of(bytes.len() as u64))?;
            self.editor.write(place, &bytes)?;
            held.bitmap.table_offset = place;
        }
        Ok(())
    }

    fn store_directory(&mut self) -> Result<Option<BitmapsExtension>> {
        if self.bitmaps.is_empty() {
            return Ok(None);
        }
        let g = self.editor.geometry();
        let mut bytes = Vec::new();
        self.bitmaps
            .iter()
            .for_each(|held| held.bitmap.encode(&mut bytes));
        let directory_size = bytes.len() as u64;
        if directory_size > MAX_DIRECTORY_BYTES {
            return Err(Error::unsupported(
                "the names of its bitmaps would exceed the space for them",
            ));
        }
        bytes.resize(bytes.len().next_multiple_of(g.cluster_size() as usize), 0);
        let directory_offset = self.editor.allocate(g.clusters_of(directory_size))?;
        self.editor.write(directory_offset, &bytes)?;
        Ok(Some(BitmapsExtension {
            count: self.bitmaps.len() as u32,
            reserved: 0,
            directory_size,
            directory_offset,
        }))
    }
}

/// Whether a bitmap is enabled and can record writes.
fn records(bitmap: &Bitmap) -> bool {
    bitmap.flags & FLAG_AUTO != 0 && is_believed(bitmap)
}

/// Whether a bitmap's contents are valid and may be read.
pub(crate) fn is_believed(bitmap: &Bitmap) -> bool {
    check_usable(bitmap).is_ok()
}

/// Fails for a bitmap that was not closed cleanly, and for one with unknown extra data that is not
/// marked compatible.
fn check_usable(bitmap: &Bitmap) -> Result<()> {
    let name = printable(&bitmap.name);
    if bitmap.flags & FLAG_IN_USE != 0 {
        return Err(Error::invalid(format!(
            "bitmap '{name}': not closed cleanly, so it misses writes, and can only be removed \
             ('fathom img bitmap --remove')"
        )));
    }
    if !bitmap.extra.is_empty() && bitmap.flags & FLAG_EXTRA_DATA_COMPATIBLE == 0 {
        return Err(Error::unsupported(format!(
            "bitmap '{name}': has unknown extra data, so it can only be removed ('fathom img \
             bitmap --remove')"
        )));
    }
    Ok(())
}
