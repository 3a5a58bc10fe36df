//! What the guest's side is made of.

use smallvec::SmallVec;

use super::way::{Class, Key, Way};

/// One request of the guest's block layer.
#[derive(Debug)]
pub(crate) struct Rq {
    pub(crate) key: Key,
    pub(crate) issue: i64,
    pub(crate) complete: Option<i64>,
    pub(super) tid: u32,
    /// The kernel's address of its hardware queue.
    pub(super) hctx: Option<u64>,
    pub(crate) queue: Option<u16>,
    pub(crate) kick: Option<u64>,
    /// Issued last before its kick: the kick is its own.
    pub(crate) own_kick: bool,
    /// The units that it carries, wholly or in part.
    pub(crate) units: SmallVec<[u64; 1]>,
    pub(crate) ambiguous: bool,
}

/// What a report counts as a request: an operation of the benchmark; where there is none a bio;
/// where those are not traced a request of the block layer.
#[derive(Debug)]
pub(crate) struct Unit {
    pub(crate) key: Key,
    pub(crate) call: Option<i64>,
    /// When the benchmark had its answer.
    pub(crate) end: Option<i64>,
    pub(super) tid: u32,
    /// (key, time).
    pub(crate) bios: SmallVec<[(Key, i64); 1]>,
    /// Bytes that no request has taken on (1 for a flush).
    pub(crate) todo: u64,
    /// Its requests that are not followed to their end.
    pub(crate) open: u32,
    /// One of its requests could not be followed.
    pub(crate) broken: bool,
    pub(crate) ambiguous: bool,
    /// The way of the request of its that completed last.
    pub(crate) last: Option<Box<Way>>,
    /// That request's kick.
    pub(crate) kick: Option<u64>,
}

impl Unit {
    /// When it came to be.
    pub(crate) fn start(&self) -> i64 {
        let bio = self.bios.first().map(|&(_, at)| at);
        self.call.or(bio).unwrap_or(i64::MAX)
    }

    /// When the bio that holds `offset` was queued.
    pub(crate) fn bio_of(&self, offset: u64) -> Option<i64> {
        let holds = |(key, _): &&(Key, i64)| {
            key.class == Class::Flush || (key.offset <= offset && offset < key.end())
        };
        self.bios.iter().find(holds).map(|&(_, at)| at)
    }
}

/// The guest writes a doorbell.
#[derive(Debug)]
pub(crate) struct Kick {
    pub(crate) at: i64,
    pub(crate) queue: Option<u16>,
    pub(crate) cpu: u16,
    /// Requests that were in the ring without a kick.
    pub(crate) members: u32,
    pub(crate) settled: u32,
    /// Of those, requests that the server found by itself.
    pub(crate) polled: u32,
    /// The host's doorbell event.
    pub(crate) doorbell: Option<u64>,
    /// Joined, but for the size of their batch.
    pub(crate) ways: Vec<Way>,
}

/// The guest's interrupt handler runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handler {
    pub(crate) at: i64,
    pub(crate) cpu: u16,
    pub(crate) queue: Option<u16>,
}

/// Two queues, either of which may be unknown, can be the same.
pub(crate) fn compatible(a: Option<u16>, b: Option<u16>) -> bool {
    a.is_none() || b.is_none() || a == b
}
