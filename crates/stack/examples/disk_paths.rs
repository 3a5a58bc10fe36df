//! The paths of a request through filters and images, above storage that completes each request of
//! the guest at once. `tools/bench/instructions.py` counts their instructions.

use fathom_core::testing::PollEngine;
use fathom_core::{
    Changes, Channel, Cx, Disk, DiskError, DiskInfo, Op, Owner, RequestId, Stage, Stamps,
};
use fathom_files::ImageFile;
use fathom_filters::Filters;
use fathom_formats::Format;
use fathom_formats::offline::create;
use fathom_formats::served::{ImageDisk, ImageOptions, Storage};
use fathom_formats::testing::{MemoryFile, MemoryStorage, NoFiles};
use fathom_storage::NullDisk;
use fathom_testing::count_instructions;
use libc::iovec;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const SIZE: u64 = 64 << 20;
const BLOCK: usize = 4096;
/// Number of requests that a path carries out, at different offsets.
const REQUESTS: u32 = 32;

fn main() {
    let null: Arc<dyn Disk> = Arc::new(NullDisk::new(SIZE));
    count("null disk, a read", Op::Read, null.clone(), || ());
    let filter = "readonly".parse().expect("a filter");
    let filter = Filters::default().make(&filter).expect("a filter");
    let filtered = fathom_filters::wrap(null, filter);
    count("filter that passes on, a read", Op::Read, filtered, || ());
    for (name, format, op) in [
        ("raw image, a read", Format::Raw, Op::Read),
        (
            "qcow2 image, a read of mapped data",
            Format::Qcow2,
            Op::Read,
        ),
        (
            "qcow2 image, a write of mapped data",
            Format::Qcow2,
            Op::Write,
        ),
        ("QED image, a read of mapped data", Format::Qed, Op::Read),
    ] {
        let storage = Instant::with_image(format);
        let completes_at_once = storage.completes_at_once.clone();
        let options = ImageOptions::new(format);
        let disk = ImageDisk::open(Arc::new(storage), Arc::new(NoFiles), options);
        let disk = Arc::new(disk.expect("a good image"));
        count(name, op, disk, || {
            completes_at_once.store(true, Ordering::Relaxed)
        });
    }
    let mut changes = Changes::new(SIZE);
    let mark = |changes: &mut Changes| {
        (0..REQUESTS).for_each(|n| changes.mark(offset(n), BLOCK as u64));
    };
    count_instructions(
        "dirty bitmap, a write",
        REQUESTS,
        &mut changes,
        |_| (),
        mark,
    );
}

/// Offset of the request `n`: each is in another cluster.
fn offset(n: u32) -> u64 {
    u64::from(n) << 16
}

/// A disk, and the context of its only worker.
struct Bed {
    cx: Cx,
    channel: Box<dyn Channel>,
    op: Op,
    ids: Vec<RequestId>,
    in_flight: usize,
}

/// Counts requests to a disk. `mapped` is called when all requests have been carried out once.
fn count(name: &str, op: Op, disk: Arc<dyn Disk>, mapped: impl FnOnce()) {
    let mut cx = Cx::new(PollEngine::boxed().expect("an engine"));
    cx.slab.grow(REQUESTS as usize);
    let channel = disk.channel(&mut cx).expect("a channel");
    disk.activate().expect("a good disk");
    let ids = (0..REQUESTS).map(|_| cx.slab.take().expect("room"));
    let ids = ids.collect();
    let mut bed = Bed {
        cx,
        channel,
        op,
        ids,
        in_flight: 0,
    };
    let mut data = vec![1u8; BLOCK];
    let is_read_only = disk.info().read_only;
    for first in [Op::Write, op] {
        bed.op = if is_read_only { op } else { first };
        bed.prepare(&mut data);
        bed.submit();
        bed.drain();
    }
    mapped();
    let mut state = (bed, data);
    let prepare = |(bed, data): &mut (Bed, Vec<u8>)| {
        bed.drain();
        bed.prepare(data);
    };
    count_instructions(name, REQUESTS, &mut state, prepare, |(bed, _)| bed.submit());
    let (mut bed, _) = state;
    bed.drain();
    disk.deactivate().expect("the disk ends");
}

impl Bed {
    fn prepare(&mut self, data: &mut [u8]) {
        for (n, id) in (0..).zip(&self.ids) {
            let request = &mut self.cx.slab[*id];
            (request.op, request.error, request.owner) = (self.op, 0, Owner::SOURCE);
            request.stamps = Stamps::start(0);
            (request.offset, request.at, request.len) = (offset(n), offset(n), BLOCK as u64);
            request.segments.clear();
            request.segments.push(iovec {
                iov_base: data.as_mut_ptr().cast(),
                iov_len: BLOCK,
            });
        }
    }

    fn submit(&mut self) {
        for id in &self.ids {
            self.channel.submit(&mut self.cx, *id);
        }
        self.in_flight = self.ids.len();
    }

    /// Waits until all requests have completed.
    fn drain(&mut self) {
        loop {
            self.in_flight -= self.cx.take_done().len();
            if self.in_flight == 0 {
                break;
            }
            let tag = self.cx.newest_tag();
            self.channel
                .complete(&mut self.cx, RequestId::NOBODY, tag, 0);
        }
        for id in &self.ids {
            assert_eq!(self.cx.slab[*id].error, 0, "a request has failed");
        }
    }
}

/// Storage in memory. Once `completes_at_once` is set, requests complete without touching data.
#[derive(Clone)]
struct Instant {
    memory: MemoryStorage,
    completes_at_once: Arc<AtomicBool>,
}

impl Instant {
    fn with_image(format: Format) -> Instant {
        let file = MemoryFile::new(Vec::new(), 2 * SIZE);
        match format {
            Format::Raw => file.set_len(SIZE).expect("room"),
            _ => {
                let options = create::Options::new(format);
                create::create(&file, None, &options, SIZE, None).expect("an image");
            }
        }
        Instant {
            memory: MemoryStorage::new(file, 0),
            completes_at_once: Arc::default(),
        }
    }
}

impl Storage for Instant {
    fn bytes(&self) -> &dyn ImageFile {
        self.memory.bytes()
    }

    fn disk(&self) -> &dyn Disk {
        self
    }

    fn path(&self) -> &Path {
        self.memory.path()
    }

    fn identity(&self) -> (u64, u64) {
        self.memory.identity()
    }
}

impl Disk for Instant {
    fn info(&self) -> DiskInfo {
        self.memory.info()
    }

    fn activate(&self) -> Result<(), DiskError> {
        self.memory.activate()
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        self.memory.deactivate()
    }

    fn channel(&self, _: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        Ok(Box::new(self.clone()))
    }
}

impl Channel for Instant {
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        if self.completes_at_once.load(Ordering::Relaxed) {
            cx.enter(id, Stage::Device);
            cx.complete(id, 0);
        } else {
            self.memory.submit(cx, id);
        }
    }

    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        self.memory.complete(cx, id, tag, result);
    }
}
