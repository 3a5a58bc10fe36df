//! Unflushed sectors of a disk with a volatile cache; shared by all workers.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(super) const SECTOR: usize = 512;
pub(super) type Sector = [u8; SECTOR];

/// Handling of writes before they are flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writes {
    /// Writes go to the disk below.
    Safe,
    /// Writes are kept in memory only.
    Lost,
    /// Some physical blocks of each write go to the disk below.
    Torn,
}

impl Writes {
    pub(super) fn parse(text: &str) -> Result<Writes, String> {
        match text {
            "safe" => Ok(Writes::Safe),
            "lost" => Ok(Writes::Lost),
            "torn" => Ok(Writes::Torn),
            _ => Err(format!("'{text}' is not safe, lost or torn")),
        }
    }
}

/// A sector, and the number of the write that wrote it.
struct Unflushed {
    data: Box<Sector>,
    version: u64,
}

#[derive(Default)]
pub(super) struct Contents {
    sectors: BTreeMap<u64, Unflushed>,
    version: u64,
    /// A worker is writing to the disk below. Others wait, because an older version of a sector
    /// could overwrite a newer one.
    writing: bool,
}

#[derive(Default)]
pub(super) struct Cache {
    contents: Mutex<Contents>,
    /// Number of cached sectors, which can be read without the lock.
    len: AtomicUsize,
}

/// Bytes per sector in the handover state: number, version and data.
const LEFT: usize = 16 + SECTOR;

/// A copy of consecutive sectors.
pub(super) struct Run {
    pub(super) first: u64,
    pub(super) data: Vec<u8>,
}

/// Maximum length of a run, in bytes.
const MAX_RUN: usize = 128 << 10;

impl Cache {
    fn update(&self, contents: &Contents) {
        self.len.store(contents.sectors.len(), Ordering::SeqCst);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len.load(Ordering::SeqCst) == 0
    }

    /// Returns whether the cache stays within `limit` bytes with `sectors` more. An empty cache
    /// accepts any request.
    pub(super) fn has_room(&self, sectors: usize, limit: u64) -> bool {
        let len = self.len.load(Ordering::SeqCst);
        len == 0 || ((len + sectors) * SECTOR) as u64 <= limit
    }

    /// Stores all sectors of the range; `sector` fills in each one's data. Returns their new
    /// version.
    pub(super) fn put(&self, sectors: Range<u64>, mut sector: impl FnMut(u64, &mut Sector)) -> u64 {
        let mut contents = self.contents.lock();
        contents.version += 1;
        let version = contents.version;
        for n in sectors {
            let kept = contents.sectors.entry(n).or_insert_with(|| Unflushed {
                data: Box::new([0; SECTOR]),
                version,
            });
            kept.version = version;
            sector(n, &mut kept.data);
        }
        self.update(&contents);
        version
    }

    /// Returns copies of the cached sectors of a range.
    pub(super) fn get(&self, sectors: Range<u64>) -> Vec<(u64, Box<Sector>)> {
        if self.is_empty() {
            return Vec::new();
        }
        let contents = self.contents.lock();
        let here = contents.sectors.range(sectors);
        here.map(|(n, kept)| (*n, kept.data.clone())).collect()
    }

    /// Reserves writing to the disk below until [`Cache::end_writing`]. Returns false if another
    /// worker is writing.
    pub(super) fn begin_writing(&self) -> bool {
        !std::mem::replace(&mut self.contents.lock().writing, true)
    }

    /// Ends writing and removes the sectors that were `written`, unless they have changed since
    /// `version`.
    pub(super) fn end_writing(&self, version: u64, written: impl Fn(u64) -> bool) {
        let mut contents = self.contents.lock();
        contents.writing = false;
        contents
            .sectors
            .retain(|n, kept| kept.version > version || !written(*n));
        self.update(&contents);
    }

    pub(super) fn version(&self) -> u64 {
        self.contents.lock().version
    }

    /// Returns copies of the `wanted` sectors in runs, and the current version of the cache.
    pub(super) fn runs(&self, wanted: impl Fn(u64) -> bool) -> (u64, Vec<Run>) {
        let contents = self.contents.lock();
        let mut runs: Vec<Run> = Vec::new();
        for (n, kept) in contents.sectors.iter().filter(|(n, _)| wanted(**n)) {
            let goes_on = |run: &Run| {
                run.first + (run.data.len() / SECTOR) as u64 == *n && run.data.len() < MAX_RUN
            };
            match runs.last_mut() {
                Some(run) if goes_on(run) => run.data.extend_from_slice(&*kept.data),
                _ => runs.push(Run {
                    first: *n,
                    data: kept.data.to_vec(),
                }),
            }
        }
        (contents.version, runs)
    }

    /// Returns all sectors in serialised form, and the version of the last write.
    pub(super) fn final_state(&self) -> (u64, Vec<u8>) {
        let contents = self.contents.lock();
        let mut all = Vec::with_capacity(contents.sectors.len() * LEFT);
        for (n, kept) in &contents.sectors {
            all.extend_from_slice(&n.to_ne_bytes());
            all.extend_from_slice(&kept.version.to_ne_bytes());
            all.extend_from_slice(&*kept.data);
        }
        (contents.version, all)
    }

    /// Restores the sectors that a predecessor has left.
    pub(super) fn restore(&self, version: u64, all: &[u8]) {
        let one = |one: &[u8]| {
            let (head, data) = one.split_at(16);
            let number =
                |at: usize| u64::from_ne_bytes(head[at..at + 8].try_into().expect("8 bytes"));
            let mut sector = Box::new([0; SECTOR]);
            sector.copy_from_slice(data);
            let kept = Unflushed {
                data: sector,
                version: number(8),
            };
            (number(0), kept)
        };
        let mut contents = self.contents.lock();
        contents.version = version;
        contents.sectors = all.chunks_exact(LEFT).map(one).collect();
        self.update(&contents);
    }

    /// Drops the sectors beyond the end of a disk of `sectors` sectors.
    pub(super) fn cut(&self, sectors: u64) {
        let mut contents = self.contents.lock();
        contents.sectors.split_off(&sectors);
        self.update(&contents);
    }

    /// Drops all sectors. Returns the number of bytes lost.
    pub(super) fn cut_power(&self) -> u64 {
        let mut contents = self.contents.lock();
        let lost = contents.sectors.len() * SECTOR;
        contents.sectors.clear();
        self.update(&contents);
        lost as u64
    }
}
