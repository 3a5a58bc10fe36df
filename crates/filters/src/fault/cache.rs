//! What a disk with a volatile cache has not written yet; shared by all
//! workers.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(super) const SECTOR: usize = 512;
pub(super) type Sector = [u8; SECTOR];

/// What becomes of writes before they are flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writes {
    /// They go to the disk below.
    Safe,
    /// They are in memory only.
    Lost,
    /// Some physical blocks of each go to the disk below.
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

/// A sector, and the number of the write that it is of.
struct Unflushed {
    data: Box<Sector>,
    version: u64,
}

#[derive(Default)]
pub(super) struct Contents {
    sectors: BTreeMap<u64, Unflushed>,
    version: u64,
    /// A worker is writing to the disk below. No other one does meanwhile:
    /// an older version of a sector could overtake a newer one.
    writing: bool,
}

#[derive(Default)]
pub(super) struct Cache {
    contents: Mutex<Contents>,
    /// Of sectors; read without the lock.
    len: AtomicUsize,
}

/// Of what a successor gets of a sector: its number, its version, its data.
const LEFT: usize = 16 + SECTOR;

/// A range of sectors, copied.
pub(super) struct Run {
    pub(super) first: u64,
    pub(super) data: Vec<u8>,
}

/// The longest run.
const MAX_RUN: usize = 128 << 10;

impl Cache {
    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update(&self, contents: &Contents) {
        self.len.store(contents.sectors.len(), Ordering::SeqCst);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len.load(Ordering::SeqCst) == 0
    }

    /// Whether `sectors` more keep it within `limit` bytes. One request always
    /// fits.
    pub(super) fn has_room(&self, sectors: usize, limit: u64) -> bool {
        let len = self.len.load(Ordering::SeqCst);
        len == 0 || ((len + sectors) * SECTOR) as u64 <= limit
    }

    /// Keep what `sector` says of each sector in the range. Returns the
    /// version that these have now.
    pub(super) fn put(&self, sectors: Range<u64>, mut sector: impl FnMut(u64, &mut Sector)) -> u64 {
        let mut contents = self.contents();
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

    /// What is here of a range.
    pub(super) fn get(&self, sectors: Range<u64>) -> Vec<(u64, Box<Sector>)> {
        if self.is_empty() {
            return Vec::new();
        }
        let contents = self.contents();
        let here = contents.sectors.range(sectors);
        here.map(|(n, kept)| (*n, kept.data.clone())).collect()
    }

    /// For one who is going to write to the disk below, until
    /// [`Cache::end_writing`]. False while another one does.
    pub(super) fn begin_writing(&self) -> bool {
        !std::mem::replace(&mut self.contents().writing, true)
    }

    /// What the disk below has now: these sectors, if they have not changed
    /// since that version.
    pub(super) fn end_writing(&self, version: u64, written: impl Fn(u64) -> bool) {
        let mut contents = self.contents();
        contents.writing = false;
        contents
            .sectors
            .retain(|n, kept| kept.version > version || !written(*n));
        self.update(&contents);
    }

    pub(super) fn version(&self) -> u64 {
        self.contents().version
    }

    /// A copy of those sectors that are `wanted`, in runs, and the version of
    /// all.
    pub(super) fn runs(&self, wanted: impl Fn(u64) -> bool) -> (u64, Vec<Run>) {
        let contents = self.contents();
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

    /// All of it as bytes, and the version that the next write has one more than.
    pub(super) fn leave(&self) -> (u64, Vec<u8>) {
        let contents = self.contents();
        let mut all = Vec::with_capacity(contents.sectors.len() * LEFT);
        for (n, kept) in &contents.sectors {
            all.extend_from_slice(&n.to_ne_bytes());
            all.extend_from_slice(&kept.version.to_ne_bytes());
            all.extend_from_slice(&*kept.data);
        }
        (contents.version, all)
    }

    /// What another one has left.
    pub(super) fn inherit(&self, version: u64, all: &[u8]) {
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
        let mut contents = self.contents();
        contents.version = version;
        contents.sectors = all.chunks_exact(LEFT).map(one).collect();
        self.update(&contents);
    }

    /// Drop what is behind the end of a disk of so many sectors.
    pub(super) fn cut(&self, sectors: u64) {
        let mut contents = self.contents();
        contents.sectors.split_off(&sectors);
        self.update(&contents);
    }

    /// Drop all of it: so many bytes.
    pub(super) fn cut_power(&self) -> u64 {
        let mut contents = self.contents();
        let lost = contents.sectors.len() * SECTOR;
        contents.sectors.clear();
        self.update(&contents);
        lost as u64
    }
}
