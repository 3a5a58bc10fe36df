//! A front-end that is none of ours: the `virtio-driver` crate, as user-space
//! programs use it to reach a disk without a virtual machine.

mod support;

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use support::{Served, as_arg};
use virtio_driver::{
    EventFd, VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport,
    VirtioFeatureFlags,
};

const BLOCK: usize = 4096;
const BLOCKS: usize = 256;
const QUEUES: usize = 2;
const QUEUE_SIZE: u16 = 64;

/// The context of a request: the block that it is for.
type Queue<'a> = VirtioBlkQueue<'a, usize>;

/// Shared memory for the data: one block each.
struct Buffers {
    base: *mut u8,
    _file: File,
}

impl Buffers {
    fn new(transport: &mut VirtioBlkTransport) -> Buffers {
        let file = tempfile::tempfile_in("/dev/shm").expect("shared memory");
        let len = BLOCK * BLOCKS;
        file.set_len(len as u64).expect("sized");
        // SAFETY: a new shared mapping of a file that has this length.
        let base = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let hint = std::ptr::null_mut();
            libc::mmap(hint, len, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        assert_ne!(base, libc::MAP_FAILED);
        transport
            .map_mem_region(base as usize, len, file.as_raw_fd(), 0)
            .expect("the server takes the memory");
        Buffers {
            base: base.cast(),
            _file: file,
        }
    }

    #[expect(clippy::mut_from_ref, reason = "each block is used by one request")]
    fn block(&self, index: usize) -> &mut [u8] {
        assert!(index < BLOCKS);
        // SAFETY: within the mapping, which lives as long as the process; the
        // test uses a block only while no request does.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(index * BLOCK), BLOCK) }
    }
}

fn connect(sock: &str) -> Box<VirtioBlkTransport> {
    let features = VirtioBlkFeatureFlags::FLUSH
        | VirtioBlkFeatureFlags::DISCARD
        | VirtioBlkFeatureFlags::WRITE_ZEROES
        | VirtioBlkFeatureFlags::MQ;
    let ring = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
    let transport = VhostUser::new(sock, features.bits() | ring.bits()).expect("connected");
    Box::new(transport)
}

/// What the server has answered, by context; waits until it has answered
/// `count` requests.
fn completions(queue: &mut Queue<'_>, call: &EventFd, count: usize) -> HashMap<usize, i32> {
    let mut done = HashMap::new();
    while done.len() < count {
        queue.set_used_notif_enabled(true);
        let mut any = false;
        for completion in queue.completions() {
            let twice = done.insert(completion.context, completion.ret);
            assert_eq!(twice, None, "answered twice");
            any = true;
        }
        if !any {
            call.read().expect("an interrupt");
        }
    }
    done
}

fn pattern(block: usize) -> Vec<u8> {
    (0..BLOCK).map(|i| (block * 31 + i * 7) as u8).collect()
}

/// Write half of the blocks by each queue, flush, and read all of them back
/// by the other queue.
fn write_and_read(sock: &str) {
    let mut transport = connect(sock);
    let buffers = Buffers::new(&mut *transport);
    let mut queues = Queue::setup_queues(&mut *transport, QUEUES, QUEUE_SIZE).expect("queues");
    let batch = usize::from(QUEUE_SIZE) / 4;
    for (step, first) in (0..BLOCKS).step_by(batch).enumerate() {
        let index = step % QUEUES;
        let call = transport.get_completion_fd(index);
        let kick = transport.get_submission_notifier(index);
        let queue = &mut queues[index];
        for block in first..first + batch {
            buffers.block(block).copy_from_slice(&pattern(block));
            let offset = (block * BLOCK) as u64;
            queue
                .write(offset, buffers.block(block), block)
                .expect("queued");
        }
        kick.notify().expect("kicked");
        let done = completions(queue, &call, batch);
        assert!(done.values().all(|ret| *ret == 0), "{done:?}");
        queue.flush(usize::MAX).expect("queued");
        kick.notify().expect("kicked");
        assert_eq!(completions(queue, &call, 1)[&usize::MAX], 0);
    }
    for (step, first) in (0..BLOCKS).step_by(batch).enumerate() {
        let index = (step + 1) % QUEUES;
        let call = transport.get_completion_fd(index);
        let queue = &mut queues[index];
        for block in first..first + batch {
            buffers.block(block).fill(0xee);
            let offset = (block * BLOCK) as u64;
            queue
                .read(offset, buffers.block(block), block)
                .expect("queued");
        }
        let kick = transport.get_submission_notifier(index);
        kick.notify().expect("kicked");
        let done = completions(queue, &call, batch);
        assert!(done.values().all(|ret| *ret == 0), "{done:?}");
        for block in first..first + batch {
            assert_eq!(buffers.block(block), pattern(block), "block {block}");
        }
    }
    write_zeroes(&*transport, &mut queues[0]);
}

/// The first block becomes zeroes; a request past the end is an error and
/// nothing more.
fn write_zeroes(transport: &VirtioBlkTransport, queue: &mut Queue<'_>) {
    let call = transport.get_completion_fd(0);
    let end = (BLOCK * BLOCKS) as u64;
    queue
        .write_zeroes(0, BLOCK as u64, true, 1)
        .expect("queued");
    queue
        .write_zeroes(end, BLOCK as u64, false, 2)
        .expect("queued");
    let kick = transport.get_submission_notifier(0);
    kick.notify().expect("kicked");
    let done = completions(queue, &call, 2);
    assert_eq!(done[&1], 0);
    assert!(done[&2] < 0, "{done:?}");
}

#[test]
fn a_driver_that_is_not_ours_reads_what_it_wrote() {
    for aio in ["io_uring", "native", "threads"] {
        let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let image = scratch.path().join("image");
        let file = File::create(&image).expect("an image");
        file.set_len((BLOCK * BLOCKS) as u64).expect("sized");
        let mut served = Served::start(&as_arg(&image), &["--aio", aio, "--iothreads", "2"]);
        write_and_read(&served.arg("s"));
        assert_eq!(served.terminate().0, Some(0));

        let mut contents = vec![0; BLOCK];
        let file = File::open(image).expect("the image");
        for block in 0..BLOCKS {
            file.read_exact_at(&mut contents, (block * BLOCK) as u64)
                .expect("read");
            let expected = match block {
                0 => vec![0; BLOCK],
                _ => pattern(block),
            };
            assert!(contents == expected, "{aio}: block {block}");
        }
    }
}
