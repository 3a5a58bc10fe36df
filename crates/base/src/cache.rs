//! A cache's files: the data, which stripes are live, and which are durable.
//!
//! What a machine that loses its power finds is right because of the order: a stripe's data is durable before its
//! bit is, and its bit is durably gone before its place is. A keeper that is killed loses nothing either: what is
//! live is in a file, and the kernel has the data. That file is believed only while the kernel must still have it:
//! in the same boot and the same mount of the file system, and unless the keeper was killed during a sync, whose
//! failure nobody would hear of. Otherwise only durable stripes are live.

use crate::durable::Durable;
use fathom_storage::cached::live::{LiveMap, len_for};
use fathom_storage::cached::wire::Geometry;
use rustix::fs::{AtFlags, FallocateFlags, StatxFlags, fallocate, statx};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub const DATA: &str = "data";
const LIVE: &str = "live";
const DURABLE: &str = "durable";

/// Where the map of what is live says of which start of the machine it is.
const BOOT_LEN: usize = 36;
/// Offset in the map of the number of the mount of its file system; 8 bytes.
const MOUNT_AT: u64 = 40;
/// Offset in the map of a byte that is 1 from the beginning of a sync until its outcome has been dealt with.
const SYNCING_AT: u64 = 48;

pub struct Cache {
    dir: PathBuf,
    geometry: Geometry,
    pub data: Arc<File>,
    live: LiveMap,
    /// The file of `live`.
    live_file: File,
    durable: Durable,
    /// Stripes that are live, and may not be durable.
    fresh: Vec<u32>,
    /// When each was last used, by a clock that goes on with each that comes.
    used: Vec<u32>,
    clock: u32,
    present: u32,
    /// How often something has been removed.
    removals: u64,
    /// How often data could not be made durable.
    failures: u64,
}

/// Data that is to be made durable: [`Sync::run`] may take long, and is run elsewhere.
pub struct Sync {
    data: Arc<File>,
    stripes: Vec<u32>,
    removals: u64,
}

/// It has been, or not.
pub struct Synced {
    stripes: Vec<u32>,
    removals: u64,
    outcome: io::Result<()>,
}

impl Sync {
    pub fn run(self) -> Synced {
        let outcome = self.data.sync_data();
        Synced {
            stripes: self.stripes,
            removals: self.removals,
            outcome,
        }
    }
}

/// A file of a cache, made if it is not there: nobody else's to read.
pub fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600);
    options.open(path)
}

impl Cache {
    /// The cache in `dir`; `boot` tells this start of the machine from others.
    pub fn open(dir: &Path, geometry: Geometry, boot: &str) -> io::Result<Cache> {
        let stripes = geometry.stripes();
        let data = open(&dir.join(DATA))?;
        // Whole blocks, for those who read it directly.
        let len = geometry.size.next_multiple_of(4096);
        if data.metadata()?.len() != len {
            data.set_len(len)?;
        }
        let durable = Durable::open(open(&dir.join(DURABLE))?, stripes)?;
        let file = open(&dir.join(LIVE))?;
        let is_true = read_boot(&file).is_ok_and(|of| of == boot.as_bytes())
            && file.metadata()?.len() == len_for(stripes);
        if !is_true {
            // Those who have it mapped have ended with the machine. (A hole might find no place.)
            file.set_len(0)?;
            fallocate(&file, FallocateFlags::empty(), 0, len_for(stripes))?;
        }
        let mount = mount_of(&file)?;
        let is_believed = is_true && is_intact(&file, mount)?;
        let live = LiveMap::map(&file, stripes, true)?;
        let mut cache = Cache {
            dir: dir.to_owned(),
            geometry,
            data: Arc::new(data),
            live,
            live_file: file,
            durable,
            fresh: Vec::new(),
            used: vec![0; stripes as usize],
            clock: 0,
            present: 0,
            removals: 0,
            failures: 0,
        };
        if is_true && !is_believed {
            // Users may have the map of the previous keeper, so the stripes go one by one.
            let all = 0..cache.live.stripes();
            all.filter(|&stripe| !cache.durable.has(stripe))
                .for_each(|stripe| cache.live.remove(stripe));
        }
        if !is_true {
            let all = 0..cache.live.stripes();
            all.filter(|&stripe| cache.durable.has(stripe))
                .for_each(|stripe| cache.live.add(stripe));
            let boot = boot.as_bytes();
            let boot = &boot[..boot.len().min(BOOT_LEN)];
            cache.live_file.write_all_at(boot, 0)?;
        }
        let mount = mount.unwrap_or_default().to_le_bytes();
        cache.live_file.write_all_at(&mount, MOUNT_AT)?;
        cache.say_that_it_syncs(false)?;
        let all = 0..cache.live.stripes();
        // What is not there has no data: not that of a write that was not finished, either.
        let gone: Vec<u32> = all
            .clone()
            .filter(|&stripe| !cache.live.has(stripe))
            .collect();
        // A keeper that was killed while it took something away may not have said so yet.
        gone.iter()
            .for_each(|&stripe| cache.durable.set(stripe, false));
        cache.durable.write()?;
        cache.punch(&gone)?;
        cache.present = all.clone().filter(|&stripe| cache.live.has(stripe)).count() as u32;
        cache.fresh = all
            .filter(|&stripe| cache.live.has(stripe) && !cache.durable.has(stripe))
            .collect();
        Ok(cache)
    }

    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    pub fn has(&self, stripe: u32) -> bool {
        self.live.has(stripe)
    }

    /// Stripes that are there.
    pub fn present(&self) -> u32 {
        self.present
    }

    /// Bytes of its file system that it takes.
    pub fn taken(&self) -> u64 {
        self.data.metadata().map_or(0, |meta| meta.blocks() * 512)
    }

    /// Where a stripe begins, and how long it is.
    pub fn range(&self, stripe: u32) -> (u64, u64) {
        let at = u64::from(stripe) * self.geometry.stripe;
        (at, (self.geometry.size - at).min(self.geometry.stripe))
    }

    /// For a user: the data and the map, for reading, open only for it.
    pub fn shown(&self) -> io::Result<[File; 2]> {
        Ok([
            File::open(self.dir.join(DATA))?,
            File::open(self.dir.join(LIVE))?,
        ])
    }

    /// Number of times that data could not be made durable. What is written is worthless if this number
    /// changes before [`Cache::add`]: its write-back may be the one that failed, of which no later one tells.
    pub fn failures(&self) -> u64 {
        self.failures
    }

    /// The stripe's data has been written, all of it since [`Cache::failures`] had its present value.
    pub fn add(&mut self, stripe: u32) {
        if !self.live.has(stripe) {
            self.live.add(stripe);
            self.present += 1;
        }
        self.fresh.push(stripe);
        self.clock = self.clock.saturating_add(1);
        self.is_used(stripe);
    }

    pub fn is_used(&mut self, stripe: u32) {
        if let Some(used) = self.used.get_mut(stripe as usize) {
            *used = self.clock;
        }
    }

    /// What is to be made durable, if there is something: for [`Cache::synced`].
    pub fn sync(&mut self) -> io::Result<Option<Sync>> {
        if self.fresh.is_empty() {
            return Ok(None);
        }
        self.say_that_it_syncs(true)?;
        Ok(Some(Sync {
            data: self.data.clone(),
            stripes: std::mem::take(&mut self.fresh),
            removals: self.removals,
        }))
    }

    /// For the next keeper, if this one is killed.
    fn say_that_it_syncs(&self, syncs: bool) -> io::Result<()> {
        self.live_file.write_all_at(&[syncs.into()], SYNCING_AT)
    }

    /// Marks the stripes of a sync as durable. After a failed one, every stripe that is not durable goes,
    /// whether or not the sync was for it: the kernel tells of a failed write-back once, and not of which
    /// part.
    pub fn synced(&mut self, synced: Synced) -> io::Result<()> {
        if synced.outcome.is_err() {
            self.failures += 1;
            let is_lost = |stripe: &u32| self.live.has(*stripe) && !self.durable.has(*stripe);
            let lost: Vec<u32> = (0..self.live.stripes()).filter(is_lost).collect();
            self.remove(&lost)?;
            self.say_that_it_syncs(false)?;
            return synced.outcome;
        }
        if synced.removals != self.removals {
            // Some may have gone, and come back with other data: not durable.
            self.fresh.extend(synced.stripes);
            self.fresh.retain(|stripe| self.live.has(*stripe));
            return self.say_that_it_syncs(false);
        }
        for stripe in synced.stripes {
            self.durable.set(stripe, true);
        }
        self.durable.write()?;
        self.say_that_it_syncs(false)
    }

    /// Gives back the place of `count` stripes, those that have not been used for longest.
    pub fn evict(&mut self, count: usize) -> io::Result<usize> {
        let there = (0..self.live.stripes()).filter(|&stripe| self.live.has(stripe));
        let mut oldest: Vec<(u32, u32)> = there
            .map(|stripe| (self.used[stripe as usize], stripe))
            .collect();
        let count = count.min(oldest.len());
        if count == 0 {
            return Ok(0);
        }
        oldest.select_nth_unstable(count - 1);
        let mut gone: Vec<u32> = oldest[..count].iter().map(|(_, stripe)| *stripe).collect();
        gone.sort_unstable();
        self.remove(&gone)?;
        Ok(count)
    }

    /// In order of their places. See the module's own words.
    fn remove(&mut self, stripes: &[u32]) -> io::Result<()> {
        self.removals += 1;
        // What is not there may be on its way to its place.
        let there = stripes
            .iter()
            .copied()
            .filter(|&stripe| self.live.has(stripe));
        let stripes: Vec<u32> = there.collect();
        for &stripe in &stripes {
            self.live.remove(stripe);
            self.present -= 1;
            self.durable.set(stripe, false);
        }
        self.fresh.retain(|stripe| self.live.has(*stripe));
        self.durable.write()?;
        self.punch(&stripes)
    }

    /// A stripe that is not there, and of which a part may have been written: it has nothing again.
    pub fn clear(&self, stripe: u32) -> io::Result<()> {
        self.punch(&[stripe])
    }

    fn punch(&self, stripes: &[u32]) -> io::Result<()> {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let mut rest = stripes;
        while let Some(&first) = rest.first() {
            let follows = |(n, stripe): &(usize, &u32)| **stripe == first + *n as u32;
            let count = rest.iter().enumerate().take_while(follows).count();
            let (at, _) = self.range(first);
            fallocate(&*self.data, hole, at, count as u64 * self.geometry.stripe)?;
            rest = &rest[count..];
        }
        Ok(())
    }
}

fn read_boot(file: &File) -> io::Result<[u8; BOOT_LEN]> {
    let mut boot = [0; BOOT_LEN];
    file.read_exact_at(&mut boot, 0)?;
    Ok(boot)
}

/// The number of the mount that the file is in, which no other mount of this boot has had or will have. None:
/// the kernel does not know (before Linux 6.8).
fn mount_of(file: &File) -> io::Result<Option<u64>> {
    const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
    let stat = statx(file, "", AtFlags::EMPTY_PATH, MNT_ID_UNIQUE)?;
    let is_known = stat.stx_mask & MNT_ID_UNIQUE.bits() != 0;
    Ok(is_known.then_some(stat.stx_mnt_id))
}

/// Whether the map was written in this mount, by a keeper that was not killed during a sync.
fn is_intact(file: &File, mount: Option<u64>) -> io::Result<bool> {
    let mut said = [0; 9];
    file.read_exact_at(&mut said, MOUNT_AT)?;
    let (of, syncing) = said.split_at((SYNCING_AT - MOUNT_AT) as usize);
    Ok(mount.is_some_and(|mount| mount.to_le_bytes() == of) && syncing == [0])
}

/// What tells this start of the machine from others.
pub fn boot_id() -> io::Result<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(text.trim().to_owned())
}

/// Away with all of it but the directory and what is open by others.
pub fn forget(dir: &Path) -> io::Result<()> {
    for name in [DURABLE, LIVE, DATA] {
        match fs::remove_file(dir.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
