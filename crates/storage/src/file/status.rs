//! Which parts of a file hold data, as its file system tells.

use super::channel::FileChannel;
use super::{Kind, Shared};
use fathom_core::{Cx, Extents, RequestId, Stage, Status};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

impl FileChannel {
    /// Answers at once: file systems keep this in memory, and where they do
    /// not it is a read of metadata.
    pub(super) fn block_status(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Device);
        let request = &cx.slab[id];
        // SAFETY: the request is in flight until `finish`.
        let mut out = unsafe { Extents::of(&request.segments, request.len) };
        let mut at = request.at;
        loop {
            let (status, end) = self.shared.status(at);
            let len = (end - at).min(out.left());
            if !out.push(status, len) {
                break;
            }
            at += len;
        }
        cx.tick();
        self.finish(cx, id, 0);
    }
}

impl Shared {
    /// What the bytes from `at` on are, and where that ends (beyond `at`).
    /// What cannot be told is data.
    fn status(&self, at: u64) -> (Status, u64) {
        if self.kind == Kind::BlockDevice {
            return (Status::DATA, u64::MAX);
        }
        match seek(&self.file, SeekFrom::Data(at)) {
            Ok(data) if data > at => (Status::HOLE, data),
            Ok(_) => match seek(&self.file, SeekFrom::Hole(at)) {
                Ok(hole) if hole > at => (Status::DATA, hole),
                _ => (Status::DATA, u64::MAX),
            },
            // No data up to its end, and zeroes follow that.
            Err(Errno::NXIO) => (Status::HOLE, u64::MAX),
            Err(_) => (Status::DATA, u64::MAX),
        }
    }
}
