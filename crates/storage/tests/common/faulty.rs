//! An engine that injects rare events: short results, interrupted calls, errors, late completions,
//! another order.

use fathom_core::{Completion, Engine, FileId, Io, IoKind, Token, Wait};
use libc::iovec;
use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Frequencies of the faults, in percent of the operations.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    pub short: u64,
    pub interrupted: u64,
    pub failed: u64,
    pub delayed: u64,
    /// Granularity of short results in bytes.
    pub unit: u64,
}

/// Number of operations that were failed permanently.
#[derive(Default)]
pub struct Injected(AtomicUsize);

impl Injected {
    pub fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// A delayed operation, with its own copy of its iovecs.
struct Held {
    io: Io,
    iov: Box<[iovec]>,
    token: Token,
}

pub struct Faulty {
    inner: Box<dyn Engine>,
    faults: Faults,
    injected: Arc<Injected>,
    random: u64,
    held: Vec<Held>,
    answered: Vec<Completion>,
    in_flight: HashMap<u64, Box<[iovec]>>,
}

impl Faulty {
    pub fn new(
        inner: Box<dyn Engine>,
        faults: Faults,
        seed: u64,
        injected: Arc<Injected>,
    ) -> Faulty {
        Faulty {
            inner,
            faults,
            injected,
            random: seed | 1,
            held: Vec::new(),
            answered: Vec::new(),
            in_flight: HashMap::new(),
        }
    }

    /// Returns a random number below `below`, by xorshift64*.
    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % below
    }

    fn roll(&mut self, percent: u64) -> bool {
        self.random(100) < percent
    }

    fn answer(&mut self, token: Token, errno: i32) {
        self.answered.push(Completion {
            token,
            result: -errno,
        });
    }

    fn start(&mut self, held: Held) {
        let Held { mut io, iov, token } = held;
        io.iov = iov.as_ptr();
        io.iov_len = iov.len() as u32;
        let before = self.in_flight.insert(token.to_u64(), iov);
        assert!(before.is_none(), "two operations with one token");
        // SAFETY: the iovecs are kept until the completion; the memory is valid as the caller of
        // `push` promised.
        unsafe { self.inner.push(io, token) };
    }

    /// Starts all, or some, of the delayed operations, in random order.
    fn release(&mut self, all: bool) {
        for _ in 0..self.held.len() {
            let index = self.random(self.held.len() as u64) as usize;
            if all || self.roll(50) {
                let held = self.held.swap_remove(index);
                self.start(held);
            }
        }
    }
}

/// Returns the iovecs of the first `len` bytes.
fn cut(iov: &[iovec], mut len: u64) -> Box<[iovec]> {
    let mut out = Vec::new();
    for segment in iov {
        let n = len.min(segment.iov_len as u64);
        if n > 0 {
            out.push(iovec {
                iov_base: segment.iov_base,
                iov_len: n as usize,
            });
        }
        len -= n;
    }
    out.into()
}

impl Engine for Faulty {
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
        if self.roll(self.faults.failed) {
            self.injected.0.fetch_add(1, Ordering::SeqCst);
            let errno = [libc::EIO, libc::ENOSPC][self.random(2) as usize];
            return self.answer(token, errno);
        }
        if self.roll(self.faults.interrupted) {
            return self.answer(token, libc::EINTR);
        }
        let iov: &[iovec] = match io.kind {
            // SAFETY: valid, as required of the caller.
            IoKind::Read | IoKind::Write { .. } => unsafe {
                std::slice::from_raw_parts(io.iov, io.iov_len as usize)
            },
            _ => &[],
        };
        let units = io.len / self.faults.unit;
        let short = !iov.is_empty() && units > 1 && self.roll(self.faults.short);
        let len = match short {
            true => (1 + self.random(units - 1)) * self.faults.unit,
            false => io.len,
        };
        let held = Held {
            io,
            iov: cut(iov, len),
            token,
        };
        if self.roll(self.faults.delayed) {
            self.held.push(held);
        } else {
            self.start(held);
        }
    }

    fn watch(&mut self, fd: RawFd, token: Token) -> io::Result<()> {
        self.inner.watch(fd, token)
    }

    fn unwatch(&mut self, fd: RawFd, token: Token) {
        self.inner.unwatch(fd, token);
    }

    fn submit(&mut self, wait: Wait, out: &mut Vec<Completion>) -> io::Result<()> {
        let idle = wait != Wait::No && self.answered.is_empty();
        self.release(idle && self.in_flight.is_empty());
        out.append(&mut self.answered);
        let wait = match out.is_empty() && self.held.is_empty() {
            true => wait,
            false => Wait::No,
        };
        let first = out.len();
        self.inner.submit(wait, out)?;
        for completion in &out[first..] {
            self.in_flight.remove(&completion.token.to_u64());
        }
        Ok(())
    }

    fn ready(&mut self) -> bool {
        !self.answered.is_empty() || !self.held.is_empty() || self.inner.ready()
    }
}
