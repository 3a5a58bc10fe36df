//! Handles images that contradict their format: reports the problem once and prevents more harm.

use super::active::{Active, Layer};
use super::io::{Errno, StorageId};
use super::layout::Layout;
use super::metadata::Filter;
use super::storage::Storage;
use super::tables::Tables;
use crate::HostOffset;
use crate::qcow2::{INCOMPATIBLE_CORRUPT, MAGIC};
use fathom_units::cause;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Active {
    /// Returns whether bytes that a file does not have, up to `end`, read as zeroes.
    ///
    /// An image's last cluster may be incomplete. Whole clusters that the tables refer to must
    /// exist, unless the user wants zeroes instead. A raw file may end where it ended at
    /// activation.
    #[cold]
    pub(super) fn may_miss(&self, id: StorageId, end: HostOffset) -> bool {
        let tables = self.layers.iter().filter_map(|layer| match layer {
            Layer::Tables(tables) => Some(tables),
            Layer::Raw { .. } => None,
        });
        let of_image = tables.clone().find(|tables| tables.storage == id);
        if let Some(tables) = of_image {
            return tables.is_whole() && tables.may_miss(tables.known_len(), end);
        }
        let is_data = |tables: &&Arc<Tables>| tables.has_data_file && tables.data == id;
        let of_data = tables.clone().find(is_data);
        let storage = &self.storages[usize::from(id)];
        let was = self.lengths[usize::from(id)];
        let Some(problem) = cut(&**storage, was) else {
            // (A data file grows by whole clusters, before entries for them are linked.)
            let len = || storage.bytes().len().unwrap_or(was);
            return of_data.is_none_or(|tables| tables.may_miss(len(), end));
        };
        if !self.complained.swap(true, Ordering::Relaxed) {
            let path = storage.path().display();
            tracing::error!("{path}: {problem}; reads of the missing data fail");
        }
        false
    }
}

/// Describes how a file has become shorter; `None` if it has not.
fn cut(file: &dyn Storage, was: u64) -> Option<String> {
    let len = file.bytes().len().ok().filter(|len| *len < was)?;
    Some(format!(
        "truncated while it was served, from {was} bytes to {len}"
    ))
}

impl Tables {
    /// Returns false if the file was truncated since activation. Marks the image as corrupt then.
    pub(super) fn is_whole(&self) -> bool {
        // The old length is read first, since the file can become longer meanwhile.
        let was = self.file_len.load(Ordering::Acquire);
        let problem = cut(&*self.file, was);
        if let Some(problem) = &problem {
            self.mark_corrupt(problem);
        }
        problem.is_none()
    }

    /// Returns the offset at which the image's last cluster may end.
    pub(super) fn known_len(&self) -> u64 {
        let len = self.file_len.load(Ordering::Acquire);
        // `used` is larger if the file could not be made longer in advance.
        len.max(self.used.load(Ordering::Relaxed))
    }

    /// Returns whether the bytes up to `end` that a file of `len` bytes lacks read as zeroes.
    ///
    /// True if they are less than a cluster, or if the user wants zeroes.
    fn may_miss(&self, len: u64, end: HostOffset) -> bool {
        if end.0 <= len.next_multiple_of(self.layout.cluster_size()) {
            return true;
        }
        let fate = match self.zero_missing {
            true => "the missing data reads as zeroes",
            false => "reads of the missing data fail (--zero-missing-clusters)",
        };
        self.complain(&format!(
            "its tables refer to clusters beyond the file's end at {len} bytes, so the file was \
             truncated; {fate}"
        ));
        self.zero_missing
    }

    /// Fails if guest data would be written over metadata.
    ///
    /// Checks `len` bytes at `at` of the data storage. With a filter, a lock is taken only if the
    /// filter cannot exclude metadata there.
    #[inline]
    pub(super) fn check_target(
        &self,
        filter: Option<&Filter>,
        at: HostOffset,
        len: u64,
    ) -> Result<(), Errno> {
        if self.has_data_file {
            return Ok(());
        }
        let bits = self.layout.cluster_bits();
        for cluster in at.clusters(len, bits) {
            if filter.is_none_or(|filter| filter.may_be_metadata(cluster)) {
                self.check_cluster(cluster)?;
            }
        }
        Ok(())
    }

    #[cold]
    fn check_cluster(&self, cluster: u64) -> Result<(), Errno> {
        let hit = self.state().alloc.metadata.in_cluster(cluster);
        self.checked(match hit {
            None => Ok(()),
            Some(region) => Err(format!(
                "guest data is in cluster {cluster}, which holds {region}"
            )),
        })
    }

    /// Ends all writes and marks the image as corrupt in its header. Logs the problem once.
    #[cold]
    pub(super) fn mark_corrupt(&self, problem: &str) {
        if self.corrupt.swap(true, Ordering::SeqCst) {
            return;
        }
        self.condition.note_damage(self.storage);
        let path = self.file.path().display();
        let fate = match (self.writable, self.say_corrupt()) {
            (false, _) => "reads of that cluster fail".to_owned(),
            (true, Ok(())) => {
                "writes to the image fail; check the image with 'fathom img check'".into()
            }
            (true, Err(error)) => format!("writes to the image fail ({})", cause(error)),
        };
        tracing::error!("{path}: corrupt: {problem}; {fate}");
    }

    /// Marks an image in which an entry of an L2 table is invalid. Logs the problem once.
    ///
    /// Requests for that entry's cluster fail, all others are served.
    #[cold]
    pub(super) fn mark_bad_entry(&self, problem: &str) {
        if self.bad_entry.swap(true, Ordering::SeqCst) || self.corrupt.load(Ordering::SeqCst) {
            return;
        }
        self.condition.note_damage(self.storage);
        let path = self.file.path().display();
        let unmarked = match self.say_corrupt() {
            Ok(()) => String::new(),
            Err(error) => format!(" (cannot mark the image as corrupt: {})", cause(error)),
        };
        tracing::error!(
            "{path}: corrupt: {problem}; requests for that cluster fail, and all others are \
             served{unmarked}; stop using the image, and repair it with 'fathom img check \
             --repair all'"
        );
    }

    /// Marks a writable image as corrupt, if its format has a flag for that.
    fn say_corrupt(&self) -> std::io::Result<()> {
        match (self.writable, &self.layout) {
            (true, Layout::Qcow2(g)) if g.version >= 3 => self.set_corrupt_bit(),
            _ => Ok(()),
        }
    }

    /// Sets the corrupt bit again after a header write that may have overwritten it.
    pub(super) fn say_corrupt_again(&self) {
        let is_corrupt =
            self.corrupt.load(Ordering::SeqCst) || self.bad_entry.load(Ordering::SeqCst);
        if is_corrupt
            && matches!(&self.layout, Layout::Qcow2(g) if g.version >= 3)
            && let Err(error) = self.set_corrupt_bit()
        {
            let path = self.file.path().display();
            tracing::error!(
                "{path}: cannot mark the image as corrupt in its header: {}",
                cause(error)
            );
        }
    }

    /// Logs guest data that cannot be read; once for the whole image.
    #[cold]
    pub(super) fn complain(&self, problem: &str) {
        if !self.complained.swap(true, Ordering::Relaxed) {
            tracing::error!("{}: {problem}", self.file.path().display());
        }
    }

    /// Sets the corrupt bit in the header. Blocks, once in the image's life.
    ///
    /// A file that is no qcow2 image any more stays unchanged.
    fn set_corrupt_bit(&self) -> std::io::Result<()> {
        let mut magic = [0; 4];
        self.file.bytes().read_at(&mut magic, 0)?;
        if magic != MAGIC {
            return Ok(());
        }
        let mut word = [0; 8];
        self.file.bytes().read_at(&mut word, 72)?;
        let features = u64::from_be_bytes(word) | INCOMPATIBLE_CORRUPT;
        self.file.bytes().write_at(&features.to_be_bytes(), 72)?;
        self.file.bytes().sync()
    }
}
