//! A disk as seen by a program with its own virtio driver: the `virtio-driver` crate, which is
//! independent of Fathom.

use super::support::{PATIENCE, eventually};
use fathom_testing::Tried;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::os::fd::AsRawFd;
use virtio_driver::{
    VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};

/// Maximum length of a read or write in bytes.
pub const MAX_LEN: usize = 256 << 10;
/// Maximum number of requests in flight on each queue.
const DEPTH: usize = 16;
const QUEUE_SIZE: u16 = 64;

#[derive(Clone, Debug)]
pub enum Request {
    Read { offset: u64, len: usize },
    Write { offset: u64, data: Vec<u8> },
    WriteZeroes { offset: u64, len: u64, unmap: bool },
    Discard { offset: u64, len: u64 },
    Flush,
}

/// A connection with some queues.
pub struct Driver<'a> {
    transport: &'a VirtioBlkTransport,
    queues: Vec<VirtioBlkQueue<'a, usize>>,
    memory: Memory,
}

/// Memory that is shared with the server: `MAX_LEN` bytes for each request.
struct Memory {
    base: *mut u8,
    len: usize,
    _file: File,
}

impl Memory {
    fn new(transport: &mut VirtioBlkTransport, len: usize) -> Memory {
        let file = tempfile::tempfile_in("/dev/shm").expect("shared memory");
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
        Memory {
            base: base.cast(),
            len,
            _file: file,
        }
    }

    /// Returns the memory of a request that is not in flight.
    fn place(&mut self, index: usize) -> &mut [u8] {
        assert!((index + 1) * MAX_LEN <= self.len);
        // SAFETY: the range is within the mapping, which `self` owns. The server uses it only while
        // its request is in flight.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(index * MAX_LEN), MAX_LEN) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `self` owns the mapping, and no reference into the mapping exists.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// Connects to `socket`, uses the disk there, and disconnects.
pub fn with_disk<T>(socket: &str, queues: usize, work: impl FnOnce(&mut Driver<'_>) -> T) -> T {
    let features = VirtioBlkFeatureFlags::FLUSH
        | VirtioBlkFeatureFlags::DISCARD
        | VirtioBlkFeatureFlags::WRITE_ZEROES
        | VirtioBlkFeatureFlags::MQ;
    let ring = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
    // The previous connection is closed only when no process has it. Another test may have forked a
    // process that has not called exec yet.
    let transport = eventually("a connection", || {
        VhostUser::new(socket, features.bits() | ring.bits()).ok()
    });
    let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
    let memory = Memory::new(&mut *transport, queues * DEPTH * MAX_LEN);
    let set_up = VirtioBlkQueue::setup_queues(&mut *transport, queues, QUEUE_SIZE);
    work(&mut Driver {
        queues: set_up.expect("queues"),
        transport: &*transport,
        memory,
    })
}

impl Driver<'_> {
    /// Returns the size of the disk in bytes.
    pub fn size(&self) -> u64 {
        let config = self.transport.get_config().expect("a config space");
        u64::from(config.capacity) * 512
    }

    /// Executes the requests on all queues in turn, as many at once as there is room for.
    ///
    /// Returns for each request the data that was read, or the errno.
    pub fn all(&mut self, requests: &[Request]) -> Vec<Result<Vec<u8>, i32>> {
        Tried::Requests.count(requests.len() as u64);
        let at_once = DEPTH * self.queues.len();
        let batches = requests.chunks(at_once);
        batches.flat_map(|batch| self.batch(batch)).collect()
    }

    fn batch(&mut self, requests: &[Request]) -> Vec<Result<Vec<u8>, i32>> {
        for (index, request) in requests.iter().enumerate() {
            self.submit(index, request);
        }
        for queue in 0..self.queues.len() {
            let kick = self.transport.get_submission_notifier(queue);
            kick.notify().expect("kicked");
        }
        let mut outcomes = vec![None; requests.len()];
        for queue in 0..self.queues.len() {
            let count = (queue..requests.len()).step_by(self.queues.len()).count();
            self.wait(queue, count, &mut outcomes);
        }
        let outcome = |(index, ret): (usize, Option<i32>)| match (ret, &requests[index]) {
            (Some(0), Request::Read { len, .. }) => Ok(self.memory.place(index)[..*len].to_vec()),
            (Some(0), _) => Ok(Vec::new()),
            (ret, _) => Err(-ret.expect("answered")),
        };
        outcomes.into_iter().enumerate().map(outcome).collect()
    }

    /// Executes a request on the first queue, and sees its completion before the interrupt.
    pub fn spin(&mut self, request: &Request) {
        self.submit(0, request);
        self.queues[0].set_used_notif_enabled(true);
        let kick = self.transport.get_submission_notifier(0);
        kick.notify().expect("kicked");
        eventually("an answer", || {
            let answered = self.queues[0].completions().next();
            answered.map(|answered| assert_eq!(answered.ret, 0))
        });
    }

    fn submit(&mut self, index: usize, request: &Request) {
        let number = index % self.queues.len();
        let queue = &mut self.queues[number];
        let place = self.memory.place(index);
        let queued = match request {
            Request::Read { offset, len } => {
                place[..*len].fill(0xee);
                queue.read(*offset, &mut place[..*len], index)
            }
            Request::Write { offset, data } => {
                place[..data.len()].copy_from_slice(data);
                queue.write(*offset, &place[..data.len()], index)
            }
            Request::WriteZeroes { offset, len, unmap } => {
                queue.write_zeroes(*offset, *len, *unmap, index)
            }
            Request::Discard { offset, len } => queue.discard(*offset, *len, index),
            Request::Flush => queue.flush(index),
        };
        queued.expect("queued");
    }

    /// Waits until the queue has completed `count` requests.
    fn wait(&mut self, number: usize, count: usize, outcomes: &mut [Option<i32>]) {
        let call = self.transport.get_completion_fd(number);
        let queue = &mut self.queues[number];
        let mut answered = 0;
        while answered < count {
            queue.set_used_notif_enabled(true);
            let before = answered;
            for completion in queue.completions() {
                let outcome = &mut outcomes[completion.context];
                assert_eq!(outcome.replace(completion.ret), None, "answered twice");
                answered += 1;
            }
            if answered == before {
                let mut interrupt = [PollFd::new(&call, PollFlags::IN)];
                let timeout = Timespec::try_from(PATIENCE).expect("some seconds");
                poll(&mut interrupt, Some(&timeout)).expect("polled");
                let came = !interrupt[0].revents().is_empty();
                assert!(came, "{} of {count} requests in vain", count - answered);
                call.read().expect("an interrupt");
            }
        }
    }

    /// Returns the contents of the whole disk.
    pub fn contents(&mut self) -> Vec<u8> {
        let size = self.size();
        let reads: Vec<_> = (0..size)
            .step_by(MAX_LEN)
            .map(|offset| Request::Read {
                offset,
                len: (size - offset).min(MAX_LEN as u64) as usize,
            })
            .collect();
        let parts = self.all(&reads).into_iter().map(|part| part.expect("read"));
        parts.collect::<Vec<_>>().concat()
    }
}
