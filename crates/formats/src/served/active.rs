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

/// One image of the chain; the first is the one that the guest writes to.
#[derive(Clone)]
pub(super) enum Layer {
    /// The guest's byte n is the file's byte `offset` + n.
    Raw {
        storage: StorageId,
        offset: HostOffset,
        size: u64,
        /// The file has it as it is.
        is_plain: bool,
    },
    Tables(Arc<Tables>),
}

impl Layer {
    /// Of the guest's disk that it knows of, in bytes.
    pub(super) fn size(&self) -> u64 {
        match self {
            Layer::Raw { size, .. } => *size,
            Layer::Tables(tables) => tables.size(),
        }
    }

    /// Clusters of it come and go.
    pub(super) fn is_writable(&self) -> bool {
        match self {
            Layer::Raw { .. } => false,
            Layer::Tables(tables) => tables.writable,
        }
    }

    /// So many internal snapshots the image has.
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
    /// In the compressed cluster of that layer that starts at guest offset
    /// `cluster`.
    Compressed {
        layer: usize,
        cluster: GuestOffset,
        range: Compressed,
    },
}

/// Shared by all workers.
pub(super) struct Active {
    pub(super) layers: Vec<Layer>,
    pub(super) storages: Vec<Arc<dyn Storage>>,
    /// Their bytes when they were taken into use.
    pub(super) lengths: Vec<u64>,
    /// It was said that one was cut.
    pub(super) complained: AtomicBool,
    pub(super) epochs: Arc<Epochs>,
    pub(super) helpers: Arc<Helpers>,
    /// See `ImageOptions`.
    pub(super) rebasing: bool,
}

impl Active {
    /// The image that the guest writes to, unless it is raw.
    pub(super) fn top(&self) -> Option<&Tables> {
        match &self.layers[0] {
            Layer::Tables(tables) => Some(tables),
            Layer::Raw { .. } => None,
        }
    }

    /// Where the image is that the guest writes to.
    pub(super) fn storage(&self) -> StorageId {
        match &self.layers[0] {
            Layer::Tables(tables) => tables.storage,
            Layer::Raw { storage, .. } => *storage,
        }
    }

    /// The images from that depth on, by themselves.
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

    /// Marks the images that are written to as open.
    pub(super) fn open_for_writing(&self) {
        for layer in &self.layers {
            if let Layer::Tables(tables) = layer {
                tables.open_for_writing();
            }
        }
    }

    /// From now on nobody takes what was cut off a file for zeroes.
    pub(super) fn guard_ends(self: &Arc<Active>) {
        for (id, storage) in (0..).zip(&self.storages) {
            let active = Arc::downgrade(self);
            storage.guard_end(Arc::new(move |missing| {
                let active = active.upgrade();
                active.is_none_or(|active| active.may_miss(id, HostOffset(missing.end)))
            }));
        }
    }

    /// Where the bytes from `guest` on are, as the layers from `first` on see
    /// them, and for how many that is true: `max` at most. Tables are read if
    /// need be.
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

    /// Whether a raw backing file is sparse there. (Images in a format say so
    /// themselves.) A system call, but no I/O.
    fn is_hole(&self, storage: StorageId, at: HostOffset, len: u64) -> bool {
        let is_raw =
            |layer: &Layer| matches!(layer, Layer::Raw { storage: of, .. } if *of == storage);
        let below = self.layers.iter().skip(1).any(is_raw);
        below
            && self.storages[usize::from(storage)]
                .bytes()
                .is_hole(at.0, len)
    }

    /// Whether the layers from `first` on have nothing but zeroes there.
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
    /// What the bytes from `guest` on are, `max` at most.
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
