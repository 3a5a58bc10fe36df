//! What contradicts the format is found before it does harm, and said once.

use super::io::Errno;
use super::layout::Layout;
use super::metadata::Filter;
use super::tables::Tables;
use crate::qcow2::INCOMPATIBLE_CORRUPT;
use std::sync::atomic::Ordering;

impl Tables {
    /// Whether guest data may be written to `len` bytes at `at` of the data
    /// storage: not where metadata is. With a filter, a lock is taken only if
    /// there may be some.
    #[inline]
    pub(super) fn check_target(
        &self,
        filter: Option<&Filter>,
        at: u64,
        len: u64,
    ) -> Result<(), Errno> {
        if self.data != self.storage {
            return Ok(());
        }
        let bits = self.layout.cluster_bits();
        for cluster in at >> bits..(at + len).div_ceil(1 << bits) {
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

    /// Guest data that cannot be read; said once for all of it.
    #[cold]
    pub(super) fn complain(&self, problem: &str) {
        if !self.complained.swap(true, Ordering::Relaxed) {
            tracing::error!("{}: {problem}", self.file.path().display());
        }
    }

    /// Blocks, once in the image's life.
    fn set_corrupt_bit(&self) -> std::io::Result<()> {
        let mut word = [0; 8];
        self.file.read_at(&mut word, 72)?;
        let features = u64::from_be_bytes(word) | INCOMPATIBLE_CORRUPT;
        self.file.write_at(&features.to_be_bytes(), 72)?;
        self.file.sync()
    }
}
