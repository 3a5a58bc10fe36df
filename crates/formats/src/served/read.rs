//! Reads that take several steps: for missing tables, several places, or compressed clusters.

use super::active::{Active, Layer, Place};
use super::io::{Buf, Errno, Io, Payload};
use super::worker_io::TaskIo;
use super::write_back::all;
use crate::GuestOffset;
use crate::qcow2::Compressed;
use crate::qcow2::decompress;
use fathom_core::segments::{clear, pieces, write_at};
use fathom_core::{Op, Segments};
use smallvec::SmallVec;
use std::ops::Range;
use std::rc::Rc;

impl Active {
    /// Reads from `guest` on into all of `payload`, as the layers from `first` on see it.
    pub(super) async fn read(
        &self,
        io: &TaskIo,
        first: usize,
        guest: GuestOffset,
        payload: &Payload,
    ) -> Result<(), Errno> {
        let len = payload.len();
        let mut done = 0;
        let mut started = SmallVec::<[_; 4]>::new();
        let mut outcome = Ok(());
        while done < len {
            let place = self.place(io, first, guest + done, len - done).await;
            let (place, n) = match place {
                Ok(found) => found,
                Err(errno) => {
                    outcome = Err(errno);
                    break;
                }
            };
            let segments: Segments = pieces(&payload.segments, done..done + n).collect();
            match place {
                Place::Data { storage, at } => {
                    let keep = payload.keep.clone();
                    let payload = Payload { segments, keep };
                    started.push(io.data(storage, Op::Read, at, payload));
                }
                // SAFETY: the segments are those of a request in flight, or of a buffer that
                // `payload` owns.
                Place::Zero => unsafe { clear(&segments, 0..u64::MAX) },
                Place::Compressed {
                    layer,
                    cluster,
                    range,
                } => {
                    let skip = guest + done - cluster;
                    let read = self.read_compressed(io, layer, range, skip, &segments);
                    outcome = outcome.and(read.await);
                }
            }
            done += n;
        }
        all(started).await.and(outcome)
    }

    /// Reads a compressed cluster from byte `skip` on.
    async fn read_compressed(
        &self,
        io: &TaskIo,
        layer: usize,
        range: Compressed,
        skip: u64,
        segments: &Segments,
    ) -> Result<(), Errno> {
        let Layer::Tables(tables) = &self.layers[layer] else {
            unreachable!("raw images have no compressed clusters");
        };
        // Reads whole sectors, which suits direct I/O.
        let start = range.offset.down_to(512);
        let len = (range.offset + range.len).up_to(512) - start;
        let buf = Io::read(io, tables.storage, start, len as usize).await?;
        let stream = buf.bytes()[(range.offset - start) as usize..][..range.len as usize].to_vec();
        let (kind, size) = (tables.compression, tables.layout.cluster_size() as usize);
        let job = move || {
            let mut cluster = vec![0; size];
            decompress(kind, &stream, &mut cluster).map(|()| cluster)
        };
        let cluster = match self.helpers.run(job).await {
            Some(Ok(cluster)) => cluster,
            Some(Err(problem)) => {
                let offset = range.offset;
                tables.complain(&format!("the compressed cluster at {offset:#x}: {problem}"));
                return Err(libc::EIO);
            }
            None => return Err(libc::EIO),
        };
        // SAFETY: the segments are those of a request in flight or of a buffer that outlives this
        // call.
        unsafe { write_at(segments, 0, &cluster[skip as usize..]) };
        Ok(())
    }

    /// Returns a buffer with these bytes as the guest sees them.
    pub(super) async fn read_buf(
        &self,
        io: &TaskIo,
        guest: Range<GuestOffset>,
    ) -> Result<Rc<Buf>, Errno> {
        let buf = Rc::new(io.buf((guest.end - guest.start) as usize));
        let payload = Payload::of(buf.clone());
        self.read(io, 0, guest.start, &payload).await?;
        Ok(buf)
    }
}
