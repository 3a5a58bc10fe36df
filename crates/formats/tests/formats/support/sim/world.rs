//! Files in memory that keep a record of what is done to them, and do it when
//! they are told to.

use super::keepsake;
use super::pages::Pages;
use super::rng::Rng;
use fathom_core::{Extents, Keepsake, Op, Request, RequestId};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// Says what happens, if FATHOM_TRACE is set.
pub fn trace(line: impl FnOnce() -> String) {
    static WANTED: OnceLock<bool> = OnceLock::new();
    if *WANTED.get_or_init(|| std::env::var_os("FATHOM_TRACE").is_some()) {
        eprintln!("{}", line());
    }
}

/// What is written wholly or not at all.
pub const SECTOR: u64 = 512;

/// A change to a file.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    Write(Arc<[u8]>),
    /// So many bytes become zeroes.
    Zero(u64),
    /// The file becomes as long as this.
    Len(u64),
}

/// A change with its place and its time.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    pub file: usize,
    pub at: u64,
    pub change: Change,
    pub submitted: u64,
    pub done: u64,
    /// Durable once it is done.
    pub fua: bool,
}

/// What was done to a file before `submitted` is durable from `done` on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flush {
    pub file: usize,
    pub submitted: u64,
    pub done: u64,
}

/// Everything that power cuts are made from.
#[derive(Clone, Default)]
pub struct Log {
    /// In the order in which they were done.
    pub events: Vec<Event>,
    pub flushes: Vec<Flush>,
}

/// An operation that a worker waits for.
pub struct Pending {
    pub worker: usize,
    pub file: usize,
    pub id: RequestId,
    submitted: u64,
    /// It takes longer than most.
    pub slow: bool,
    /// Of a write, as it was then.
    bytes: Vec<u8>,
}

/// Which operations fail.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// The number of the first, and how many.
    pub first: u64,
    pub count: u64,
    pub errno: i32,
}

/// The server is killed in an operation: nothing happens after that.
pub struct Kill {
    /// The operation's number.
    pub at: u64,
    pub memory: Option<Keepsake>,
    /// What was in the memory then; none: it has not happened.
    pub left: Option<Vec<u64>>,
}

#[derive(Default)]
pub struct State {
    pub files: Vec<Pages>,
    pub pending: Vec<Pending>,
    /// Operations that come now are held instead, until they are let go.
    pub holding: bool,
    held: Vec<Pending>,
    /// None: nothing is recorded.
    pub log: Option<Log>,
    pub fault: Option<Fault>,
    /// No file can be longer.
    pub limit: Option<u64>,
    /// Files are devices: they keep their lengths.
    pub device: bool,
    /// Each flush of so many says that it is done, and does nothing; 0: none.
    pub lies: u64,
    /// The worker whose channels are being made.
    pub worker: usize,
    /// Operations so far.
    pub operations: u64,
    /// Flushes so far.
    pub flushes: u64,
    pub kill: Option<Kill>,
    now: u64,
    rng: Option<Rng>,
}

/// Shared by files and by whoever decides what happens next.
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
        // A test that has failed may have left it locked.
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The next instant.
    pub fn tick(&self) -> u64 {
        self.state().tick()
    }

    /// The result, as a channel gets it, of one pending operation.
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
                // SAFETY: the request is in flight.
                let mut out = unsafe { Extents::of(&request.segments, request.len) };
                state.files[file].describe(&mut out, at);
            }),
        };
        result.err().map_or(0, |errno| -errno)
    }

    /// Nobody waits for a pending operation any more: it is done, or not, or
    /// some of its sectors are.
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
        // Nobody hears of errors, either.
        let _ = outcome;
    }

    /// A request has come to a file.
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
    /// What was held can happen.
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

    /// Whether the next operation fails.
    fn counted(&mut self, takes_space: bool) -> Result<(), i32> {
        let number = self.operations;
        self.operations += 1;
        if let Some(kill) = &mut self.kill {
            match kill.left {
                Some(_) => return Err(libc::ESHUTDOWN),
                None if number >= kill.at => {
                    kill.left = Some(keepsake::words(kill.memory.as_ref()));
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
            // Some sectors may have been written all the same.
            self.tear(file, at, bytes, submitted);
        }
        fate?;
        self.change(file, at, Change::Write(bytes.into()), submitted, fua);
        Ok(())
    }

    /// Writes some of the sectors.
    fn tear(&mut self, file: usize, at: u64, bytes: &[u8], submitted: u64) {
        for (n, sector) in bytes.chunks(SECTOR as usize).enumerate() {
            if self.rng().one_in(2) {
                let at = at + n as u64 * SECTOR;
                self.change(file, at, Change::Write(sector.into()), submitted, false);
            }
        }
    }

    /// The file does not become longer, as with fallocate(2).
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

    /// Some storages make zeroes, some do nothing.
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
        // SAFETY: whoever submits a request keeps its segments valid until it
        // is complete.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(base, segment.iov_len) });
    }
    bytes
}

fn scatter(request: &Request, mut bytes: &[u8]) {
    for segment in &request.segments {
        let (part, rest) = bytes.split_at(segment.iov_len);
        let base = segment.iov_base.cast::<u8>();
        // SAFETY: whoever submits a request keeps its segments valid until it
        // is complete.
        unsafe { base.copy_from_nonoverlapping(part.as_ptr(), part.len()) };
        bytes = rest;
    }
}
