//! A disk in memory that can hold its requests back.

use super::PollEngine;
use crate::{
    Channel, Cx, Disk, DiskError, DiskInfo, Op, RangeLimits, RequestId, Stage, Token, WorkerHandle,
    WorkerOptions,
};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

/// Size of a [`TestDisk`], in bytes.
pub const SIZE: u64 = 1 << 20;

/// A disk for tests; [`State`] has what a test can inspect and change.
pub struct TestDisk(Arc<State>);

/// The state of a [`TestDisk`], which tests inspect and change.
pub struct State {
    /// Contents of the disk. Initially, all bytes of sector i are i ^ 0x5a.
    pub bytes: Mutex<Vec<u8>>,
    /// Requests are held back while true.
    hold: AtomicBool,
    /// A release carries out only some of the requests held back (at least one), newest first.
    pub out_of_order: AtomicBool,
    /// Number of requests held back.
    pub held: AtomicUsize,
    /// Number of requests carried out.
    pub carried_out: AtomicUsize,
    /// Number of activations.
    pub activated: AtomicUsize,
    /// Number of deactivations.
    pub deactivated: AtomicUsize,
    /// Activations fail while true.
    pub fail_activation: AtomicBool,
    /// Wakes each worker so that it checks `hold` again.
    wakes: Mutex<Vec<Arc<OwnedFd>>>,
}

impl TestDisk {
    /// Creates a disk that holds no requests back and is not active.
    pub fn new() -> Arc<TestDisk> {
        Arc::new(TestDisk(Arc::new(State {
            bytes: Mutex::new((0..SIZE).map(|i| (i / 512) as u8 ^ 0x5a).collect()),
            hold: AtomicBool::new(false),
            out_of_order: AtomicBool::new(false),
            held: AtomicUsize::new(0),
            carried_out: AtomicUsize::new(0),
            activated: AtomicUsize::new(0),
            deactivated: AtomicUsize::new(0),
            fail_activation: AtomicBool::new(false),
            wakes: Mutex::default(),
        })))
    }

    /// Holds all requests back from now on.
    pub fn hold(&self) {
        self.hold.store(true, SeqCst);
    }

    /// Carries out the requests that are held back, in one batch per worker, and stops holding
    /// requests back.
    pub fn release(&self) {
        self.hold.store(false, SeqCst);
        for wake in self.wakes.lock().iter() {
            rustix::io::write(&**wake, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// Returns whether the disk has been activated more often than deactivated.
    pub fn is_active(&self) -> bool {
        self.activated.load(SeqCst) > self.deactivated.load(SeqCst)
    }

    /// Starts `n` workers that sleep in a [`PollEngine`].
    pub fn workers(self: &Arc<Self>, n: usize) -> Arc<[WorkerHandle]> {
        let spawn = |i| {
            let options = WorkerOptions {
                name: format!("worker-{i}"),
                ..WorkerOptions::default()
            };
            WorkerHandle::spawn(self.clone(), PollEngine::boxed, options).unwrap()
        };
        (0..n).map(spawn).collect()
    }
}

impl std::ops::Deref for TestDisk {
    type Target = State;

    fn deref(&self) -> &State {
        &self.0
    }
}

impl Disk for TestDisk {
    fn info(&self) -> DiskInfo {
        let limits = Some(RangeLimits {
            alignment: 512,
            max_len: SIZE,
        });
        DiskInfo {
            size: SIZE,
            block_size: 512,
            physical_block_size: 4096,
            optimal_io_size: 0,
            read_only: false,
            write_cache: true,
            discard: limits,
            write_zeroes: limits,
        }
    }

    fn activate(&self) -> Result<(), DiskError> {
        if self.fail_activation.load(SeqCst) {
            return Err(DiskError::Unusable {
                path: PathBuf::from("test.img"),
                problem: "locked by another process".into(),
            });
        }
        self.activated.fetch_add(1, SeqCst);
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        self.deactivated.fetch_add(1, SeqCst);
        Ok(())
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = Arc::new(eventfd(0, flags).unwrap());
        // The channel takes a completion of it as a request to check `hold`.
        let token = Token::channel(cx.new_tag());
        cx.engine.watch(wake.as_raw_fd(), token).unwrap();
        self.wakes.lock().push(wake);
        Ok(Box::new(TestChannel {
            disk: self.0.clone(),
            waiting: Vec::new(),
            rounds: 0,
        }))
    }
}

struct TestChannel {
    disk: Arc<State>,
    waiting: Vec<RequestId>,
    rounds: u32,
}

impl TestChannel {
    fn carry_out(&self, cx: &mut Cx, id: RequestId) {
        let request = &cx.slab[id];
        let mut bytes = self.disk.bytes.lock();
        self.disk.carried_out.fetch_add(1, SeqCst);
        let mut at = request.offset as usize;
        if matches!(request.op, Op::Discard | Op::WriteZeroes) {
            bytes[at..at + request.len as usize].fill(0);
        }
        for segment in &request.segments {
            let len = segment.iov_len;
            let image = &mut bytes[at..at + len];
            let guest = segment.iov_base.cast::<u8>();
            match request.op {
                // SAFETY: the queue guarantees that its segments are valid.
                Op::Read => unsafe { guest.copy_from_nonoverlapping(image.as_ptr(), len) },
                // SAFETY: as above.
                Op::Write => unsafe { guest.copy_to_nonoverlapping(image.as_mut_ptr(), len) },
                _ => {}
            }
            at += len;
        }
        drop(bytes);
        cx.complete(id, 0);
    }
}

impl Channel for TestChannel {
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        cx.enter(id, Stage::Map);
        cx.enter(id, Stage::Device);
        if self.disk.hold.load(SeqCst) {
            self.waiting.push(id);
            self.disk.held.fetch_add(1, SeqCst);
        } else {
            self.carry_out(cx, id);
        }
    }

    fn complete(&mut self, cx: &mut Cx, _id: RequestId, _tag: u16, _result: i32) {
        if self.disk.hold.load(SeqCst) {
            return;
        }
        let mut due = std::mem::take(&mut self.waiting);
        if self.disk.out_of_order.load(SeqCst) {
            let some = |id: &RequestId| (id.0 ^ self.rounds).is_multiple_of(3);
            (due, self.waiting) = due.into_iter().rev().partition(some);
            if due.is_empty() {
                due.extend(self.waiting.pop());
            }
            self.rounds += 1;
        }
        for id in due {
            self.disk.held.fetch_sub(1, SeqCst);
            self.carry_out(cx, id);
        }
    }
}
