//! Checks the system calls that make writes survive a power failure. A disk that omits them passes
//! every other test.

use crate::common::{Ask, Guest};
use fathom_core::{Completion, Engine, FileId, Io, IoKind, Op, Token, Wait};
use fathom_storage::{Cache, EngineKind, FileDisk, FileOptions, engine};
use parking_lot::Mutex;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

/// Kinds of the pushed operations, in order.
type Record = Arc<Mutex<Vec<IoKind>>>;

/// An engine that records operations and passes them to another engine.
struct Recorder {
    inner: Box<dyn Engine>,
    record: Record,
}

impl Engine for Recorder {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn reserve(&mut self, n: usize) -> io::Result<()> {
        self.inner.reserve(n)
    }

    fn add_file(&mut self, file: BorrowedFd<'_>) -> io::Result<FileId> {
        self.inner.add_file(file)
    }

    fn remove_file(&mut self, file: FileId) {
        self.inner.remove_file(file);
    }

    unsafe fn push(&mut self, io: Io, token: Token) {
        self.record.lock().push(io.kind);
        // SAFETY: as required of the caller.
        unsafe { self.inner.push(io, token) };
    }

    fn watch(&mut self, fd: RawFd, token: Token) -> io::Result<()> {
        self.inner.watch(fd, token)
    }

    fn unwatch(&mut self, fd: RawFd, token: Token) {
        self.inner.unwatch(fd, token);
    }

    fn submit(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()> {
        self.inner.submit(wait, out)
    }

    fn ready(&mut self) -> bool {
        self.inner.ready()
    }
}

/// Splits a write into unaligned segments, so that it goes through a buffer.
fn odd(mut ask: Ask) -> Ask {
    let (start, len) = ask.segments[0];
    ask.segments = vec![(start, 100), (start + 100, len - 100)];
    ask
}

fn forced(mut ask: Ask) -> Ask {
    ask.fua = true;
    ask
}

/// Returns whether every change of the image is durable at the reply: each write by itself, and
/// other changes by a later sync.
fn is_durable(record: &[IoKind]) -> bool {
    let mut pending = false;
    for kind in record {
        match kind {
            IoKind::Write { dsync } => pending |= !dsync,
            IoKind::Allocate { .. } => pending = true,
            IoKind::Sync => pending = false,
            IoKind::Read => {}
        }
    }
    !record.is_empty() && !pending
}

#[test]
fn what_must_be_durable_is_asked_for_and_what_need_not_is_not() {
    let data = [1; 4096];
    let changes = || {
        [
            Ask::write(4096, &data),
            odd(Ask::write(8192, &data)),
            Ask::new(Op::Discard, 0, 4096),
            Ask::new(Op::WriteZeroes, 4096, 8192),
        ]
    };
    for kind in [EngineKind::IoUring, EngineKind::Threads] {
        for cache in Cache::ALL {
            for block in [None, Some(4096)] {
                let image = tempfile::Builder::new()
                    .tempfile_in(env!("CARGO_TARGET_TMPDIR"))
                    .expect("a file");
                image.as_file().set_len(1 << 20).expect("sized");
                let options = FileOptions {
                    cache,
                    engine: kind,
                    min_direct_block: block.filter(|_| cache == Cache::None),
                    ..FileOptions::default()
                };
                let disk = FileDisk::open(image.path(), options).expect("opened");
                let record = Record::default();
                let recorder = record.clone();
                let mut guest = Guest::new(Arc::new(disk), move || {
                    Ok(Box::new(Recorder {
                        inner: engine(kind)?,
                        record: recorder,
                    }) as Box<dyn Engine>)
                });
                let mut run = |ask| {
                    assert_eq!(guest.run(ask).0, 0);
                    std::mem::take(&mut *record.lock())
                };
                for ask in changes() {
                    let (op, asked) = (ask.op, run(ask));
                    let wanted = cache == Cache::Writethrough;
                    assert_eq!(
                        is_durable(&asked),
                        wanted,
                        "{kind} {cache} {op:?}: {asked:?}"
                    );
                    // A flush is one fdatasync(2), after any other request.
                    assert_eq!(run(Ask::new(Op::Flush, 0, 0)), [IoKind::Sync]);
                }
                // With FUA, every change is durable by itself.
                for ask in changes() {
                    let (op, asked) = (ask.op, run(forced(ask)));
                    assert!(is_durable(&asked), "{kind} {cache} {op:?}: {asked:?}");
                }
                guest.detach();
            }
        }
    }
}
