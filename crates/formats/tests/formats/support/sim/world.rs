//! Files in memory that log all changes. The operations on these files are executed only on
//! command.

use super::pages::Pages;
use super::rng::Rng;
use super::saved_state;
use fathom_core::{Extents, Op, Request, RequestId, SavedState};
use parking_lot::{Mutex, MutexGuard};
use std::sync::{Arc, OnceLock};

/// Prints an event, if FATHOM_TRACE is set.
pub fn trace(line: impl FnOnce() -> String) {
    static WANTED: OnceLock<bool> = OnceLock::new();
    if *WANTED.get_or_init(|| std::env::var_os("FATHOM_TRACE").is_some()) {
        eprintln!("{}", line());
    }
}

/// Size in bytes of a write that is atomic.
pub const SECTOR: u64 = 512;

/// A change to a file.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    Write(Arc<[u8]>),
    /// This number of bytes become zeroes.
    Zero(u64),
    /// The file's new length in bytes.
    Len(u64),
}

/// A change with its place and time.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    pub file: usize,
    pub at: u64,
    pub change: Change,
    pub submitted: u64,
    pub done: u64,
    /// Whether the change is durable once it is done.
    pub fua: bool,
}

/// A flush: what was done to the file before `submitted` is durable from `done` on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flush {
    pub file: usize,
    pub submitted: u64,
    pub done: u64,
}

/// The log from which power cuts are simulated.
#[derive(Clone, Default)]
pub struct Log {
    /// Changes in the order in which they were done.
    pub events: Vec<Event>,
    pub flushes: Vec<Flush>,
}

/// A pending operation of a worker.
pub struct Pending {
    pub worker: usize,
    pub file: usize,
    pub id: RequestId,
    submitted: u64,
    /// Whether the operation takes longer than most.
    pub slow: bool,
    /// The data of a write when it was submitted.
    bytes: Vec<u8>,
}

/// The operations that fail.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// The number of the first failing operation, and how many fail.
    pub first: u64,
    pub count: u64,
    pub errno: i32,
}

/// Kills the server in an operation. No operation has any effect after that.
pub struct Kill {
    /// The operation's number.
    pub at: u64,
    pub memory: Option<SavedState>,
    /// The contents of the memory at the kill; `None` before the kill.
    pub left: Option<Vec<u64>>,
}

#[derive(Default)]
pub struct State {
    pub files: Vec<Pages>,
    pub pending: Vec<Pending>,
    /// Whether new operations are held until [`State::let_go`].
    pub holding: bool,
    held: Vec<Pending>,
    /// The log, if changes are recorded.
    pub log: Option<Log>,
    pub fault: Option<Fault>,
    /// Maximum length of the files in bytes.
    pub limit: Option<u64>,
    /// Whether the files are devices, which keep their lengths.
    pub device: bool,
    /// Every flush whose operation number is a multiple of this number claims success without
    /// effect; 0 disables this.
    pub lies: u64,
    /// The worker whose channels are being created.
    pub worker: usize,
    /// Number of operations so far.
    pub operations: u64,
    /// Number of flushes so far.
    pub flushes: u64,
    pub kill: Option<Kill>,
    now: u64,
    rng: Option<Rng>,
}

/// The state shared by the files and the run.
pub struct World(Mutex<State>);

impl World {
    pub fn new(files: Vec<Pages>, seed: u64) -> Arc<World> {
        Arc::new(World(Mutex::new(State {
            files,
            rng: Some(Rng::new(seed)),
            ..State::default()
        })))
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        // A failed test may have poisoned the mutex.
        self.0.lock()
    }

    /// Advances the time and returns it.
    pub fn tick(&self) -> u64 {
        self.state().tick()
    }

    /// Carries out a pending operation. Returns the result as a channel receives it.
    pub fn carry_out(&self, pending: &Pending, request: &Request) -> i32 {
        let mut state = self.state();
        let (file, at) = (pending.file, request.at);
        let result = match request.op {
            Op::Read => state.counted(false).map(|()| {
                let mut bytes = vec![0; request.len as usize];
                state.files[file].read(&mut bytes, at);
                scatter(request, &bytes);
            }),
            Op::Write => {
                let bytes = gather(request);
                assert!(bytes == pending.bytes, "a buffer has changed in flight");
                state.write(file, at, &bytes, pending.submitted, request.fua)
            }
            Op::WriteZeroes => state.zero(file, at, request.len, pending.submitted, request.fua),
            Op::Discard => state.discard(file, at, request.len, pending.submitted, request.fua),
            Op::Flush => state.flush(file, pending.submitted),
            Op::BlockStatus => state.counted(false).map(|()| {
                // SAFETY: the request is in flight, so its segments are valid.
                let mut out = unsafe { Extents::of(&request.segments, request.len) };
                state.files[file].describe(&mut out, at);
            }),
        };
        result.err().map_or(0, |errno| -errno)
    }

    /// Ends a pending operation that no task waits for any more: it is done, not done, or done for
    /// some of its sectors.
    pub fn abandon(&self, pending: &Pending, request: &Request) {
        let mut state = self.state();
        let (file, at, len) = (pending.file, request.at, request.len);
        let since = pending.submitted;
        let fate = state.rng().below(3);
        trace(|| format!("{:?} {at:#x}+{len:#x} of {file} ends as {fate}", request.op));
        let outcome = match (request.op, fate) {
            (_, 0) | (Op::Read | Op::Flush | Op::BlockStatus, _) => Ok(()),
            (Op::Write, 1) => {
                state.tear(file, at, &pending.bytes, since);
                Ok(())
            }
            (Op::Write, _) => state.write(file, at, &pending.bytes, since, false),
            (Op::WriteZeroes, _) => state.zero(file, at, len, since, false),
            (Op::Discard, _) => state.discard(file, at, len, since, false),
        };
        // Errors are not reported either.
        let _ = outcome;
    }

    /// Records an operation submitted to a file.
    pub fn submitted(&self, worker: usize, file: usize, id: RequestId, request: &Request) {
        let (at, len) = (request.at, request.len);
        let what = request.op;
        assert!(
            at.is_multiple_of(SECTOR) && len.is_multiple_of(SECTOR),
            "{what:?} of {len} bytes at {at:#x} of file {file} is not whole sectors"
        );
        let segments: usize = request.segments.iter().map(|s| s.iov_len).sum();
        let moves = matches!(what, Op::Read | Op::Write);
        assert!(!moves || segments as u64 == len, "segments of {what:?}");
        let mut state = self.state();
        let submitted = state.tick();
        let slow = moves && state.rng().one_in(12);
        trace(|| {
            format!("{submitted} worker {worker} submits {what:?} {at:#x}+{len:#x} of {file}")
        });
        let pending = Pending {
            worker,
            file,
            id,
            submitted,
            slow,
            bytes: match what {
                Op::Write => gather(request),
                _ => Vec::new(),
            },
        };
        match state.holding {
            true => state.held.push(pending),
            false => state.pending.push(pending),
        }
    }
}

impl State {
    /// Makes the held operations pending.
    pub fn let_go(&mut self) {
        self.holding = false;
        self.pending.append(&mut self.held);
    }

    pub fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    fn rng(&mut self) -> &mut Rng {
        self.rng.as_mut().expect("made with the world")
    }

    /// Counts an operation. Returns an error if the operation fails.
    fn counted(&mut self, takes_space: bool) -> Result<(), i32> {
        let number = self.operations;
        self.operations += 1;
        if let Some(kill) = &mut self.kill {
            match kill.left {
                Some(_) => return Err(libc::ESHUTDOWN),
                None if number >= kill.at => {
                    kill.left = Some(saved_state::words(kill.memory.as_ref()));
                    return Err(libc::EIO);
                }
                None => {}
            }
        }
        match self.fault {
            Some(fault)
                if (fault.first..fault.first + fault.count).contains(&number)
                    && (takes_space || fault.errno != libc::ENOSPC) =>
            {
                Err(fault.errno)
            }
            _ => Ok(()),
        }
    }

    pub fn read(&mut self, file: usize, buf: &mut [u8], at: u64) -> Result<(), i32> {
        self.counted(false)?;
        self.files[file].read(buf, at);
        Ok(())
    }

    pub fn write(
        &mut self,
        file: usize,
        at: u64,
        bytes: &[u8],
        submitted: u64,
        fua: bool,
    ) -> Result<(), i32> {
        if self
            .limit
            .is_some_and(|limit| at + bytes.len() as u64 > limit)
        {
            return Err(libc::ENOSPC);
        }
        let fate = self.counted(true);
        if fate == Err(libc::EIO) {
            // Some sectors may have been written nevertheless.
            self.tear(file, at, bytes, submitted);
        }
        fate?;
        self.change(file, at, Change::Write(bytes.into()), submitted, fua);
        Ok(())
    }

    /// Writes a random subset of the sectors.
    fn tear(&mut self, file: usize, at: u64, bytes: &[u8], submitted: u64) {
        for (n, sector) in bytes.chunks(SECTOR as usize).enumerate() {
            if self.rng().one_in(2) {
                let at = at + n as u64 * SECTOR;
                self.change(file, at, Change::Write(sector.into()), submitted, false);
            }
        }
    }

    /// Zeroes bytes. The file does not grow, as with fallocate(2).
    fn zero(
        &mut self,
        file: usize,
        at: u64,
        len: u64,
        submitted: u64,
        fua: bool,
    ) -> Result<(), i32> {
        if self.limit.is_some_and(|limit| at + len > limit) {
            return Err(libc::ENOSPC);
        }
        self.counted(true)?;
        self.change(file, at, Change::Zero(len), submitted, fua);
        Ok(())
    }

    /// Discards bytes. At random, they become zeroes or stay unchanged.
    pub fn discard(
        &mut self,
        file: usize,
        at: u64,
        len: u64,
        submitted: u64,
        fua: bool,
    ) -> Result<(), i32> {
        self.counted(false)?;
        if self.rng().one_in(2) {
            self.change(file, at, Change::Zero(len), submitted, fua);
        }
        Ok(())
    }

    pub fn flush(&mut self, file: usize, submitted: u64) -> Result<(), i32> {
        self.counted(false)?;
        self.flushes += 1;
        let done = self.tick();
        trace(|| format!("{done} flushed {file} since {submitted}"));
        let lie = self.lies > 0 && self.operations.is_multiple_of(self.lies);
        if let Some(log) = &mut self.log
            && !lie
        {
            log.flushes.push(Flush {
                file,
                submitted,
                done,
            });
        }
        Ok(())
    }

    pub fn set_len(&mut self, file: usize, len: u64) -> Result<(), i32> {
        self.counted(true)?;
        if self.device {
            return Ok(());
        }
        let submitted = self.tick();
        self.change(file, 0, Change::Len(len), submitted, false);
        Ok(())
    }

    fn change(&mut self, file: usize, at: u64, change: Change, submitted: u64, fua: bool) {
        let done = self.tick();
        trace(|| format!("{done} changed {at:#x} of {file} since {submitted}"));
        apply(&mut self.files[file], at, &change);
        if let Some(log) = &mut self.log {
            log.events.push(Event {
                file,
                at,
                change,
                submitted,
                done,
                fua: fua && self.lies == 0,
            });
        }
    }
}

pub fn apply(file: &mut Pages, at: u64, change: &Change) {
    match change {
        Change::Write(bytes) => file.write(at, bytes),
        Change::Zero(len) => file.zero(at, *len),
        Change::Len(len) => file.set_len(*len),
    }
}

fn gather(request: &Request) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(request.len as usize);
    for segment in &request.segments {
        let base = segment.iov_base.cast::<u8>();
        // SAFETY: the submitter of a request keeps its segments valid until the request is
        // complete.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(base, segment.iov_len) });
    }
    bytes
}

fn scatter(request: &Request, mut bytes: &[u8]) {
    for segment in &request.segments {
        let (part, rest) = bytes.split_at(segment.iov_len);
        let base = segment.iov_base.cast::<u8>();
        // SAFETY: the submitter of a request keeps its segments valid until the request is
        // complete.
        unsafe { base.copy_from_nonoverlapping(part.as_ptr(), part.len()) };
        bytes = rest;
    }
}
