//! Copies the marked ranges of one disk to another.

use fathom_core::extents::extents;
use fathom_core::{AlignedBuffer, Changes, Op, RangeLimits, is_zero};
use fathom_stack::{Client, DiskReply, DiskRequest, Job};
use fathom_units::cause;
use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Maximum bytes of a piece, and of a piece that counts as small.
const PIECE: u64 = 1 << 20;
const SMALL: u64 = 64 << 10;

/// Maximum number of pieces in flight, and of large ones. Many hide the latency of a long path.
const DEPTH: usize = 128;
const LARGE_DEPTH: usize = 8;

/// Minimum length in bytes of a run for which block status is queried first.
const WORTH_ASKING: u64 = 4 << 20;
/// Maximum bytes per block status query, and size in bytes of its reply buffer.
const ASKED: u64 = 1 << 30;
const ANSWER: usize = 64 << 10;

/// Maximum number of runs taken from the change map per call.
const RUNS: usize = 64;

/// Maximum wait between two checks for cancellation.
const TICK: Duration = Duration::from_millis(50);

/// Why a slice was not copied.
pub(crate) enum Failure {
    /// The caller asked to stop.
    Stopped,
    Problem(String),
}

/// A copy operation from a source disk to a target disk.
pub(crate) struct Copy<'a> {
    pub(crate) job: &'a Job,
    pub(crate) source: &'a Client,
    pub(crate) target: &'a Client,
    pub(crate) pace: Pace,
    /// Returns true when copying must stop.
    pub(crate) stops: &'a dyn Fn() -> bool,
    /// Target duration of a slice, after which the caller does other work.
    pub(crate) slice: Duration,
}

/// A limit in bytes per second that may change while a job runs. Zero means no limit.
#[derive(Debug, Default)]
pub(crate) struct Rate(AtomicU64);

impl Rate {
    pub(crate) fn new(limit: Option<u64>) -> Arc<Rate> {
        Arc::new(Rate(AtomicU64::new(limit.unwrap_or(0))))
    }

    pub(crate) fn limit(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|limit| *limit > 0)
    }

    pub(crate) fn set(&self, limit: Option<u64>) {
        self.0.store(limit.unwrap_or(0), Ordering::Relaxed);
    }
}

/// Paces a copy so that it stays within a rate.
pub(crate) struct Pace {
    rate: Arc<Rate>,
    /// Whether the rate is suspended at present.
    is_free: Cell<bool>,
    /// The limit from which `next` was computed.
    limit: Cell<Option<u64>>,
    /// When the next piece may begin.
    next: Cell<Instant>,
}

impl Pace {
    pub(crate) fn new(rate: Arc<Rate>) -> Pace {
        Pace {
            rate,
            is_free: Cell::new(false),
            limit: Cell::new(None),
            next: Cell::new(Instant::now()),
        }
    }

    /// Suspends the rate, or applies it again.
    pub(crate) fn set_free(&self, is_free: bool) {
        self.is_free.set(is_free);
    }

    fn limit(&self) -> Option<u64> {
        let limit = self.rate.limit().filter(|_| !self.is_free.get());
        if self.limit.replace(limit) != limit {
            // Under the previous limit, the next piece might have been hours away.
            self.next.set(Instant::now());
        }
        limit
    }

    /// Returns whether the rate allows another piece now.
    pub(crate) fn may_begin(&self) -> bool {
        self.limit().is_none() || self.next.get() <= Instant::now()
    }

    /// Returns the time to wait for a reply before checking the rate and cancellation again.
    pub(crate) fn patience(&self) -> Duration {
        let is_limited = self.limit().is_some();
        let due = self.next.get().saturating_duration_since(Instant::now());
        match is_limited && !due.is_zero() {
            true => due.min(TICK),
            false => TICK,
        }
    }

    /// Accounts for `bytes` that have just been started.
    pub(crate) fn has_begun(&self, bytes: u64) {
        if let Some(limit) = self.limit() {
            let time = Duration::from_secs_f64(bytes as f64 / limit as f64);
            // A late piece shortens the next interval, by TICK at most.
            let now = Instant::now();
            let from = self.next.get().max(now.checked_sub(TICK).unwrap_or(now));
            self.next.set(from.checked_add(time).unwrap_or(from));
        }
    }
}

/// The state of one slice of a copy.
#[derive(Default)]
struct Slice {
    /// Runs to split into pieces, in order; `true` if their block status is not known yet.
    runs: VecDeque<(Range<u64>, bool)>,
    /// All ranges taken from the change map; they are marked again if the slice fails.
    taken: Vec<Range<u64>>,
    in_flight: usize,
    large: usize,
    /// Free buffers: for small pieces, and for large ones.
    free: [Vec<AlignedBuffer>; 2],
    copied: u64,
    failure: Option<Failure>,
}

impl Slice {
    fn has_room(&self) -> bool {
        self.in_flight < DEPTH && self.large < LARGE_DEPTH
    }

    fn memory(&mut self, len: u64) -> io::Result<AlignedBuffer> {
        let is_large = len > SMALL;
        self.large += usize::from(is_large);
        let pages = self.free[usize::from(is_large)].pop();
        let size = if is_large { PIECE } else { SMALL };
        pages.map_or_else(|| AlignedBuffer::try_new(size as usize), Ok)
    }

    fn give_back(&mut self, pages: AlignedBuffer, len: u64) {
        let is_large = len > SMALL;
        self.large -= usize::from(is_large);
        self.free[usize::from(is_large)].push(pages);
    }
}

impl Copy<'_> {
    /// Copies some of the marked ranges from `cursor` on and returns the number of bytes.
    ///
    /// If the slice fails, all ranges that it took are marked again.
    pub(crate) fn slice(&self, todo: &Changes, cursor: &mut u64) -> Result<u64, Failure> {
        let begin = Instant::now();
        let mut slice = Slice::default();
        loop {
            if (self.stops)() {
                slice.failure.get_or_insert(Failure::Stopped);
            }
            while slice.failure.is_none() && slice.has_room() && self.pace.may_begin() {
                let is_over = begin.elapsed() > self.slice;
                match self.begin(&mut slice, todo, cursor, is_over) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(problem) => slice.failure = Some(Failure::Problem(problem)),
                }
            }
            if slice.in_flight == 0 {
                let waits = slice.failure.is_none() && !self.pace.may_begin();
                if !waits || begin.elapsed() > self.slice {
                    put_back(&mut slice, todo, cursor);
                    break;
                }
            }
            if let Some(answer) = self.job.wait_for(self.pace.patience()) {
                self.take(answer, &mut slice);
            }
        }
        match slice.failure {
            None => Ok(slice.copied),
            Some(failure) => {
                let again = slice.taken.into_iter();
                again.for_each(|range| todo.mark(range.start, range.end - range.start));
                Err(failure)
            }
        }
    }

    /// Starts one more piece. Returns false if no run is left or the slice's time is over.
    fn begin(
        &self,
        slice: &mut Slice,
        todo: &Changes,
        cursor: &mut u64,
        is_over: bool,
    ) -> Result<bool, String> {
        if is_over {
            put_back(slice, todo, cursor);
        } else if slice.runs.is_empty() {
            take_runs(slice, todo, cursor);
        }
        let Some((range, is_new)) = slice.runs.pop_front() else {
            return Ok(false);
        };
        let len = range.end - range.start;
        if is_new && len >= WORTH_ASKING {
            self.look_for_data(range, slice)?;
            return Ok(true);
        }
        let end = range.end.min((range.start / PIECE + 1) * PIECE);
        if end < range.end {
            slice.runs.push_front((end..range.end, is_new));
        }
        let len = end - range.start;
        let pages = slice.memory(len);
        let pages = pages.map_err(|error| format!("no memory to copy data: {}", cause(error)))?;
        self.source
            .ask(DiskRequest::new(Op::Read, range.start, len, Some(pages)));
        slice.in_flight += 1;
        slice.copied += len;
        self.pace.has_begun(len);
        Ok(true)
    }

    /// Queries block status so that zeroes are not read, if the target can write zeroes itself.
    fn look_for_data(&self, range: Range<u64>, slice: &mut Slice) -> Result<(), String> {
        let end = range.end.min(range.start + ASKED);
        if end < range.end {
            slice.runs.push_front((end..range.end, true));
        }
        let pages = AlignedBuffer::try_new(ANSWER)
            .map_err(|error| format!("no memory: {}", cause(error)))?;
        let ask = DiskRequest::new(Op::BlockStatus, range.start, end - range.start, Some(pages));
        let DiskReply { ask, errno, .. } = self.job.answer_to(self.source, ask);
        if errno != 0 {
            return Err(failed("cannot read the source", errno));
        }
        let pages = ask.pages.expect("it had some");
        let (mut at, mut data, mut parts) = (range.start, range.start, Vec::new());
        for (status, len) in extents(pages.bytes()) {
            let part = at..at.saturating_add(len).min(end);
            at = part.end;
            if let Some(limits) = self.zeroes().filter(|_| status.zero) {
                let inner = self.whole_blocks(part);
                if !inner.is_empty() {
                    self.write_zeroes(&inner, limits, slice);
                    parts.push(data..inner.start);
                    data = inner.end;
                }
            }
        }
        // The reply may end early, and at any offset.
        let known = self.whole_blocks(range.start..at).end;
        let known = if known > range.start && at < end {
            known
        } else {
            end
        };
        if known < end {
            slice.runs.push_front((known..end, true));
        }
        if data < known {
            parts.push(data..known);
        }
        for part in parts.into_iter().rev().filter(|part| !part.is_empty()) {
            slice.runs.push_front((part, false));
        }
        Ok(())
    }

    /// Shrinks a range to whole blocks of both disks.
    fn whole_blocks(&self, range: Range<u64>) -> Range<u64> {
        let block = u64::from(self.target.info().physical_block_size).max(4096);
        let end = match range.end == self.target.info().size {
            true => range.end,
            false => range.end / block * block,
        };
        range.start.next_multiple_of(block)..end
    }

    fn zeroes(&self) -> Option<RangeLimits> {
        self.target.info().write_zeroes
    }

    fn write_zeroes(&self, range: &Range<u64>, limits: RangeLimits, slice: &mut Slice) {
        let most = limits.max_len.min(ASKED);
        let mut at = range.start;
        while at < range.end {
            let len = most.min(range.end - at);
            self.target.ask(zeroes(at, len));
            slice.in_flight += 1;
            at += len;
        }
    }

    fn take(&self, answer: DiskReply, slice: &mut Slice) {
        let DiskReply { client, ask, errno } = answer;
        slice.in_flight -= 1;
        let is_source = client == self.source.number();
        if errno != 0 {
            let what = match is_source {
                true => "cannot read the source",
                false => "cannot write the disk",
            };
            let problem = Failure::Problem(failed(what, errno));
            slice.failure.get_or_insert(problem);
            return;
        }
        let Some(pages) = ask.pages else {
            return;
        };
        if !is_source || slice.failure.is_some() {
            return slice.give_back(pages, ask.len);
        }
        let is_zero = is_zero(&pages.bytes()[..ask.len as usize]);
        let fits = |limits: RangeLimits| limits.max_len >= ask.len;
        if is_zero && self.zeroes().is_some_and(fits) {
            self.target.ask(zeroes(ask.offset, ask.len));
            slice.give_back(pages, ask.len);
        } else {
            self.target.ask(DiskRequest::new(
                Op::Write,
                ask.offset,
                ask.len,
                Some(pages),
            ));
        }
        slice.in_flight += 1;
    }
}

/// Measures the speed of copying.
#[derive(Default)]
pub(crate) struct Speed {
    /// Moving average in bytes per second.
    rate: f64,
}

impl Speed {
    pub(crate) fn copied(&mut self, bytes: u64, time: Duration) {
        let rate = bytes as f64 / time.as_secs_f64().max(1e-6);
        self.rate = match self.rate {
            0.0 => rate,
            before => (3.0 * before + rate) / 4.0,
        };
    }

    /// Returns the number of bytes that can be copied in `time`.
    pub(crate) fn within(&self, time: Duration) -> u64 {
        (self.rate * time.as_secs_f64()) as u64
    }

    /// Estimates how long copying `bytes` takes.
    pub(crate) fn takes(&self, bytes: u64) -> Duration {
        let seconds = bytes as f64 / self.rate.max(1.0);
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

fn take_runs(slice: &mut Slice, todo: &Changes, cursor: &mut u64) {
    // Wraps around once at most.
    for _ in 0..2 {
        for run in todo.take(*cursor..todo.size(), RUNS) {
            let range = *cursor..*cursor + run.len;
            *cursor = range.end;
            if run.changed {
                slice.taken.push(range.clone());
                slice.runs.push_back((range, true));
            }
        }
        if *cursor >= todo.size() {
            *cursor = 0;
        }
        if !slice.runs.is_empty() {
            return;
        }
    }
}

/// Returns the remaining runs to the change map, for the next slice.
fn put_back(slice: &mut Slice, todo: &Changes, cursor: &mut u64) {
    if let Some((first, _)) = slice.runs.front() {
        *cursor = first.start / todo.block() * todo.block();
    }
    for (range, _) in slice.runs.drain(..) {
        todo.mark(range.start, range.end - range.start);
    }
}

fn zeroes(offset: u64, len: u64) -> DiskRequest {
    DiskRequest {
        unmap: true,
        ..DiskRequest::new(Op::WriteZeroes, offset, len, None)
    }
}

fn failed(what: &str, errno: i32) -> String {
    format!("{what}: {}", cause(io::Error::from_raw_os_error(errno)))
}
