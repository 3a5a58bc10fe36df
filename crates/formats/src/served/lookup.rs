//! Maps a request to its place, if that needs no I/O. Each worker runs this for each request.

use super::active::{Active, Layer};
use super::io::StorageId;
use super::slice::Slice;
use super::tables::{Extent, Tables};
use crate::{GuestOffset, HostOffset};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Maximum number of slices that a worker finds without a lock, for each image of the chain.
///
/// The number is also limited by the size of the image's cache.
const MOST_SLOTS: usize = 1024;

/// A worker's references to the slices of one image.
struct Near {
    /// Indexed by the slice's number modulo the number of slots, a power of two. A slot keeps an
    /// evicted slice in memory, beyond the limit of the cache. Therefore the slots are swept.
    slots: Box<[Option<Arc<Slice>>]>,
    /// Number of slices that had been evicted when the slots were last swept.
    swept: u64,
}

/// A worker's references to the slices of a chain.
pub(super) struct Lookup(Vec<Near>);

/// The result of a look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// All bytes are at one place.
    Data {
        storage: StorageId,
        at: HostOffset,
    },
    Zero,
    /// The request takes several steps.
    Else,
}

impl Lookup {
    pub(super) fn new(layers: &[Layer]) -> Lookup {
        let near = |layer: &Layer| {
            let slots = match layer {
                Layer::Tables(tables) => tables.state().cache.max().clamp(1, MOST_SLOTS),
                Layer::Raw { .. } => 1,
            };
            Near {
                slots: vec![None; 1 << slots.ilog2()].into(),
                swept: 0,
            }
        };
        Lookup(layers.iter().map(near).collect())
    }

    /// Returns where a read of `len` bytes from `guest` on goes.
    #[inline]
    pub(super) fn read(&mut self, active: &Active, guest: GuestOffset, len: u64) -> Found {
        for (layer, near) in active.layers.iter().zip(&mut self.0) {
            let left = layer.size().saturating_sub(guest.0);
            if left < len {
                return if left == 0 { Found::Zero } else { Found::Else };
            }
            let tables = match layer {
                Layer::Raw {
                    storage, offset, ..
                } => {
                    return Found::Data {
                        storage: *storage,
                        at: *offset + guest.0,
                    };
                }
                Layer::Tables(tables) => tables,
            };
            match near.extent(tables, guest, len) {
                Some((Extent::Data { at, .. }, n)) if n == len => {
                    return Found::Data {
                        storage: tables.data,
                        at,
                    };
                }
                Some((Extent::Zero, n)) if n == len => return Found::Zero,
                Some((Extent::Below, n)) if n == len => {}
                _ => return Found::Else,
            }
        }
        Found::Zero
    }

    /// Returns where a write goes, if the write can be done in place.
    #[inline]
    pub(super) fn write(&mut self, active: &Active, guest: GuestOffset, len: u64) -> Found {
        #[cfg(test)]
        super::race::reached(super::race::Point::LookUp);
        let tables = match &active.layers[0] {
            Layer::Raw {
                storage, offset, ..
            } => {
                return Found::Data {
                    storage: *storage,
                    at: *offset + guest.0,
                };
            }
            Layer::Tables(tables) => tables,
        };
        let exclusive = match self.0[0].extent(tables, guest, len) {
            Some((
                Extent::Data {
                    at,
                    exclusive: true,
                },
                n,
            )) if n == len => at,
            _ => return Found::Else,
        };
        // The task finds the problem again and reports it.
        match tables.check_target(Some(&tables.filter), exclusive, len) {
            Ok(()) => Found::Data {
                storage: tables.data,
                at: exclusive,
            },
            Err(_) => Found::Else,
        }
    }
}

impl Near {
    /// Fetches a slice from the cache. The outer `None`: it is not there.
    fn fetch(&mut self, tables: &Tables, number: u64) -> Option<Option<Arc<Slice>>> {
        let (slice, evicted) = tables.cached(number);
        if evicted - self.swept >= (self.slots.len() as u64).div_ceil(8) {
            self.swept = evicted;
            let is_dead = |slice: &Arc<Slice>| !slice.live.load(Ordering::Relaxed);
            for slot in &mut self.slots {
                slot.take_if(|slice| is_dead(slice));
            }
        }
        slice.ok()
    }

    #[inline]
    fn extent(&mut self, tables: &Tables, guest: GuestOffset, max: u64) -> Option<(Extent, u64)> {
        let number = tables.slice_of(guest);
        let at = number as usize & (self.slots.len() - 1);
        let slice = match &self.slots[at] {
            Some(slice) if slice.number == number && slice.live.load(Ordering::Acquire) => slice,
            _ => match self.fetch(tables, number)? {
                Some(slice) => self.slots[at].insert(slice),
                None => return Some(tables.without_table(guest, max)),
            },
        };
        if !slice.used.load(Ordering::Relaxed) {
            slice.used.store(true, Ordering::Relaxed);
        }
        // The task finds the problem again and reports it.
        tables.extent(slice, guest, max).ok()
    }
}
