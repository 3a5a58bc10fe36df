//! What contradicts the format is found before it does harm, and said once.

use super::active::{Active, Layer};
use super::io::{Errno, StorageId};
use super::layout::Layout;
use super::metadata::Filter;
use super::storage::Storage;
use super::tables::Tables;
use crate::HostOffset;
use crate::qcow2::{INCOMPATIBLE_CORRUPT, MAGIC};
use std::sync::atomic::Ordering;

impl Active {
    /// A file was found to end at `at` or before. It may where it always did:
    /// an image's last cluster need not be there in full, and QEMU reads
    /// zeroes beyond that, too (it writes entries before their data after a
    /// power cut). But it has not been cut since it was taken into use.
    #[cold]
    pub(super) fn may_end(&self, id: StorageId, at: HostOffset) -> bool {
        let of_tables = self.layers.iter().find_map(|layer| match layer {
            Layer::Tables(tables) if tables.storage == id => Some(tables),
            _ => None,
        });
        if let Some(tables) = of_tables {
            return tables.is_whole() && tables.may_end(at);
        }
        let storage = &self.storages[usize::from(id)];
        let was = self.lengths[usize::from(id)];
        let Some(problem) = cut(&**storage, was) else {
            return true;
        };
        if !self.complained.swap(true, Ordering::Relaxed) {
            let path = storage.path().display();
            tracing::error!("{path}: {problem}; reads of what is gone fail");
        }
        false
    }
}

/// What to say of a file that is no longer as long as it was.
fn cut(file: &dyn Storage, was: u64) -> Option<String> {
    let len = file.bytes().len().ok().filter(|len| *len < was)?;
    Some(format!(
        "was truncated while it was served, from {was} bytes to {len}"
    ))
}

impl Tables {
    /// False: the file was cut since it was taken into use. It is marked.
    pub(super) fn is_whole(&self) -> bool {
        // Before the file is looked at: it can become longer meanwhile.
        let was = self.file_len.load(Ordering::Acquire);
        let problem = cut(&*self.file, was);
        if let Some(problem) = &problem {
            self.mark_corrupt(problem);
        }
        problem.is_none()
    }

    /// Where the last of its clusters may end.
    pub(super) fn known_len(&self) -> u64 {
        let len = self.file_len.load(Ordering::Acquire);
        // The file could not be made longer in advance.
        len.max(self.used.load(Ordering::Relaxed))
    }

    /// The file is as long as it was, which is not beyond `at`.
    fn may_end(&self, at: HostOffset) -> bool {
        let len = self.known_len();
        if at.0 >= len.next_multiple_of(self.layout.cluster_size()) {
            self.complain(&format!(
                "has entries for what is beyond its end, at {len} bytes: it reads as zeroes, but \
                 was data; check it (fathom img check)"
            ));
        }
        true
    }

    /// Whether guest data may be written to `len` bytes at `at` of the data
    /// storage: not where metadata is. With a filter, a lock is taken only if
    /// there may be some.
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

    /// Nothing is written any more; the image says so to whoever opens it
    /// next. Said once.
    #[cold]
    pub(super) fn mark_corrupt(&self, problem: &str) {
        if self.corrupt.swap(true, Ordering::SeqCst) {
            return;
        }
        let path = self.file.path().display();
        let marked = match (self.writable, &self.layout) {
            (true, Layout::Qcow2(g)) if g.version >= 3 => self.set_corrupt_bit(),
            _ => Ok(()),
        };
        let fate = match (self.writable, marked) {
            (false, _) => "reads of it fail".to_owned(),
            (true, Ok(())) => {
                "nothing is written to it any more; check it (fathom img check)".into()
            }
            (true, Err(error)) => format!("nothing is written to it any more ({error})"),
        };
        tracing::error!("{path}: is corrupt: {problem}; {fate}");
    }

    /// The header was written by somebody who may not have seen that it says so.
    pub(super) fn say_corrupt_again(&self) {
        if self.corrupt.load(Ordering::SeqCst)
            && matches!(&self.layout, Layout::Qcow2(g) if g.version >= 3)
            && let Err(error) = self.set_corrupt_bit()
        {
            let path = self.file.path().display();
            tracing::error!("{path}: its header does not say that it is corrupt: {error}");
        }
    }

    /// Guest data that cannot be read; said once for all of it.
    #[cold]
    pub(super) fn complain(&self, problem: &str) {
        if !self.complained.swap(true, Ordering::Relaxed) {
            tracing::error!("{}: {problem}", self.file.path().display());
        }
    }

    /// Blocks, once in the image's life. A file that is no image any more stays
    /// as it is.
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
