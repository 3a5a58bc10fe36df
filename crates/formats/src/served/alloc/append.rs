//! Free space of QED images: what comes after the file's end.

use super::{AHEAD, EXTENSION, Run, Space};
use crate::HostOffset;
use crate::served::io::{Buf, Errno, Io};
use crate::served::tables::Tables;
use std::sync::atomic::Ordering;

pub(in crate::served) struct Append {
    /// The next free cluster, and the first one beyond the end of the file.
    pub(super) next: u64,
    pub(super) end: u64,
    /// Clusters that were allocated and returned.
    returned: Vec<u64>,
    /// False for a device, which cannot grow.
    pub(super) grows: bool,
}

impl Append {
    /// Creates the free space; `file_len` is a multiple of the cluster size.
    pub(in crate::served) fn new(cluster_bits: u32, file_len: u64, grows: bool) -> Append {
        Append {
            next: file_len >> cluster_bits,
            end: file_len >> cluster_bits,
            returned: Vec::new(),
            grows,
        }
    }

    pub(super) fn take(&mut self, n: u64, exact: bool) -> Option<Run> {
        if (n == 1 || !exact)
            && let Some(cluster) = self.returned.pop()
        {
            return Some(Run {
                clusters: cluster..cluster + 1,
                fresh: false,
            });
        }
        let there = self.end - self.next;
        if there == 0 || exact && there < n {
            return None;
        }
        let start = self.next;
        self.next += n.min(there);
        Some(Run {
            clusters: start..self.next,
            fresh: true,
        })
    }

    pub(super) fn give_back(&mut self, run: &Run) {
        self.returned.extend(run.clusters.clone());
    }
}

impl Tables {
    /// Makes the file longer by at least `n` clusters.
    pub(super) async fn extend_file(&self, io: &impl Io, n: u64) -> Result<(), Errno> {
        let bits = self.layout.cluster_bits();
        let (end, grows) = match &self.state().alloc.space {
            Space::Append(space) => (space.end, space.grows),
            _ => return Err(libc::EROFS),
        };
        if !grows {
            return Err(libc::ENOSPC);
        }
        // The file's length bounds the valid clusters, so each step costs a write.
        let step = ((end << bits) / 4).clamp(AHEAD.start, AHEAD.end);
        let new_end = end + n.max(step >> bits);
        let len = new_end << bits;
        let block = Buf::new(EXTENSION);
        let at = HostOffset(len - EXTENSION as u64);
        io.write(self.storage, at, block).await?;
        if let Space::Append(space) = &mut self.state().alloc.space {
            space.end = new_end;
        }
        self.file_len.store(len, Ordering::Relaxed);
        Ok(())
    }
}
