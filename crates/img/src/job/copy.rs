//! Copies one disk to another.

use super::{Burst, Pool, Segment, State, WriteBehind, run_of};
use crate::error::{Error, Moving};
use crate::progress::Progress;
use fathom_core::AlignedBuffer;
use fathom_stack::{Client, DiskReply, DiskRequest, Job};
use fathom_trace::Op;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Options for a copy.
#[derive(Clone, Debug)]
pub struct CopyOptions {
    /// Maximum size of a request in bytes, and alignment of requests in the target. A power of two.
    pub piece: u64,
    /// Offset to add to a source offset to get the target offset. Negative if the copied segments
    /// begin later in the source than in the target.
    pub shift: i64,
    /// Maximum number of concurrent pieces.
    pub depth: usize,
    /// Zeroes that fill an aligned block of this many bytes are not written as data. 0 writes all
    /// zeroes as data.
    pub granule: u64,
    /// The unwritten parts of the target read as zeroes, so zeroes are skipped.
    pub target_is_zero: bool,
    /// Writes of zeroes may deallocate space in the target.
    pub unmap: bool,
    /// The target stores writes compressed, in units of `piece` bytes.
    pub compress: bool,
    /// Maximum transfer rate in bytes per second.
    pub rate: Option<u64>,
    /// Replace unreadable sectors with zeroes.
    pub salvage: bool,
}

/// A piece that is being copied with one buffer.
#[derive(Clone, Copy, Debug)]
struct Piece {
    start: u64,
    len: u64,
    /// Bytes that are read already, and size of a single read.
    read: u64,
    step: u64,
    /// Bytes that are written already.
    written: u64,
}

/// A copy between two disks.
pub struct Copy<'a> {
    pub job: &'a Job,
    pub source: &'a Client,
    pub target: &'a Client,
    pub options: CopyOptions,
    pub moving: Moving<'a>,
}

struct Run<'b, 'p> {
    copy: &'b Copy<'b>,
    pool: Pool,
    /// Pieces in progress. The index is the tag of their requests.
    pieces: Vec<Option<Piece>>,
    in_flight: usize,
    /// Compressed writes that count as in flight but have not been submitted yet.
    burst: Burst,
    /// Bytes whose reads were started.
    begun: u64,
    started: Instant,
    failure: Option<Error>,
    /// Bytes of completed pieces.
    done: u64,
    behind: &'b mut WriteBehind,
    progress: &'b mut Progress<'p>,
}

/// Maximum wait for a reply, after which the copy checks for cancellation.
const TICK: Duration = Duration::from_millis(100);

impl Copy<'_> {
    /// Copies the segments, which must be in order and must not overlap. After an error, waits
    /// until no request is in flight, and then returns the first error.
    pub fn run(
        &self,
        segments: &mut dyn Iterator<Item = Result<Segment, Error>>,
        behind: &mut WriteBehind,
        progress: &mut Progress<'_>,
    ) -> Result<(), Error> {
        let options = &self.options;
        let run = Run {
            copy: self,
            pool: Pool::new(options.piece as usize, options.depth),
            pieces: vec![None; options.depth],
            in_flight: 0,
            // Hold at most half of the pieces, so that the other half can be read meanwhile.
            burst: Burst::new(options.depth.div_ceil(2)),
            begun: 0,
            started: Instant::now(),
            failure: None,
            done: 0,
            behind,
            progress,
        };
        run.run(segments)
    }
}

impl Run<'_, '_> {
    fn run(
        mut self,
        segments: &mut dyn Iterator<Item = Result<Segment, Error>>,
    ) -> Result<(), Error> {
        let mut segments = segments.peekable();
        let mut current: Option<Segment> = None;
        loop {
            if let Err(error) = self.progress.check() {
                self.failure.get_or_insert(error);
            }
            while self.failure.is_none() {
                if current.is_none() {
                    current = match segments.next() {
                        None => break,
                        Some(Ok(segment)) => Some(segment),
                        Some(Err(error)) => {
                            self.failure = Some(error);
                            break;
                        }
                    };
                }
                match current.take() {
                    Some(segment) if self.may_begin() => match self.begin(segment) {
                        Ok(rest) => current = rest,
                        Err(error) => self.failure = Some(error),
                    },
                    segment => {
                        current = segment;
                        break;
                    }
                }
            }
            let is_done = current.is_none() && segments.peek().is_none();
            if self.in_flight == 0 && (is_done || self.failure.is_some()) {
                let left = segments.map_while(Result::ok).chain(current);
                return match self.failure {
                    None => Ok(()),
                    Some(error) => Err(error.needing(|| self.begun - self.done + data_in(left))),
                };
            }
            let is_last = is_done || self.failure.is_some();
            if is_last && self.in_flight == self.burst.len() {
                self.burst.release(self.copy.target);
            }
            if let Some(answer) = self.copy.job.wait_for(self.patience()) {
                self.take(answer);
            }
        }
    }

    /// Returns how long to wait for a reply before checking cancellation and the rate limit.
    fn patience(&self) -> Duration {
        let due = self.due().saturating_sub(self.started.elapsed());
        match due.is_zero() {
            true => TICK,
            false => due.min(TICK),
        }
    }

    /// Returns when the rate limit permits the next piece, as time since the start.
    fn due(&self) -> Duration {
        let rate = self.copy.options.rate;
        rate.map_or(Duration::ZERO, |rate| {
            Duration::from_secs_f64(self.begun as f64 / rate as f64)
        })
    }

    fn may_begin(&self) -> bool {
        self.in_flight < self.copy.options.depth && self.started.elapsed() >= self.due()
    }

    /// Starts the first piece of a segment, and returns the rest of the segment.
    fn begin(&mut self, segment: Segment) -> Result<Option<Segment>, Error> {
        let copy = self.copy;
        let piece = copy.options.piece;
        let Segment { range, state } = segment;
        let rest = |at: u64| {
            let range = at..range.end;
            (!range.is_empty()).then_some(Segment { range, state })
        };
        match state {
            State::Below => Ok(None),
            State::Zero | State::Hole if copy.options.target_is_zero => {
                self.progress.add(range.end - range.start);
                Ok(None)
            }
            State::Zero | State::Hole if copy.options.granule > 0 => {
                let most = copy.target.info().write_zeroes.map_or(piece, |l| l.max_len);
                let most = (most & !(piece - 1)).max(piece);
                let end = range.end.min(self.boundary(range.start, most));
                self.zero(range.start..end, None, u64::MAX);
                Ok(rest(end))
            }
            State::Data | State::Zero | State::Hole => {
                let Some(pages) = self.pool.take().map_err(Error::memory)? else {
                    return Ok(rest(range.start));
                };
                let end = range.end.min(self.boundary(range.start, piece));
                let len = end - range.start;
                let begun = Piece {
                    start: range.start,
                    len,
                    read: 0,
                    step: len,
                    written: 0,
                };
                let tag = self.pieces.iter().position(Option::is_none);
                let tag = tag.expect("as many as there are buffers");
                self.pieces[tag] = Some(begun);
                self.begun += len;
                self.read(tag as u64, begun, pages);
                Ok(rest(end))
            }
        }
    }

    fn read(&mut self, tag: u64, piece: Piece, pages: AlignedBuffer) {
        let len = piece.step.min(piece.len - piece.read);
        self.in_flight += 1;
        self.copy.source.ask(DiskRequest {
            skip: piece.read as usize,
            tag,
            ..DiskRequest::new(Op::Read, piece.start + piece.read, len, Some(pages))
        });
    }

    /// Returns the target offset of a source offset.
    fn in_target(&self, at: u64) -> u64 {
        at.wrapping_add_signed(self.copy.options.shift)
    }

    /// Returns the source offset after `at` that maps to the next multiple of `unit` in the target.
    fn boundary(&self, at: u64, unit: u64) -> u64 {
        let shift = self.copy.options.shift;
        let next = (self.in_target(at) + 1).next_multiple_of(unit);
        next.wrapping_add_signed(-shift)
    }

    /// Writes zeroes to the target. With `pages`, the write belongs to the piece that owns them.
    fn zero(&mut self, range: Range<u64>, pages: Option<AlignedBuffer>, tag: u64) {
        self.in_flight += 1;
        let start = self.in_target(range.start);
        self.copy.target.ask(DiskRequest {
            unmap: self.copy.options.unmap,
            tag,
            ..DiskRequest::new(Op::WriteZeroes, start, range.end - range.start, pages)
        });
    }

    fn take(&mut self, answer: DiskReply) {
        self.in_flight -= 1;
        let DiskReply { client, ask, errno } = answer;
        let is_read = client == self.copy.source.number();
        let Some(piece) = self.pieces.get(ask.tag as usize).copied().flatten() else {
            // This write of zeroes does not belong to a piece.
            match errno {
                0 => self.progress.add(ask.len),
                errno => self.fail(&ask, errno),
            }
            return;
        };
        let mut pages = ask.pages;
        match (is_read, errno) {
            (_, 0) => {}
            (true, _) if self.copy.options.salvage => {
                let pages = pages.take().expect("a read has pages");
                return self.salvage(ask.tag, piece, ask.len, pages, errno);
            }
            _ => {
                self.fail(&DiskRequest { pages: None, ..ask }, errno);
                self.end(ask.tag, pages);
                return;
            }
        }
        let pages = pages.expect("a piece has pages");
        let mut piece = piece;
        match is_read {
            true => piece.read += ask.len,
            false => piece.written += ask.len,
        }
        self.go_on(ask.tag, piece, pages);
    }

    /// Performs the next step of a piece: a read, a write, or completion.
    fn go_on(&mut self, tag: u64, mut piece: Piece, pages: AlignedBuffer) {
        if self.failure.is_some() {
            return self.end(tag, Some(pages));
        }
        if piece.read < piece.len {
            self.pieces[tag as usize] = Some(piece);
            return self.read(tag, piece, pages);
        }
        while piece.written < piece.len {
            let (is_zero, len) = self.run_at(&piece, pages.bytes());
            let at = piece.start + piece.written;
            self.pieces[tag as usize] = Some(piece);
            match is_zero {
                true if self.copy.options.target_is_zero => piece.written += len,
                true => return self.zero(at..at + len, Some(pages), tag),
                false => {
                    self.in_flight += 1;
                    let target = self.copy.target;
                    let ask = DiskRequest {
                        skip: piece.written as usize,
                        tag,
                        ..DiskRequest::new(Op::Write, self.in_target(at), len, Some(pages))
                    };
                    return match self.copy.options.compress {
                        true => self.burst.push(target, ask),
                        false => target.ask(ask),
                    };
                }
            }
        }
        self.progress.add(piece.len);
        self.behind.add(piece.len);
        self.done += piece.len;
        self.end(tag, Some(pages));
    }

    /// Returns whether the next bytes to write are zeroes, and the length of that run.
    fn run_at(&self, piece: &Piece, bytes: &[u8]) -> (bool, u64) {
        let left = &bytes[piece.written as usize..piece.len as usize];
        let start = self.in_target(piece.start + piece.written);
        run_of(left, start, self.copy.options.granule)
    }

    /// Retries a failed read with half the length. Replaces a single unreadable sector with zeroes.
    fn salvage(
        &mut self,
        tag: u64,
        mut piece: Piece,
        len: u64,
        mut pages: AlignedBuffer,
        errno: i32,
    ) {
        if len > 512 {
            piece.step = (len / 2).next_multiple_of(512);
        } else {
            let at = piece.read as usize;
            pages.bytes_mut()[at..at + len as usize].fill(0);
            let moving = &self.copy.moving;
            let what = moving.read_error(piece.start + piece.read, len, errno);
            self.progress.warn(&format!("{what}; replaced by zeroes"));
            piece.read += len;
        }
        self.go_on(tag, piece, pages);
    }

    fn fail(&mut self, ask: &DiskRequest, errno: i32) {
        let moving = &self.copy.moving;
        let error = match ask.op {
            Op::Read => moving.read_error(ask.offset, ask.len, errno),
            _ => moving.write_error(ask.offset, ask.len, errno),
        };
        self.failure.get_or_insert(error);
    }

    fn end(&mut self, tag: u64, pages: Option<AlignedBuffer>) {
        self.pieces[tag as usize] = None;
        if let Some(pages) = pages {
            self.pool.put(pages);
        }
    }
}

/// Returns the number of bytes that have to be copied.
fn data_in(segments: impl Iterator<Item = Segment>) -> u64 {
    let data = segments.filter(|segment| segment.state == State::Data);
    data.map(|segment| segment.range.end - segment.range.start)
        .sum()
}
