//! Serves an image with arbitrary contents.

use super::{MemoryFile, MemoryStorage};
use crate::Format;
use crate::served::{ImageDisk, ImageOptions, Opener, Storage};
use fathom_core::testing::PollEngine;
use fathom_core::{Channel, Cx, Disk, DiskError, Op, Owner, RequestId, Stamps};
use libc::iovec;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum bytes of a request.
const LONGEST: usize = 64 << 10;

/// Maximum time for a request, including the wait for a helper thread on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// An opener that opens no files.
pub struct NoFiles;

impl Opener for NoFiles {
    fn open(&self, image: &Path, _: &[u8], _: bool) -> Result<Arc<dyn Storage>, DiskError> {
        Err(DiskError::Unusable {
            path: image.to_owned(),
            problem: "names a file".into(),
        })
    }

    fn open_data_file(
        &self,
        image: &Path,
        name: &[u8],
        writable: bool,
    ) -> Result<Arc<dyn Storage>, DiskError> {
        self.open(image, name, writable)
    }
}

/// Serves the image to a guest whose requests come from `data`, five bytes each.
///
/// Reads may return anything. Every request has to end, and nothing else may go wrong. Returns the
/// file afterwards, or `None` if the image could not be opened.
pub(super) fn serve(file: MemoryFile, format: Format, data: &[u8]) -> Option<MemoryStorage> {
    let storage = MemoryStorage::new(file, 0);
    let mut options = ImageOptions::new(format);
    options.metadata_cache = 64 << 10;
    let disk = ImageDisk::open(Arc::new(storage.clone()), Arc::new(NoFiles), options).ok()?;
    let mut cx = Cx::new(PollEngine::boxed().ok()?);
    cx.slab.grow(1);
    let mut channel = disk.channel(&mut cx).ok()?;
    disk.activate().ok()?;
    let mut buffer = vec![0xa5; LONGEST];
    for step in data.chunks_exact(5) {
        one(&disk, &mut cx, &mut *channel, step, &mut buffer);
    }
    let _ = disk.deactivate();
    Some(storage)
}

fn one(disk: &ImageDisk, cx: &mut Cx, channel: &mut dyn Channel, step: &[u8], buffer: &mut [u8]) {
    let sectors = disk.info().size / 512;
    let start = u64::from(u16::from_le_bytes([step[1], step[2]])) % sectors;
    let len = (u64::from(step[3]) % 128 + 1).min(sectors - start) * 512;
    let id = cx.slab.take().expect("one request at a time");
    let request = &mut cx.slab[id];
    request.op =
        [Op::Read, Op::Write, Op::WriteZeroes, Op::Discard, Op::Flush][usize::from(step[0]) % 5];
    request.fua = step[4] & 1 != 0;
    request.unmap = step[4] & 2 != 0;
    request.owner = Owner::SOURCE;
    request.error = 0;
    request.stamps = Stamps::start(0);
    (request.offset, request.at, request.len) = (start * 512, start * 512, len);
    request.segments.clear();
    request.segments.push(iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: len as usize,
    });
    channel.submit(cx, id);
    let mut since = None;
    while cx.take_done().is_empty() {
        let since = *since.get_or_insert_with(Instant::now);
        assert!(since.elapsed() < PATIENCE, "a request does not end");
        std::thread::yield_now();
        channel.complete(cx, RequestId::NOBODY, cx.newest_tag(), 0);
    }
    cx.slab.put(id);
}
