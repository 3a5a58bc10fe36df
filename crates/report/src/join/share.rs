//! Tells the disk's requests to the host's device from those of the device's other users.

use fathom_run::{Event, Extent, Run};

use super::way::{Class, Key};

/// The disk's share of the host's device.
#[derive(Clone, Debug, Default)]
pub(crate) struct Share {
    dev: Option<u64>,
    /// The image's extents, in order of their physical offset; empty if they are not known.
    placed: Vec<Extent>,
    /// All threads of the process that serves the disk.
    threads: Vec<u32>,
}

impl Share {
    /// Returns the share of the disk under test of `run`.
    pub(crate) fn of(run: &Run) -> Share {
        let disk = run.disk();
        let mut placed = disk.map_or(Vec::new(), |disk| disk.extents.clone());
        placed.sort_by_key(|extent| extent.physical);
        let server = disk.and_then(|disk| disk.server_pid);
        let threads = run.threads.iter();
        let own = threads.filter(|thread| server.is_none_or(|server| server == thread.pid));
        Share {
            dev: disk.and_then(|disk| Some(disk.host.as_ref()?.dev)),
            placed,
            threads: own.map(|thread| thread.tid).collect(),
        }
    }

    /// Returns whether the disk's requests to the host's device can be distinguished from others.
    pub(crate) fn is_known(&self) -> bool {
        self.dev.is_some() && (self.is_placed() || !self.threads.is_empty())
    }

    /// Returns whether the places of the image's bytes on the device are known.
    pub(crate) fn is_placed(&self) -> bool {
        !self.placed.is_empty()
    }

    /// Returns the key of a block event in bytes of the device; None for other devices.
    pub(crate) fn key(&self, event: &Event) -> Option<Key> {
        let [dev, sector, sectors, flags, ..] = event.args;
        (Some(dev) == self.dev).then(|| Key::sectors(flags, sector, sectors))
    }

    /// Returns whether a request that the thread `tid` issues is the disk's. The bytes of the
    /// request show that. Without known places, and for a flush, only the server's threads do.
    pub(crate) fn holds(&self, key: &Key, tid: u32) -> bool {
        self.contains(key)
            .unwrap_or_else(|| self.threads.contains(&tid))
    }

    /// Returns whether the image has bytes of the request; None if bytes do not show that.
    pub(crate) fn contains(&self, key: &Key) -> Option<bool> {
        if self.placed.is_empty() || key.class == Class::Flush {
            return None;
        }
        let after = self.placed.partition_point(|e| e.physical < key.end());
        let last = after.checked_sub(1).and_then(|i| self.placed.get(i));
        Some(last.is_some_and(|e| e.physical.saturating_add(e.length) > key.offset))
    }

    /// Converts a key from bytes of the device to bytes of the image. Without known places, the key
    /// stays in bytes of the device.
    pub(crate) fn image_key(&self, key: Key) -> Key {
        let after = self.placed.partition_point(|e| e.physical <= key.offset);
        let extent = after.checked_sub(1).and_then(|i| self.placed.get(i));
        let offset = extent.map_or(key.offset, |extent| {
            let inside = key.offset - extent.physical;
            extent.offset.saturating_add(inside)
        });
        Key { offset, ..key }
    }
}
