//! The requests, units, kicks and handlers of the guest's side.

use smallvec::SmallVec;

use super::way::{Class, Key, Way};

/// A request of the guest's block layer.
#[derive(Debug)]
pub(crate) struct Rq {
    pub(crate) key: Key,
    pub(crate) issue: i64,
    pub(crate) complete: Option<i64>,
    pub(super) tid: u32,
    /// The kernel's address of the request's hardware queue.
    pub(super) hctx: Option<u64>,
    pub(crate) queue: Option<u16>,
    pub(crate) kick: Option<u64>,
    /// The request was the last one issued before its kick, so the kick is its own.
    pub(crate) own_kick: bool,
    /// The units that the request carries, wholly or in part.
    pub(crate) units: SmallVec<[u64; 1]>,
    pub(crate) ambiguous: bool,
}

/// A unit that a report counts as a request: an operation of the benchmark. Without a benchmark, a
/// unit is a bio. Without traced bios, a unit is a request of the block layer.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) key: Key,
    pub(crate) call: Option<i64>,
    /// When the benchmark received the result.
    pub(crate) end: Option<i64>,
    pub(super) tid: u32,
    /// The unit's bios, as (key, time).
    pub(crate) bios: SmallVec<[(Key, i64); 1]>,
    /// Number of bytes that no request carries yet (1 for a flush).
    pub(crate) todo: u64,
    /// Number of the unit's requests that are not followed yet.
    pub(crate) open: u32,
    /// A request of the unit could not be followed.
    pub(crate) broken: bool,
    pub(crate) ambiguous: bool,
    /// The way of the unit's request that completed last.
    pub(crate) last: Option<Box<Way>>,
    /// The kick of that request.
    pub(crate) kick: Option<u64>,
}

impl Unit {
    /// Returns the time of the call, or else of the first bio.
    pub(crate) fn start(&self) -> i64 {
        let bio = self.bios.first().map(|&(_, at)| at);
        self.call.or(bio).unwrap_or(i64::MAX)
    }

    /// Returns when the bio that contains `offset` was queued.
    pub(crate) fn bio_of(&self, offset: u64) -> Option<i64> {
        let holds = |(key, _): &&(Key, i64)| {
            key.class == Class::Flush || (key.offset <= offset && offset < key.end())
        };
        self.bios.iter().find(holds).map(|&(_, at)| at)
    }
}

/// A doorbell write of the guest.
#[derive(Debug)]
pub(crate) struct Kick {
    pub(crate) at: i64,
    pub(crate) queue: Option<u16>,
    pub(crate) cpu: u16,
    /// Number of requests that this kick announced.
    pub(crate) members: u32,
    pub(crate) settled: u32,
    /// Number of those requests that the server found by polling.
    pub(crate) polled: u32,
    /// The host's doorbell event.
    pub(crate) doorbell: Option<u64>,
    /// Joined requests that wait until the size of their batch is known.
    pub(crate) ways: Vec<Way>,
}

/// A run of the guest's interrupt handler.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handler {
    pub(crate) at: i64,
    pub(crate) cpu: u16,
    pub(crate) queue: Option<u16>,
}

/// Returns whether two queues, either of which may be unknown, can be the same.
pub(crate) fn compatible(a: Option<u16>, b: Option<u16>) -> bool {
    a.is_none() || b.is_none() || a == b
}
