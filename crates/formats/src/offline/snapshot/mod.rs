//! `fathom img snapshot`: internal snapshots of a qcow2 image.
//!
//! Each change is one [`Editor::commit`], which describes the result of a power cut.

use crate::offline::SnapshotName;
use crate::offline::edit::{Editor, Mapping};
use crate::offline::info::{read_snapshots, snapshot_table_bytes};
use crate::qcow2::first_cluster;
use crate::qcow2::snapshot::{NO_ICOUNT, Snapshot};
use crate::qcow2::{Header, L1Entry, MAX_L1_BYTES, MAX_SNAPSHOT_TABLE_BYTES, MAX_SNAPSHOTS};
use crate::{Error, HostOffset, Image, Result};
use fathom_files::ImageFile;
use std::time::{SystemTime, UNIX_EPOCH};

/// Maximum length of a snapshot's name in bytes that QEMU shows and finds in full.
const MAX_NAME: usize = 255;

/// Lists all snapshots in the order of the snapshot table.
pub fn list(file: &dyn ImageFile) -> Result<Vec<Snapshot>> {
    read_snapshots(file, &Header::parse(&first_cluster(file)?)?)
}

/// Returns the current time for [`create`]: seconds since the epoch, limited to 32 bits, and
/// nanoseconds.
pub fn now() -> (u32, u32) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default();
    let seconds = u32::try_from(now.as_secs()).unwrap_or(u32::MAX);
    (seconds, now.subsec_nanos())
}

/// Takes a snapshot of the disk. `date` is the current time, in seconds since the epoch and
/// nanoseconds.
pub fn create(file: &dyn ImageFile, name: &str, date: (u32, u32)) -> Result<Snapshot> {
    if name.len() > MAX_NAME || name.contains('\0') {
        let problem = "a snapshot's name has at most 255 bytes, none of them 0";
        return Err(Error::usage(problem));
    }
    let mut editor = Editor::open(file)?;
    let header = editor.header();
    if header.snapshots >= MAX_SNAPSHOTS {
        return Err(Error::unsupported(format!(
            "the image has {MAX_SNAPSHOTS} snapshots, which is the limit"
        )));
    }
    if editor.geometry().data_file {
        return Err(Error::unsupported(
            "an image with an external data file cannot have snapshots",
        ));
    }
    let mut snapshots = read_snapshots(file, header)?;
    let (l1_entries, size) = (header.l1_entries, header.size & !511);
    let mut mapping = Mapping::active(&editor)?;
    mapping.reference(&mut editor).map_err(too_often)?;
    mapping.set_flags(&mut editor, 2)?;
    let l1_offset = mapping.store(&mut editor)?;
    mapping.store_active(&mut editor)?;
    let snapshot = Snapshot {
        l1_offset,
        l1_entries,
        id: new_id(&snapshots),
        name: name.into(),
        date,
        vm_clock: 0,
        vm_state_size_32: 0,
        extra: [0, size, NO_ICOUNT].map(u64::to_be_bytes).concat(),
    };
    snapshots.push(snapshot.clone());
    store_table(&mut editor, &snapshots)?;
    editor.commit()?;
    Ok(snapshot)
}

/// Adds advice to the error of a refcount that would overflow. With refcounts of one bit, an image
/// cannot have any snapshots.
fn too_often(error: Error) -> Error {
    match error {
        Error::Unsupported(problem) => Error::Unsupported(format!(
            "no more snapshots are possible: {problem}; delete one, or convert the image with a \
             larger refcount_bits"
        )),
        other => other,
    }
}

/// Reverts the disk to a snapshot, which is kept. Data written to the disk since is lost, except
/// where other snapshots hold it.
pub fn apply(file: &dyn ImageFile, which: &str) -> Result<Snapshot> {
    let mut editor = Editor::open(file)?;
    let snapshots = read_snapshots(file, editor.header())?;
    let snapshot = snapshots[find(&snapshots, which, Prefer::Id)?].clone();
    if editor.header().bitmaps().is_some() {
        return Err(Error::unsupported(
            "it has bitmaps, which would miss what a snapshot changes; remove them first",
        ));
    }
    let size = size_of(&snapshot, &editor)?;
    let mut mapping = Mapping::read(&editor, snapshot.l1_offset, snapshot.l1_entries)?;
    // In this order, no refcount is temporarily larger than its final value.
    Mapping::active(&editor)?.release(&mut editor)?;
    mapping.reference(&mut editor)?;
    mapping.grow(editor.geometry().l1_entries_for(size));
    mapping.set_flags(&mut editor, 1)?;
    mapping.store_active(&mut editor)?;
    if size != editor.header().size & !511 {
        editor.header_mut().size = size;
    }
    editor.commit()?;
    Ok(snapshot)
}

/// Returns the size in bytes that the disk had when the snapshot was taken.
fn size_of(snapshot: &Snapshot, editor: &Editor) -> Result<u64> {
    let (header, now) = (editor.header(), editor.header().size & !511);
    let size = snapshot.disk_size().unwrap_or(now);
    let l1_bytes = editor.geometry().l1_entries_for(size) * L1Entry::SIZE;
    if !size.is_multiple_of(512) || l1_bytes > MAX_L1_BYTES {
        return Err(Error::invalid(format!(
            "the snapshot's disk has {size} bytes, which the image cannot have"
        )));
    }
    if size != now && header.version < 3 {
        return Err(Error::unsupported(format!(
            "the snapshot's disk has {size} bytes, and an image of version 2 that has snapshots \
             cannot be resized"
        )));
    }
    Ok(size)
}

/// Deletes a snapshot and frees the clusters that only this snapshot uses.
pub fn delete(file: &dyn ImageFile, which: &str) -> Result<Snapshot> {
    let mut editor = Editor::open(file)?;
    let mut snapshots = read_snapshots(file, editor.header())?;
    let snapshot = snapshots.remove(find(&snapshots, which, Prefer::Name)?);
    let mapping = Mapping::read(&editor, snapshot.l1_offset, snapshot.l1_entries)?;
    mapping.release(&mut editor)?;
    let l1_bytes = u64::from(snapshot.l1_entries) * L1Entry::SIZE;
    editor.release(snapshot.l1_offset, l1_bytes)?;
    let mut active = Mapping::active(&editor)?;
    active.set_flags(&mut editor, 1)?;
    active.store_active(&mut editor)?;
    store_table(&mut editor, &snapshots)?;
    editor.commit()?;
    Ok(snapshot)
}

/// Which snapshot is meant by a word that is the ID of one and the name of another.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Prefer {
    Id,
    Name,
}

/// Finds a snapshot by ID or name. If several snapshots have the name, the first one is found.
fn find(snapshots: &[Snapshot], which: &str, prefer: Prefer) -> Result<usize> {
    let by_id = || snapshots.iter().position(|s| s.id == which.as_bytes());
    let by_name = || snapshots.iter().position(|s| s.name == which.as_bytes());
    let found = match prefer {
        Prefer::Id => by_id().or_else(by_name),
        Prefer::Name => by_name().or_else(by_id),
    };
    found.ok_or_else(|| {
        Error::usage(format!(
            "no snapshot '{which}'; --list lists the image's snapshots"
        ))
    })
}

/// Returns the greatest numeric ID plus one.
fn new_id(snapshots: &[Snapshot]) -> Vec<u8> {
    let number = |s: &Snapshot| {
        let digits = s.id.iter().take_while(|b| b.is_ascii_digit());
        digits.fold(0u64, |n, digit| {
            n.saturating_mul(10).saturating_add(u64::from(digit - b'0'))
        })
    };
    let greatest = snapshots.iter().map(number).max().unwrap_or(0);
    greatest.saturating_add(1).to_string().into_bytes()
}

/// Writes the snapshot table to a new place and releases the old one.
pub(super) fn store_table(editor: &mut Editor, snapshots: &[Snapshot]) -> Result<()> {
    let (file, header) = (editor.file(), editor.header());
    let (old, old_len) = (
        header.snapshots_offset,
        snapshot_table_bytes(&read_snapshots(file, header)?),
    );
    let mut bytes = Vec::new();
    for snapshot in snapshots {
        snapshot.encode(&mut bytes);
    }
    if bytes.len() as u64 > MAX_SNAPSHOT_TABLE_BYTES {
        let problem = "its snapshot table would exceed 64 MiB; delete a snapshot first";
        return Err(Error::unsupported(problem));
    }
    let mut place = HostOffset(0);
    if !bytes.is_empty() {
        place = editor.allocate(editor.geometry().clusters_of(bytes.len() as u64))?;
        editor.write(place, &bytes)?;
    }
    editor.release(old, old_len)?;
    let header = editor.header_mut();
    (header.snapshots, header.snapshots_offset) = (snapshots.len() as u32, place);
    Ok(())
}

impl Image {
    /// Returns the header of the image as it was when this internal snapshot was taken.
    pub fn at_snapshot(self, file: &dyn ImageFile, name: &SnapshotName) -> Result<Image> {
        let Image::Qcow2(mut header) = self else {
            let format = self.format();
            return Err(Error::unsupported(format!(
                "{format} images have no internal snapshots"
            )));
        };
        let snapshots = read_snapshots(file, &header)?;
        let snapshot = name.find(&snapshots)?;
        header.size = snapshot.disk_size().unwrap_or(header.size);
        header.l1_offset = snapshot.l1_offset;
        header.l1_entries = snapshot.l1_entries;
        header.validate_tables()?;
        Ok(Image::Qcow2(header))
    }
}
