//! Reports which parts of a file hold data, according to its file system.

use super::channel::FileChannel;
use super::{Kind, Shared};
use fathom_core::{Cx, Extents, RequestId, Stage, Status};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

impl FileChannel {
    /// Answers inline: file systems keep this information in memory, and otherwise need only a read
    /// of metadata.
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
    /// Returns the status of the bytes from `at` on and the end of that status, which is beyond
    /// `at`. Bytes of unknown status count as data.
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
            // No data up to the end of the file, and zeroes beyond it.
            Err(Errno::NXIO) => (Status::HOLE, u64::MAX),
            Err(_) => (Status::DATA, u64::MAX),
        }
    }
}
