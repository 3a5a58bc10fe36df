//! Tests of a channel whose operations are completed by the test itself.

use super::{Cache, FileDisk, FileOptions};
use fathom_core::token::Target;
use fathom_core::{
    Channel, Completion, Cx, Disk, Engine, FileId, Io, Op, Owner, RequestId, Stamps, Token, Wait,
};
use parking_lot::Mutex;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

/// Result of a step in which no request completes.
const NONE: [i32; 0] = [];

/// The disk's file, which each worker adds first.
const THE_FILE: FileId = FileId(0);

/// Operations that a kernel would have in progress.
type Pushed = Arc<Mutex<Vec<(FileId, Token)>>>;

/// An engine that records operations and carries out none.
struct Idle {
    files: u32,
    pushed: Pushed,
}

impl Engine for Idle {
    fn name(&self) -> &'static str {
        "idle"
    }

    fn reserve(&mut self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn add_file(&mut self, _: BorrowedFd<'_>) -> io::Result<FileId> {
        self.files += 1;
        Ok(FileId(self.files - 1))
    }

    fn remove_file(&mut self, _: FileId) {}

    unsafe fn push(&mut self, io: Io, token: Token) {
        self.pushed.lock().push((io.file, token));
    }

    fn watch(&mut self, _: RawFd, _: Token) -> io::Result<()> {
        Ok(())
    }

    fn unwatch(&mut self, _: RawFd, _: Token) {}

    fn submit(&mut self, _: Wait, _: &mut Vec<Completion>) -> io::Result<()> {
        Ok(())
    }

    fn ready(&mut self) -> bool {
        false
    }
}

/// A worker of a disk.
struct Worker {
    cx: Cx,
    channel: Box<dyn Channel>,
    pushed: Pushed,
    /// File of the operation that [`pushed`](Worker::pushed) returned last.
    last_file: FileId,
}

impl Worker {
    fn new(disk: &FileDisk) -> Worker {
        let pushed = Pushed::default();
        let mut cx = Cx::new(Box::new(Idle {
            files: 0,
            pushed: pushed.clone(),
        }));
        cx.slab.grow(1);
        let channel = disk.channel(&mut cx).unwrap();
        Worker {
            cx,
            channel,
            pushed,
            last_file: THE_FILE,
        }
    }

    /// Submits a request without data, and returns the operation that it pushes, if any.
    fn submit(&mut self, op: Op, fua: bool) -> Option<(RequestId, u16)> {
        let id = self.cx.slab.take().unwrap();
        let request = &mut self.cx.slab[id];
        (request.op, request.fua, request.error) = (op, fua, 0);
        request.owner = Owner::SOURCE;
        request.stamps = Stamps::start(0);
        (request.offset, request.at, request.len) = (0, 0, 0);
        self.channel.submit(&mut self.cx, id);
        self.pushed()
    }

    /// Removes and returns the operation that was pushed last.
    fn pushed(&mut self) -> Option<(RequestId, u16)> {
        let (file, token) = self.pushed.lock().pop()?;
        self.last_file = file;
        match token.target() {
            Target::Request { id, tag } => Some((id, tag)),
            other => panic!("{other:?}"),
        }
    }

    fn flush(&mut self) -> (RequestId, u16) {
        self.submit(Op::Flush, false).expect("a sync")
    }

    /// Completes an operation with `result`. Returns the errors of all requests that complete.
    fn complete(&mut self, (id, tag): (RequestId, u16), result: i32) -> Vec<i32> {
        self.channel.complete(&mut self.cx, id, tag, result);
        self.done()
    }

    fn look(&mut self) -> Vec<i32> {
        self.channel.timer(&mut self.cx);
        self.done()
    }

    fn done(&mut self) -> Vec<i32> {
        let done = self.cx.take_done();
        done.iter().map(|id| self.cx.slab[*id].error).collect()
    }
}

fn disk(cache: Cache) -> FileDisk {
    disk_of(cache, 1)
}

/// Makes a disk in a file system that reports lost writes to each open file.
fn disk_of(cache: Cache, workers: usize) -> FileDisk {
    let file = tempfile::tempfile_in("/var/tmp").unwrap();
    file.set_len(1 << 20).unwrap();
    let options = FileOptions {
        cache,
        workers,
        ..FileOptions::default()
    };
    FileDisk::from_file("disk".as_ref(), file, options).unwrap()
}

#[test]
fn successful_flush_waits_for_one_that_may_fail() {
    let disk = disk(Cache::Writeback);
    let (mut one, mut other) = (Worker::new(&disk), Worker::new(&disk));
    let (first, second) = (one.flush(), other.flush());
    // The kernel has reported lost writes to the first flush, and therefore not to the second one.
    assert_eq!(other.complete(second, 0), NONE);
    assert_eq!(other.look(), NONE);
    assert_eq!(one.complete(first, -libc::EIO), [libc::EIO]);
    assert_eq!(other.look(), [libc::EIO]);
    assert_eq!(other.submit(Op::Flush, false), None);
    assert_eq!(other.done(), [libc::EIO]);
}

#[test]
fn flush_is_answered_after_all_earlier_ones_succeed() {
    let disk = disk(Cache::Writeback);
    let (mut one, mut other) = (Worker::new(&disk), Worker::new(&disk));
    let (first, second) = (one.flush(), other.flush());
    assert_eq!(other.complete(second, 0), NONE);
    // The first worker's next flush begins when its first one has ended, and no flush waits for it.
    assert_eq!(one.submit(Op::Flush, false), None);
    assert_eq!(one.complete(first, 0), [0]);
    assert_eq!(other.look(), [0]);
    let later = one.pushed().expect("a sync");
    assert_eq!(one.complete(later, 0), [0]);
}

#[test]
fn flush_requests_that_come_during_a_flush_share_the_next_one() {
    let disk = disk(Cache::Writeback);
    let mut one = Worker::new(&disk);
    let first = one.flush();
    for _ in 0..3 {
        assert_eq!(one.submit(Op::Flush, false), None);
    }
    assert_eq!(one.complete(first, -libc::EINTR), NONE);
    let again = one.pushed().expect("a sync");
    assert_eq!(one.complete(again, 0), [0]);
    let next = one.pushed().expect("a sync");
    assert_eq!(one.pushed(), None);
    assert_eq!(one.submit(Op::Flush, false), None);
    assert_eq!(one.complete(next, 0), [0; 3]);
    let last = one.pushed().expect("a sync");
    assert_eq!(one.complete(last, 0), [0]);
    assert_eq!(one.pushed(), None);
}

#[test]
fn flushes_of_one_worker_report_each_others_lost_writes() {
    let disk = disk(Cache::Writeback);
    let mut one = Worker::new(&disk);
    let first = one.flush();
    assert_eq!(one.submit(Op::Flush, false), None);
    assert_eq!(one.submit(Op::Flush, false), None);
    assert_eq!(one.complete(first, -libc::EIO), [libc::EIO]);
    let second = one.pushed().expect("a sync");
    assert_eq!(one.complete(second, 0), [libc::EIO; 2]);
}

#[test]
fn workers_that_flush_by_files_of_their_own_wait_for_no_other() {
    let disk = disk_of(Cache::Writeback, 2);
    let (mut one, mut other) = (Worker::new(&disk), Worker::new(&disk));
    let (first, second) = (one.flush(), other.flush());
    assert_ne!(one.last_file, THE_FILE);
    assert_ne!(other.last_file, THE_FILE);
    assert_eq!(other.complete(second, 0), [0]);
    assert_eq!(one.complete(first, -libc::EIO), [libc::EIO]);
    // The disk remembers the failure, without a further report of the kernel.
    assert_eq!(other.submit(Op::Flush, false), None);
    assert_eq!(other.done(), [libc::EIO]);
}

#[test]
fn workers_that_share_a_file_wait_for_each_other() {
    let disk = disk_of(Cache::Writeback, 2);
    let (own, _also_own) = (Worker::new(&disk), Worker::new(&disk));
    let (mut one, mut other) = (Worker::new(&disk), Worker::new(&disk));
    let (first, second) = (one.flush(), other.flush());
    assert_eq!((one.last_file, other.last_file), (THE_FILE, THE_FILE));
    assert_eq!(other.complete(second, 0), NONE);
    assert_eq!(one.complete(first, 0), [0]);
    assert_eq!(other.look(), [0]);
    drop(own);
    let mut next = Worker::new(&disk);
    next.flush();
    assert_ne!(next.last_file, THE_FILE);
}

#[test]
fn flush_without_page_cache_waits_for_no_other() {
    let disk = disk(Cache::None);
    let (mut one, mut other) = (Worker::new(&disk), Worker::new(&disk));
    let (first, second) = (one.flush(), other.flush());
    assert_eq!(other.complete(second, 0), [0]);
    assert_eq!(one.complete(first, -libc::EIO), [libc::EIO]);
    let third = other.flush();
    assert_eq!(other.complete(third, 0), [0]);
}

#[test]
fn syncing_write_reports_lost_writes_before_the_next_flush() {
    let disk = disk(Cache::Writeback);
    let mut one = Worker::new(&disk);
    let write = one.submit(Op::Write, true).expect("a write");
    assert_eq!(one.complete(write, -libc::EIO), [libc::EIO]);
    assert_eq!(one.submit(Op::Flush, false), None);
    assert_eq!(one.done(), [libc::EIO]);
}
