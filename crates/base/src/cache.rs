//! The files of a cache: the data, the map of live stripes, and the map of durable stripes.
//!
//! The order of writes keeps a cache correct after a power failure. A stripe's data becomes durable
//! before its bit in the durable map is set. The bit is durably cleared before the stripe's space
//! is freed.
//!
//! If the keeper is killed, no stripe is lost: the live map is in a file, and the kernel has the
//! data. The live map is trusted only if the kernel must still have all data. This condition
//! requires the same boot and the same mount of the file system. The keeper must also not have been
//! killed during a sync, because a failure of that sync would go unnoticed. Otherwise only durable
//! stripes become live.

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

/// Number of bytes at the start of the live map that contain the boot ID.
const BOOT_LEN: usize = 36;
/// Offset in the live map of the mount ID of its file system, which has 8 bytes.
const MOUNT_AT: u64 = 40;
/// Offset in the live map of a byte that is 1 from the start of a sync until its result is
/// processed.
const SYNCING_AT: u64 = 48;

pub struct Cache {
    dir: PathBuf,
    geometry: Geometry,
    pub data: Arc<File>,
    live: LiveMap,
    /// File of the live map.
    live_file: File,
    durable: Durable,
    /// Stripes that are live and may not be durable.
    fresh: Vec<u32>,
    /// Time of the last use of each stripe, in units of `clock`, which advances when a stripe is
    /// added.
    used: Vec<u32>,
    clock: u32,
    present: u32,
    /// Number of removals, each of which may include several stripes.
    removals: u64,
    /// Number of failed syncs.
    failures: u64,
}

/// A sync to perform. [`Sync::run`] may take long and runs on another thread.
pub struct Sync {
    data: Arc<File>,
    stripes: Vec<u32>,
    removals: u64,
}

/// A sync that has been performed, with its result.
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

/// Opens a file of a cache and creates it if necessary. Only its owner may access it.
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
    /// Opens the cache in `dir`. `boot` is the boot ID of the running kernel.
    pub fn open(dir: &Path, geometry: Geometry, boot: &str) -> io::Result<Cache> {
        let stripes = geometry.stripes();
        let data = open(&dir.join(DATA))?;
        // The file consists of whole blocks, so that users can read it with direct I/O.
        let len = geometry.size.next_multiple_of(4096);
        if data.metadata()?.len() != len {
            data.set_len(len)?;
        }
        let durable = Durable::open(open(&dir.join(DURABLE))?, stripes)?;
        let file = open(&dir.join(LIVE))?;
        let is_true = read_boot(&file).is_ok_and(|of| of == boot.as_bytes())
            && file.metadata()?.len() == len_for(stripes);
        if !is_true {
            // Processes that mapped the old file ended at the reboot. The new file has allocated
            // blocks, because a write to a hole could fail for lack of space.
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
            // Users of the previous keeper may still map the file, so the stripes are removed one
            // by one.
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
        // A stripe that is not live must have no data, not even that of an interrupted write.
        let gone: Vec<u32> = all
            .clone()
            .filter(|&stripe| !cache.live.has(stripe))
            .collect();
        // A keeper that was killed during a removal may not have cleared the durable bits.
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

    /// Returns the number of live stripes.
    pub fn present(&self) -> u32 {
        self.present
    }

    /// Returns the number of bytes that the data occupies in its file system.
    pub fn taken(&self) -> u64 {
        self.data.metadata().map_or(0, |meta| meta.blocks() * 512)
    }

    /// Returns the offset and the size of a stripe in bytes.
    pub fn range(&self, stripe: u32) -> (u64, u64) {
        let at = u64::from(stripe) * self.geometry.stripe;
        (at, (self.geometry.size - at).min(self.geometry.stripe))
    }

    /// Opens the data and the live map for a user, both read-only.
    pub fn shown(&self) -> io::Result<[File; 2]> {
        Ok([
            File::open(self.dir.join(DATA))?,
            File::open(self.dir.join(LIVE))?,
        ])
    }

    /// Returns the number of failed syncs.
    ///
    /// If this number changes before [`Cache::add`], the data written since is worthless. The
    /// failed write-back may have been that of this data, and no later sync reports the failure
    /// again.
    pub fn failures(&self) -> u64 {
        self.failures
    }

    /// Marks a stripe as live.
    ///
    /// All its data must have been written since [`Cache::failures`] had its present value.
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

    /// Returns the sync to perform, if there are stripes to make durable.
    ///
    /// The caller must pass the result to [`Cache::synced`].
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

    /// Records in the live map whether a sync is running, for the next keeper if this one is
    /// killed.
    fn say_that_it_syncs(&self, syncs: bool) -> io::Result<()> {
        self.live_file.write_all_at(&[syncs.into()], SYNCING_AT)
    }

    /// Marks the stripes of a sync as durable.
    ///
    /// After a failed sync, removes every stripe that is not durable, even if the sync did not
    /// cover it. The kernel reports a failed write-back only once and does not say which part
    /// failed.
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
            // Some stripes may have been removed and fetched again since, so their new data is not
            // durable.
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

    /// Removes the `count` least recently used stripes and frees their space. Returns their number.
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

    /// Removes stripes, which must be in ascending order. The module's documentation explains the
    /// order of writes.
    fn remove(&mut self, stripes: &[u32]) -> io::Result<()> {
        self.removals += 1;
        // A stripe that is not live may be in the process of being written.
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

    /// Erases the data of a stripe that is not live and may have been written partly.
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

/// Returns the ID of the file's mount, which is unique within this boot.
///
/// Returns `None` if the kernel does not support such IDs (before Linux 6.8).
fn mount_of(file: &File) -> io::Result<Option<u64>> {
    const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
    let stat = statx(file, "", AtFlags::EMPTY_PATH, MNT_ID_UNIQUE)?;
    let is_known = stat.stx_mask & MNT_ID_UNIQUE.bits() != 0;
    Ok(is_known.then_some(stat.stx_mnt_id))
}

/// Returns whether the live map was written in this mount by a keeper not killed during a sync.
fn is_intact(file: &File, mount: Option<u64>) -> io::Result<bool> {
    let mut said = [0; 9];
    file.read_exact_at(&mut said, MOUNT_AT)?;
    let (of, syncing) = said.split_at((SYNCING_AT - MOUNT_AT) as usize);
    Ok(mount.is_some_and(|mount| mount.to_le_bytes() == of) && syncing == [0])
}

/// Returns the boot ID, which distinguishes this boot of the machine from others.
pub fn boot_id() -> io::Result<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(text.trim().to_owned())
}

/// Removes the cache's files from `dir`. Open files remain usable.
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
