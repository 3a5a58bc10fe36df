//! Boot profiles: recorded from the disks that use an image, and prefetched for the next disks.

use crate::about::write_whole;
use fathom_archive::profile::{self, MOST};
use std::collections::HashSet;
use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::time::{Duration, Instant};

/// Name of the profile in a cache's directory.
pub const FILE: &str = "profile";

/// Time after which a boot is considered to be over.
const BOOT: Duration = Duration::from_secs(120);
/// Maximum number of bytes of a profile that are read.
const MAX_BYTES: u64 = 4 << 20;

/// The stripes that one user has read since it connected.
pub struct Recording {
    since: Instant,
    order: Vec<u32>,
    known: HashSet<u32>,
}

impl Recording {
    pub fn new() -> Recording {
        Recording {
            since: Instant::now(),
            order: Vec::new(),
            known: HashSet::new(),
        }
    }

    pub fn is_over(&self) -> bool {
        self.since.elapsed() > BOOT || self.order.len() >= MOST
    }

    pub fn note(&mut self, stripes: impl Iterator<Item = u32>) {
        for stripe in stripes.take(MOST) {
            if self.order.len() < MOST && self.known.insert(stripe) {
                self.order.push(stripe);
            }
        }
    }

    /// Returns the stripes in the order of the reads, or `None` if the user did not boot from the
    /// disk.
    ///
    /// A booting machine reads the start of the disk among the first stripes, and several other
    /// stripes.
    pub fn end(self) -> Option<Vec<u32>> {
        let is_boot = self.order.len() > 8 && self.order.iter().take(8).any(|&stripe| stripe == 0);
        is_boot.then_some(self.order)
    }
}

/// Returns the stripes of the newest boot, followed by those that only older boots read.
pub fn merge(newest: Vec<u32>, older: &[u32]) -> Vec<u32> {
    let known: HashSet<u32> = newest.iter().copied().collect();
    let others = older
        .iter()
        .copied()
        .filter(|stripe| !known.contains(stripe));
    let mut all: Vec<u32> = newest.iter().copied().chain(others).collect();
    all.truncate(MOST);
    all
}

/// Reads a profile as numbers of stripes of `stripe` bytes; empty if the file does not exist.
pub fn read(path: &Path, stripe: u64) -> io::Result<Vec<u32>> {
    let mut text = String::new();
    let file = match fs::File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        file => file?,
    };
    file.take(MAX_BYTES).read_to_string(&mut text)?;
    profile::parse(&text, stripe).map_err(io::Error::other)
}

/// Reads the profile of the cache in `dir`. Returns `None` if no boot was recorded.
pub fn text_of(dir: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(dir.join(FILE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        text => text.map(Some),
    }
}

/// Writes the profile durably and atomically.
pub fn write(dir: &Path, order: &[u32], stripe: u64) -> io::Result<()> {
    write_whole(dir, FILE, profile::text(order, stripe).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_boots_are_recorded() {
        let of = |stripes: Vec<u32>| {
            let mut recording = Recording::new();
            recording.note(stripes.into_iter());
            recording.end()
        };
        assert_eq!(of((0..5).collect()), None);
        assert_eq!(of((100..200).collect()), None);
        assert_eq!(
            of(vec![9, 0, 9, 8, 7, 6, 5, 4, 3, 2]),
            Some(vec![9, 0, 8, 7, 6, 5, 4, 3, 2])
        );
        assert_eq!(merge(vec![3, 1], &[1, 2, 3, 4]), [3, 1, 2, 4]);
    }
}
