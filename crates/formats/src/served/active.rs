//! A chain of images while it is in use.

use super::epoch::Epochs;
use super::helpers::Helpers;
use super::io::{Errno, Io, StorageId};
use super::storage::Storage;
use super::tables::{Extent, Tables};
use crate::qcow2::Compressed;
use crate::{GuestOffset, HostOffset};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// An image of the chain; the guest writes to the first one.
#[derive(Clone)]
pub(super) enum Layer {
    /// An image without tables: the guest's byte n is the file's byte `offset` + n.
    Raw {
        storage: StorageId,
        offset: HostOffset,
        size: u64,
        /// Whether the file stores the guest's bytes unchanged (neither LUKS nor a foreign format).
        is_plain: bool,
    },
    Tables(Arc<Tables>),
}

impl Layer {
    /// Returns the bytes of the guest's disk that this image covers.
    pub(super) fn size(&self) -> u64 {
        match self {
            Layer::Raw { size, .. } => *size,
            Layer::Tables(tables) => tables.size(),
        }
    }

    /// Returns whether clusters of the image may be allocated and freed.
    pub(super) fn is_writable(&self) -> bool {
        match self {
            Layer::Raw { .. } => false,
            Layer::Tables(tables) => tables.writable,
        }
    }

    /// Returns the number of internal snapshots of the image.
    pub(super) fn snapshots(&self) -> u32 {
        match self {
            Layer::Raw { .. } => 0,
            Layer::Tables(tables) => tables.snapshots,
        }
    }
}

/// Where a range's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Data {
        storage: StorageId,
        at: HostOffset,
    },
    Zero,
    /// In a compressed cluster of image number `layer`. The cluster starts at guest offset
    /// `cluster`.
    Compressed {
        layer: usize,
        cluster: GuestOffset,
        range: Compressed,
    },
}

/// A chain in use, shared by all workers.
pub(super) struct Active {
    pub(super) layers: Vec<Layer>,
    pub(super) storages: Vec<Arc<dyn Storage>>,
    /// Size in bytes of each storage at activation; 0 for storages that are not in use.
    pub(super) lengths: Vec<u64>,
    /// Whether the truncation of a file was logged.
    pub(super) complained: AtomicBool,
    pub(super) epochs: Arc<Epochs>,
    pub(super) helpers: Arc<Helpers>,
    /// See [`ImageOptions::rebasing`](super::ImageOptions::rebasing).
    pub(super) rebasing: bool,
}

impl Active {
    /// Returns the tables of the image that the guest writes to; `None` if that image is raw.
    pub(super) fn top(&self) -> Option<&Tables> {
        match &self.layers[0] {
            Layer::Tables(tables) => Some(tables),
            Layer::Raw { .. } => None,
        }
    }

    /// Returns the storage of the image that the guest writes to.
    pub(super) fn storage(&self) -> StorageId {
        match &self.layers[0] {
            Layer::Tables(tables) => tables.storage,
            Layer::Raw { storage, .. } => *storage,
        }
    }

    /// Returns the part of the chain that starts at that depth.
    pub(super) fn from(&self, depth: usize) -> Active {
        Active {
            layers: self.layers[depth..].to_vec(),
            storages: self.storages.clone(),
            lengths: self.lengths.clone(),
            complained: AtomicBool::new(false),
            epochs: self.epochs.clone(),
            helpers: self.helpers.clone(),
            rebasing: false,
        }
    }

    /// Marks the writable images as open.
    pub(super) fn open_for_writing(&self) {
        for layer in &self.layers {
            if let Layer::Tables(tables) = layer {
                tables.open_for_writing();
            }
        }
    }

    /// Installs a guard on each storage, so that truncated data is not read as zeroes.
    pub(super) fn guard_ends(self: &Arc<Active>) {
        for (id, storage) in (0..).zip(&self.storages) {
            let active = Arc::downgrade(self);
            storage.guard_end(Arc::new(move |missing| {
                let active = active.upgrade();
                active.is_none_or(|active| active.may_miss(id, HostOffset(missing.end)))
            }));
        }
    }

    /// Returns where the bytes from `guest` on are, as the layers from `first` on see them.
    ///
    /// Also returns the number of bytes that this holds for, `max` at most. Reads tables if need
    /// be.
    pub(super) async fn place(
        &self,
        io: &impl Io,
        first: usize,
        guest: GuestOffset,
        mut max: u64,
    ) -> Result<(Place, u64), Errno> {
        for (number, layer) in self.layers.iter().enumerate().skip(first) {
            let Some(left) = layer.size().checked_sub(guest.0).filter(|left| *left > 0) else {
                // Beyond the end of a short backing file.
                return Ok((Place::Zero, max));
            };
            max = max.min(left);
            let tables = match layer {
                Layer::Raw {
                    storage, offset, ..
                } => {
                    let (storage, at) = (*storage, *offset + guest.0);
                    return Ok((Place::Data { storage, at }, max));
                }
                Layer::Tables(tables) => tables,
            };
            let (extent, len) = tables.look_up(io, guest, max).await?;
            max = len;
            let place = match extent {
                Extent::Below => continue,
                Extent::Zero => Place::Zero,
                Extent::Data { at, .. } => Place::Data {
                    storage: tables.data,
                    at,
                },
                Extent::Compressed { cluster, range } => Place::Compressed {
                    layer: number,
                    cluster,
                    range,
                },
            };
            return Ok((place, max));
        }
        Ok((Place::Zero, max))
    }

    /// Returns whether a raw backing file has a hole there. A system call, but no I/O.
    ///
    /// (Images with tables report zeroes themselves.)
    fn is_hole(&self, storage: StorageId, at: HostOffset, len: u64) -> bool {
        let is_raw =
            |layer: &Layer| matches!(layer, Layer::Raw { storage: of, .. } if *of == storage);
        let below = self.layers.iter().skip(1).any(is_raw);
        below
            && self.storages[usize::from(storage)]
                .bytes()
                .is_hole(at.0, len)
    }

    /// Returns whether the layers from `first` on read as zeroes in that range.
    pub(super) async fn is_zero(
        &self,
        io: &impl Io,
        first: usize,
        mut guest: GuestOffset,
        end: GuestOffset,
    ) -> Result<bool, Errno> {
        while guest < end {
            let (place, len) = self.place(io, first, guest, end - guest).await?;
            match place {
                Place::Zero => {}
                Place::Data { storage, at } if self.is_hole(storage, at, len) => {}
                _ => return Ok(false),
            }
            guest += len;
        }
        Ok(true)
    }
}

impl Tables {
    /// Returns what the bytes from `guest` on are, and for how many bytes, `max` at most.
    pub(super) async fn look_up(
        &self,
        io: &impl Io,
        guest: GuestOffset,
        max: u64,
    ) -> Result<(Extent, u64), Errno> {
        match self.slice(io, self.slice_of(guest)).await? {
            None => Ok(self.without_table(guest, max)),
            Some(slice) => self.checked_entry(self.extent(&slice.0, guest, max)),
        }
    }
}
