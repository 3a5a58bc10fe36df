//! Data that was read ahead, or is being read.

use super::regions::{Regions, Seen};
use fathom_core::AlignedBuffer;
use fathom_core::segments::write_at;
use fathom_core::{Channel, Cx, Op, Owner, RequestId, Stage};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A range of the disk in memory.
struct Window {
    offset: u64,
    len: u64,
    buffer: AlignedBuffer,
    seen: Seen,
    /// The child that fills the window.
    filling: Option<RequestId>,
    /// Requests that wait for the child.
    waiting: Vec<RequestId>,
    /// Time of last use, as a count of uses.
    used: u64,
}

/// The windows of one worker.
pub(super) struct Windows {
    windows: Vec<Window>,
    owner: Owner,
    /// Size of the disk in bytes.
    disk: Arc<AtomicU64>,
    uses: u64,
}

pub(super) enum Hit {
    /// The data is in memory.
    Here(usize),
    /// The data is being read.
    Coming(usize),
}

impl Windows {
    pub(super) fn new(cx: &mut Cx, most: usize, disk: Arc<AtomicU64>) -> io::Result<Windows> {
        Ok(Windows {
            windows: Vec::new(),
            owner: cx.reserve_children(most)?,
            disk,
            uses: 0,
        })
    }

    /// Returns the window that contains the whole range in its current state on the disk.
    pub(super) fn find(&mut self, regions: &Regions, offset: u64, len: u64) -> Option<Hit> {
        let end = offset.checked_add(len)?;
        let n = self.windows.iter().position(|w| {
            w.offset <= offset
                && end <= w.offset + w.len
                && regions.look(w.offset, w.len) == Some(w.seen)
        })?;
        self.uses += 1;
        self.windows[n].used = self.uses;
        Some(match self.windows[n].filling {
            None => Hit::Here(n),
            Some(_) => Hit::Coming(n),
        })
    }

    pub(super) fn serve(&mut self, cx: &mut Cx, id: RequestId, n: usize) {
        cx.enter(id, Stage::Map);
        cx.enter(id, Stage::Device);
        let request = &cx.slab[id];
        let window = &self.windows[n];
        let from = (request.offset - window.offset) as usize;
        // SAFETY: the source guarantees that the request's segments are valid.
        unsafe { write_at(&request.segments, 0, &window.buffer.bytes()[from..]) };
        cx.complete(id, 0);
    }

    pub(super) fn wait(&mut self, cx: &mut Cx, id: RequestId, n: usize) {
        cx.enter(id, Stage::Map);
        cx.enter(id, Stage::Device);
        self.windows[n].waiting.push(id);
    }

    /// Reads up to `size` bytes at `offset` into one of at most `most` windows. Returns the number
    /// of bytes: 0 if there is no room or nothing to read.
    pub(super) fn fetch(
        &mut self,
        cx: &mut Cx,
        below: &mut dyn Channel,
        regions: &Regions,
        source: u16,
        offset: u64,
        (most, size): (usize, u64),
    ) -> u64 {
        let disk = self.disk.load(Ordering::Relaxed);
        let len = size.min(disk.saturating_sub(offset));
        let Some(seen) = regions.look(offset, len).filter(|_| len > 0) else {
            return 0;
        };
        let Some(buffer) = self.room(most, size) else {
            return 0;
        };
        let Some(child) = cx.slab.take() else {
            return 0;
        };
        let request = &mut cx.slab[child];
        request.stamps = Default::default();
        request.op = Op::Read;
        (request.fua, request.unmap, request.error) = (false, false, 0);
        (request.owner, request.source) = (self.owner, source);
        (request.offset, request.at, request.len) = (offset, offset, len);
        request.segments.clear();
        request.segments.push(buffer.iovec(len as usize));
        self.uses += 1;
        self.windows.push(Window {
            offset,
            len,
            buffer,
            seen,
            filling: Some(child),
            waiting: Vec::new(),
            used: self.uses,
        });
        below.submit(cx, child);
        len
    }

    /// Returns a buffer of `size` bytes: a new one, or that of the least recently used window.
    fn room(&mut self, most: usize, size: u64) -> Option<AlignedBuffer> {
        // The number and size of windows may have changed.
        while self.windows.len() > most {
            self.take_oldest()?;
        }
        if self.windows.len() < most {
            return Some(AlignedBuffer::new(size as usize));
        }
        let buffer = self.take_oldest()?.buffer;
        match buffer.len() == size as usize {
            true => Some(buffer),
            false => Some(AlignedBuffer::new(size as usize)),
        }
    }

    fn take_oldest(&mut self) -> Option<Window> {
        let windows = self.windows.iter().enumerate();
        let full = windows.filter(|(_, w)| w.filling.is_none());
        let (oldest, _) = full.min_by_key(|(_, w)| w.used)?;
        Some(self.windows.swap_remove(oldest))
    }

    /// Serves requests that wait for data that has now been read.
    pub(super) fn settle(&mut self, cx: &mut Cx, below: &mut dyn Channel, regions: &Regions) {
        while let Some(child) = cx.child_done(self.owner) {
            let error = cx.slab[child].error;
            cx.slab.put(child);
            let filled = |w: &Window| w.filling == Some(child);
            let Some(n) = self.windows.iter().position(filled) else {
                continue;
            };
            let window = &mut self.windows[n];
            window.filling = None;
            let waiting = std::mem::take(&mut window.waiting);
            let same = regions.look(window.offset, window.len) == Some(window.seen);
            for id in waiting {
                match error == 0 && same {
                    true => self.serve(cx, id, n),
                    // No client requested this child, so its error is not reported to anyone.
                    false => below.submit(cx, id),
                }
            }
            if error != 0 {
                self.windows.swap_remove(n);
            }
        }
    }
}

/// The kernel may still write to the buffers of children in flight, so they are leaked.
impl Drop for Windows {
    fn drop(&mut self) {
        for window in self.windows.drain(..).filter(|w| w.filling.is_some()) {
            std::mem::forget(window);
        }
    }
}
