//! Test bed: a qcow2 image in memory, in use, whose only worker is the test itself.

use super::{ImageDisk, ImageOptions};
use crate::Format;
use crate::offline::create;
use crate::testing::{MemoryFile, MemoryStorage, NoFiles};
use fathom_core::testing::PollEngine;
use fathom_core::{Channel, Cx, Disk, Op, Owner, RequestId, Stamps};
use libc::iovec;
use std::sync::Arc;

/// The disk, its file, and the worker's channel and context.
pub(super) struct Bed {
    pub(super) disk: Arc<ImageDisk>,
    pub(super) storage: MemoryStorage,
    channel: Box<dyn Channel>,
    cx: Cx,
}

impl Bed {
    /// Creates an image of `size` bytes with these options, and activates it.
    ///
    /// `change` may edit the file before the image is opened.
    pub(super) fn new(options: &[(&str, &str)], size: u64, change: impl FnOnce(&mut [u8])) -> Bed {
        let file = MemoryFile::new(Vec::new(), 64 << 20);
        let mut created = create::Options::new(Format::Qcow2);
        for (name, value) in options {
            let parse = |text: &str| text.parse().map_err(|_| text.to_owned());
            created.set(name, value, parse).unwrap();
        }
        create::create(&file, None, &created, size, None).unwrap();
        change(&mut file.bytes());
        let storage = MemoryStorage::new(file, 0);
        let options = ImageOptions {
            discard: true,
            metadata_cache: 0,
            ..ImageOptions::new(Format::Qcow2)
        };
        let own = Arc::new(storage.clone());
        let disk = ImageDisk::open(own, Arc::new(NoFiles), options).unwrap();
        let mut cx = Cx::new(PollEngine::boxed().unwrap());
        cx.slab.grow(1);
        let channel = disk.channel(&mut cx).unwrap();
        disk.activate().unwrap();
        let disk = Arc::new(disk);
        Bed {
            disk,
            storage,
            channel,
            cx,
        }
    }

    /// Runs a request to its end and returns its error number, 0 for success.
    pub(super) fn request(&mut self, op: Op, at: u64, len: usize, fua: bool) -> i32 {
        let mut data = vec![1u8; len];
        let id = self.cx.slab.take().unwrap();
        let request = &mut self.cx.slab[id];
        (request.op, request.fua, request.error) = (op, fua, 0);
        request.owner = Owner::SOURCE;
        request.stamps = Stamps::start(0);
        (request.offset, request.at, request.len) = (at, at, len as u64);
        request.segments.clear();
        request.segments.push(iovec {
            iov_base: data.as_mut_ptr().cast(),
            iov_len: data.len(),
        });
        self.channel.submit(&mut self.cx, id);
        while self.cx.take_done().is_empty() {
            let (nobody, tag) = (RequestId::NOBODY, self.cx.newest_tag());
            self.channel.complete(&mut self.cx, nobody, tag, 0);
        }
        let error = self.cx.slab[id].error;
        self.cx.slab.put(id);
        error
    }
}
