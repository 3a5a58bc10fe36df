//! Compressed writes.
//!
//! A helper compresses the guest's cluster. The stream is written to the file together with other
//! streams that are ready by then. The cluster's entry is linked when the write has ended, as in
//! [`super::write`].
//!
//! The streams of one write follow each other without a gap. The next write starts at the next
//! physical block, although this wastes the rest of the last block: bytes that were written, and
//! may be durable, are never written again. While more clusters are being compressed, a write is
//! therefore delayed until it wastes little.

use super::active::Active;
use super::io::{Errno, Payload};
use super::layout::Layout;
use super::segments::Source;
use super::tables::Tables;
use super::worker_io::TaskIo;
use super::write::Write;
use crate::qcow2::{L2Entry, compress};
use crate::{GuestOffset, HostOffset};
use fathom_core::segments::read_at;
use fathom_core::{Op, Segments};
use parking_lot::Mutex;
use std::future::poll_fn;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

/// Number of bytes that are written without waiting for more. A write is not longer than this,
/// unless a single cluster is.
const ENOUGH: usize = 1 << 20;

/// A write that wastes no more than its length divided by this number is not delayed.
const LITTLE: usize = 32;

/// Size in bytes of the largest physical block that is taken into account.
const BLOCK: usize = 4096;

/// A compressed cluster, as it is stored in the file.
struct Piece {
    stream: Vec<u8>,
    /// Where it was written, or the error of the write.
    place: OnceLock<Result<HostOffset, Errno>>,
}

/// Compressed clusters of all workers that wait to be written.
#[derive(Default)]
pub(super) struct Packer(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    /// Number of clusters that helpers are compressing.
    compressing: usize,
    ready: Vec<Arc<Piece>>,
    /// Whether a task is writing.
    writing: bool,
    waiting: Vec<Waker>,
}

impl Queue {
    /// Returns the pieces to write now; `None` if there is nothing to write yet.
    ///
    /// If no cluster is being compressed, these are all pieces that are ready. Otherwise only as
    /// many as nearly fill their last block.
    fn next(&mut self) -> Option<Vec<Arc<Piece>>> {
        if self.writing || self.ready.is_empty() {
            return None;
        }
        let is_last = self.compressing == 0;
        let count = self.worth_writing(is_last)?;
        self.writing = true;
        Some(self.ready.drain(..count).collect())
    }

    /// Returns how many of the first ready pieces are worth a write now.
    fn worth_writing(&self, all: bool) -> Option<usize> {
        let (mut bytes, mut count) = (0, 0);
        for (n, piece) in self.ready.iter().enumerate() {
            bytes += piece.stream.len();
            let is_full = bytes > ENOUGH;
            if is_full && n > 0 {
                return Some(if count > 0 { count } else { n });
            }
            let wasted = bytes.next_multiple_of(BLOCK) - bytes;
            if all || is_full || wasted * LITTLE <= bytes {
                count = n + 1;
            }
        }
        (count > 0).then_some(count)
    }
}

/// Counts a cluster as being compressed until it is dropped.
struct Compressing<'a>(&'a Packer);

impl Drop for Compressing<'_> {
    fn drop(&mut self) {
        self.0.change(|queue| queue.compressing -= 1);
    }
}

/// A task's turn to write, which ends when it is dropped.
struct Writing<'a>(&'a Packer);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.change(|queue| queue.writing = false);
    }
}

impl Packer {
    /// Changes the queue and wakes all tasks that wait for a change.
    fn change(&self, change: impl FnOnce(&mut Queue)) {
        let mut queue = self.0.lock();
        change(&mut queue);
        let waiting = std::mem::take(&mut queue.waiting);
        drop(queue);
        waiting.into_iter().for_each(Waker::wake);
    }

    fn compressing(&self) -> Compressing<'_> {
        self.0.lock().compressing += 1;
        Compressing(self)
    }

    /// Waits until the piece is written, or until this task has to write pieces.
    ///
    /// The pieces to write may be those of other tasks.
    fn poll(&self, cx: &Context, piece: &Piece) -> Poll<Turn<'_>> {
        let mut queue = self.0.lock();
        if let Some(place) = piece.place.get() {
            return Poll::Ready(Turn::Written(*place));
        }
        match queue.next() {
            Some(pieces) => Poll::Ready(Turn::Write(Writing(self), pieces)),
            None => {
                queue.waiting.push(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

enum Turn<'a> {
    Written(Result<HostOffset, Errno>),
    Write(Writing<'a>, Vec<Arc<Piece>>),
}

impl Active {
    /// Writes `range`, which is all of `segments`.
    ///
    /// Stores it compressed if it is a whole cluster that becomes smaller by that.
    pub(super) async fn write_compressed(
        &self,
        io: &TaskIo,
        tables: &Tables,
        segments: &Segments,
        range: Range<GuestOffset>,
    ) -> Result<(), Errno> {
        if tables.compresses(&range)
            && let Some(stream) = self.compress(tables, segments).await
        {
            return tables.write_stream(io, stream, range.start).await;
        }
        let write = Write {
            start: range.start,
            source: Source::Guest(segments.clone()),
        };
        self.write(io, tables, &write, range).await
    }

    /// Returns the compressed cluster, or `None` if it is not smaller or no helper is available.
    async fn compress(&self, tables: &Tables, segments: &Segments) -> Option<Vec<u8>> {
        let size = tables.layout.cluster_size() as usize;
        // The disk may end before its last cluster does.
        let mut cluster = vec![0; size];
        // SAFETY: the segments are those of a request in flight.
        unsafe { read_at(segments, 0, &mut cluster) };
        let kind = tables.compression;
        let _compressing = tables.packer.compressing();
        let job = move || {
            let mut stream = vec![0; size - 1];
            let len = compress(kind, &cluster, &mut stream)?;
            stream.truncate(len);
            stream.shrink_to_fit();
            Some(stream)
        };
        self.helpers.run(job).await.flatten()
    }
}

impl Tables {
    /// Returns the bytes that are compressed together; `None` if the image has no such clusters.
    pub(super) fn compress_unit(&self) -> Option<u64> {
        let is_qcow2 = matches!(self.layout, Layout::Qcow2(_));
        (is_qcow2 && !self.has_data_file && !self.is_encrypted).then(|| self.layout.cluster_size())
    }

    /// Returns whether this range can become a compressed cluster.
    ///
    /// With a journal it cannot. A successor could not tell how many of the compressed clusters in
    /// the journal are already counted by the refcounts on disk.
    fn compresses(&self, range: &Range<GuestOffset>) -> bool {
        let size = self.layout.cluster_size();
        let len = range.end - range.start;
        let is_whole = len == size || len < size && range.end.0 == self.size();
        range.start.within(size) == 0 && is_whole && self.state().journal.is_none()
    }

    /// Writes the compressed stream and links the guest cluster to it.
    async fn write_stream(
        &self,
        io: &TaskIo,
        stream: Vec<u8>,
        guest: GuestOffset,
    ) -> Result<(), Errno> {
        let Layout::Qcow2(g) = &self.layout else {
            return Err(libc::ENOTSUP);
        };
        let number = guest.cluster(self.layout.cluster_bits());
        let _allocating = self.allocating.lock(number..number + 1).await;
        let slice = self.slice_to_change(io, guest).await?;
        let index = self.index_of(guest);
        let file_len = self.file_len.load(Ordering::Relaxed);
        let old = self.layout.decode(slice.0.entry(index), guest, file_len);
        let old = self.checked_entry(old)?;
        let len = stream.len() as u64;
        let at = self.put(io, stream).await?;
        let Some(entry) = L2Entry::compressed(g, at, len) else {
            self.give_back_bytes(at..at + len);
            return Err(libc::EFBIG);
        };
        let mut state = self.state();
        state.unlinked.extend(self.referred(&old));
        self.link(&mut state, &slice, index, entry);
        Ok(())
    }

    /// Writes the stream to the file, together with others, and returns its offset.
    async fn put(&self, io: &TaskIo, stream: Vec<u8>) -> Result<HostOffset, Errno> {
        let piece = Arc::new(Piece {
            stream,
            place: OnceLock::new(),
        });
        self.packer.0.lock().ready.push(piece.clone());
        loop {
            match poll_fn(|cx| self.packer.poll(cx, &piece)).await {
                Turn::Written(place) => return place,
                Turn::Write(_writing, pieces) => self.put_all(io, &pieces).await,
            }
        }
    }

    async fn put_all(&self, io: &TaskIo, mut pieces: &[Arc<Piece>]) {
        while !pieces.is_empty() {
            match self.put_some(io, pieces).await {
                Ok(count) => pieces = &pieces[count..],
                Err(errno) => {
                    let settle = |piece: &Arc<Piece>| piece.place.set(Err(errno));
                    pieces.iter().try_for_each(settle).expect("each once");
                    return;
                }
            }
        }
    }

    /// Writes the first of these pieces and returns how many it has written.
    async fn put_some(&self, io: &TaskIo, pieces: &[Arc<Piece>]) -> Result<usize, Errno> {
        let lens: Vec<u64> = pieces.iter().map(|p| p.stream.len() as u64).collect();
        let packed = self.allocate_bytes(io, &lens).await?;
        let start = packed.places[0];
        let mut buf = io.buf((packed.end - start) as usize);
        let mut rest = buf.bytes_mut();
        let mut done = start;
        for (piece, at) in pieces.iter().zip(&packed.places) {
            let (gap, room) = rest.split_at_mut((*at - done) as usize);
            let (room, after) = room.split_at_mut(piece.stream.len());
            gap.fill(0);
            room.copy_from_slice(&piece.stream);
            rest = after;
            done = *at + piece.stream.len() as u64;
        }
        rest.fill(0);
        let payload = Payload::of(Rc::new(buf));
        let written = io.data(self.storage, Op::Write, start, payload).await;
        for ((piece, at), len) in pieces.iter().zip(&packed.places).zip(lens) {
            match written {
                Ok(()) => piece.place.set(Ok(*at)).expect("each once"),
                Err(_) => self.give_back_bytes(*at..*at + len),
            }
        }
        written.map(|()| packed.places.len())
    }
}
