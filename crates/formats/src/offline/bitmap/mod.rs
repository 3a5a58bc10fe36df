//! `fathom img bitmap`: the persistent bitmaps of a qcow2 image, which say what of its disk has
//! been written since some moment.
//!
//! All changes of one [`Bitmaps`] are one [`Editor::commit`]: see there for what a power cut
//! leaves. The directory and the tables go to free clusters, and the header's first sector
//! switches to the new directory together with the flag that it can be believed.

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

/// Bits of one bitmap that QEMU takes.
pub(crate) const MAX_BITS: u64 = MAX_BITS_BYTES * 8;
/// Entries of tables that are in memory at once: 256 MiB.
const MAX_TABLE_ENTRIES: u64 = 32 << 20;
/// Bytes of a name.
const MAX_NAME: usize = 1023;

/// What is done to one bitmap.
#[derive(Clone, Copy)]
pub enum Change<'a> {
    /// It comes into being, empty and enabled. Bytes that each bit stands for: by default those of
    /// a cluster, but 4 KiB to 64 KiB.
    Add(Option<u64>),
    /// It goes.
    Remove,
    /// Nothing is dirty any more.
    Clear,
    /// Writes are recorded from now on.
    Enable,
    /// Writes are not recorded any more.
    Disable,
    /// What is dirty in another bitmap of the image is dirty in this one, too.
    Merge(&'a str),
    /// Likewise for a bitmap of another image, whose disk has the same size.
    MergeFrom(&'a Bits<'a>),
}

/// The bitmaps of an image that nobody uses, to be changed. Dropped without a commit, the image is
/// as it was.
pub struct Bitmaps<'a> {
    editor: Editor<'a>,
    bitmaps: Vec<Held>,
}

/// One bitmap as it will be.
struct Held {
    bitmap: Bitmap,
    /// Its table, once it is not the one on disk any more: that has been released.
    table: Option<Vec<TableEntry>>,
}

impl From<Bitmap> for Held {
    fn from(bitmap: Bitmap) -> Held {
        let table = None;
        Held { bitmap, table }
    }
}

impl<'a> Bitmaps<'a> {
    /// Those that can be believed: what is left of others goes with the commit.
    pub fn open(file: &'a dyn ImageFile) -> Result<Bitmaps<'a>> {
        Bitmaps::of(Editor::open(file)?)
    }

    /// Does one change, in memory and in free clusters.
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

    /// Bytes of the disk.
    fn disk_size(&self) -> u64 {
        self.editor.header().size & !511
    }

    fn find(&self, name: &[u8]) -> Option<usize> {
        self.bitmaps.iter().position(|b| b.bitmap.name == name)
    }

    /// Any bitmap of that name.
    fn index(&self, name: &str) -> Result<usize> {
        let found = self.find(name.as_bytes());
        found.ok_or_else(|| {
            Error::usage(format!(
                "no bitmap '{name}'; --list lists the image's bitmaps"
            ))
        })
    }

    /// A bitmap that may be looked at and changed.
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

    /// A bitmap's bits as they will be.
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

    /// Refuses to keep so many more entries of tables in memory.
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

    /// Its table, which it has not any more; the one on disk is released.
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

    /// The bits that an entry refers to are not referred to any more.
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

/// Whether a bitmap is to know of what is written, and can.
fn records(bitmap: &Bitmap) -> bool {
    bitmap.flags & FLAG_AUTO != 0 && is_believed(bitmap)
}

/// Whether what it says is right, and may be looked at.
pub(crate) fn is_believed(bitmap: &Bitmap) -> bool {
    check_usable(bitmap).is_ok()
}

/// Nobody knows what is dirty in a bitmap that was not saved well, or what extra data means.
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
