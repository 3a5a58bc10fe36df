//! Reads the snapshot table and the bitmap directory.

use crate::qcow2::snapshot::{MAX_ENTRY, Snapshot};
use crate::qcow2::{Header, MAX_SNAPSHOT_TABLE_BYTES, bitmap::Bitmap};
use crate::{Error, HostOffset, Result};
use fathom_files::{ImageFile, read_up_to};
use serde_json::Value;
use std::fmt;

/// A list of snapshots, formatted as `qemu-img snapshot -l` does. An empty list produces no output.
pub struct SnapshotList(pub Vec<Snapshot>);

impl fmt::Display for SnapshotList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.is_empty() {
            true => Ok(()),
            false => super::human::fmt_snapshots(f, &self.0),
        }
    }
}

impl SnapshotList {
    /// Returns QEMU's `SnapshotInfo` of each snapshot.
    pub fn to_json(&self) -> Value {
        self.0.iter().map(super::json::snapshot).collect()
    }
}

/// Minimum number of bytes per read.
const CHUNK: usize = 1 << 20;

/// The bytes of a file from an offset on, read in chunks on demand. Bytes beyond the end of the
/// file are zeroes.
struct Window<'a> {
    file: &'a dyn ImageFile,
    /// Offset of the next byte to read.
    offset: HostOffset,
    bytes: Vec<u8>,
    used: usize,
}

impl Window<'_> {
    /// Returns at least the next `len` bytes.
    fn peek(&mut self, len: usize) -> Result<&[u8]> {
        if self.bytes.len() - self.used < len {
            self.bytes.drain(..self.used);
            self.used = 0;
            let old = self.bytes.len();
            self.bytes.resize(old + len.max(CHUNK), 0);
            self.file
                .read_at(&mut self.bytes[old..], self.offset.0)
                .map_err(Error::io("cannot read its snapshot table"))?;
            self.offset += (self.bytes.len() - old) as u64;
        }
        Ok(&self.bytes[self.used..])
    }
}

/// Reads all snapshots. The maximum size of the snapshot table bounds the memory.
pub(crate) fn read_snapshots(file: &dyn ImageFile, header: &Header) -> Result<Vec<Snapshot>> {
    let mut window = Window {
        file,
        offset: header.snapshots_offset,
        bytes: Vec::new(),
        used: 0,
    };
    let (mut snapshots, mut total) = (Vec::new(), 0);
    for _ in 0..header.snapshots {
        let (snapshot, len) = Snapshot::parse(window.peek(MAX_ENTRY)?)?;
        total += len as u64;
        if total > MAX_SNAPSHOT_TABLE_BYTES {
            return Err(Error::invalid("its snapshot table is too large"));
        }
        window.used += len;
        snapshots.push(snapshot);
    }
    Ok(snapshots)
}

/// Returns the size of the snapshot table in bytes.
pub(crate) fn snapshot_table_bytes(snapshots: &[Snapshot]) -> u64 {
    let mut bytes = Vec::new();
    let mut len = 0;
    for snapshot in snapshots {
        bytes.clear();
        snapshot.encode(&mut bytes);
        len += bytes.len() as u64;
    }
    len
}

/// Reads the directory entries of all bitmaps, or none if the header does not mark them as
/// consistent.
pub(crate) fn read_bitmaps(file: &dyn ImageFile, header: &Header) -> Result<Vec<Bitmap>> {
    let Some(extension) = header.bitmaps() else {
        return Ok(Vec::new());
    };
    let directory = read_up_to(file, extension.directory_offset.0, extension.directory_size)
        .map_err(Error::io("cannot read its bitmap directory"))?;
    let mut rest = directory.as_slice();
    let mut bitmaps = Vec::new();
    for _ in 0..extension.count {
        let (bitmap, len) = Bitmap::parse(rest, &header.geometry())?;
        rest = &rest[len..];
        bitmaps.push(bitmap);
    }
    if !rest.is_empty() || directory.len() as u64 != extension.directory_size {
        return Err(Error::invalid(
            "its bitmap directory's size contradicts its entries",
        ));
    }
    Ok(bitmaps)
}
