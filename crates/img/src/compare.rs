//! `fathom img compare`

use crate::error::Error;
use crate::job::{Pool, Segment, State};
use crate::progress::Progress;
use crate::source::{Opened, Source};
use fathom_core::{AlignedBuffer, Op, is_zero};
use fathom_stack::{DiskReply, DiskRequest, Job};
use smallvec::SmallVec;
use std::ops::Range;
use std::time::Duration;

/// Options for a comparison.
#[derive(Clone, Copy, Debug, Default)]
pub struct CompareOptions {
    /// Also compare sizes and allocation.
    pub strict: bool,
}

/// Result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// The contents are equal. If the sizes differ, the rest of the longer disk is zeroes.
    Identical {
        /// Whether the disks have different sizes.
        sizes_differ: bool,
    },
    /// Offset of the first sector that differs. `is_behind`: it lies beyond the end of the shorter
    /// disk.
    Content {
        /// Offset of the sector in bytes.
        offset: u64,
        /// Whether the disks have different sizes.
        sizes_differ: bool,
        /// Whether the sector lies beyond the end of the shorter disk.
        is_behind: bool,
    },
    /// The sizes differ (only with `strict`).
    Sizes,
    /// The allocation states differ from this offset on (only with `strict`).
    Allocation {
        /// Offset of the first difference in bytes.
        offset: u64,
    },
}

/// Size of a request in bytes.
const PIECE: u64 = 512 << 10;
/// Maximum number of concurrent requests per disk.
const DEPTH: usize = 8;
/// Unit in which differences are reported, in bytes.
const SECTOR: usize = 512;
/// Maximum wait for a reply, after which the comparison checks for cancellation.
const TICK: Duration = Duration::from_millis(100);

/// Compares two disks. A read error names the disk that cannot be read.
pub fn compare(
    sources: [&Source; 2],
    options: CompareOptions,
    progress: &mut Progress<'_>,
) -> Result<Comparison, Error> {
    let mut job = Job::default();
    let disks = Source::open_all(sources, &mut job)?;
    let disks: [Opened; 2] = disks
        .try_into()
        .unwrap_or_else(|_| unreachable!("two were opened"));
    let sizes = [disks[0].size(), disks[1].size()];
    let sizes_differ = sizes[0] != sizes[1];
    if sizes_differ && options.strict {
        return Ok(Comparison::Sizes);
    }
    progress.begin(sizes[0].max(sizes[1]));
    let parts = Both {
        parts: [
            disks[0].segments(&job, usize::MAX)?.peekable(),
            disks[1].segments(&job, usize::MAX)?.peekable(),
        ],
        at: 0,
        end: sizes[0].max(sizes[1]),
    };
    let run = Run {
        job: &job,
        disks: &disks,
        strict: options.strict,
        pool: Pool::new(PIECE as usize, 2 * DEPTH),
        pairs: std::iter::repeat_with(|| None).take(DEPTH).collect(),
        found: None,
        progress,
    };
    let found = run.run(parts)?;
    Ok(match found {
        Some(Difference::Content(offset)) => Comparison::Content {
            offset,
            sizes_differ,
            is_behind: offset >= sizes[0].min(sizes[1]),
        },
        Some(Difference::Allocation(offset)) => Comparison::Allocation { offset },
        None => {
            progress.end();
            Comparison::Identical { sizes_differ }
        }
    })
}

type Peekable<'a> = std::iter::Peekable<crate::job::Segments<'a>>;

/// A range in which each disk has a single allocation state, and the two states.
type Part = (Range<u64>, [State; 2]);

/// Iterates over the segments of both disks together. A range beyond a disk's end counts as a hole.
struct Both<'a> {
    parts: [Peekable<'a>; 2],
    at: u64,
    end: u64,
}

impl Both<'_> {
    /// Returns the next range in which each disk has a single allocation state.
    fn next(&mut self) -> Result<Option<Part>, Error> {
        let (start, mut end) = (self.at, self.end);
        if start == end {
            return Ok(None);
        }
        let mut states = [State::Hole; 2];
        for (parts, state) in self.parts.iter_mut().zip(&mut states) {
            let is_over = |part: &Result<Segment, Error>| {
                part.as_ref().is_ok_and(|part| part.range.end <= start)
            };
            while parts.next_if(is_over).is_some() {}
            match parts.peek() {
                None => {}
                Some(Ok(part)) => {
                    *state = part.state;
                    end = end.min(part.range.end);
                }
                Some(Err(_)) => {
                    let failed = parts.next().and_then(Result::err);
                    return Err(failed.expect("it was just seen"));
                }
            }
        }
        self.at = end;
        Ok(Some((start..end, states)))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Difference {
    Content(u64),
    Allocation(u64),
}

impl Difference {
    fn offset(self) -> u64 {
        match self {
            Difference::Content(offset) | Difference::Allocation(offset) => offset,
        }
    }
}

/// A range that is read from one or both disks.
#[derive(Debug, Default)]
struct Pair {
    start: u64,
    len: u64,
    read: [Option<AlignedBuffer>; 2],
    /// Number of replies that have not arrived yet.
    awaited: u8,
}

struct Run<'a, 'p> {
    job: &'a Job,
    disks: &'a [Opened; 2],
    strict: bool,
    pool: Pool,
    /// Pairs in progress. The index is the tag of their requests.
    pairs: Vec<Option<Pair>>,
    found: Option<Difference>,
    progress: &'a mut Progress<'p>,
}

impl Run<'_, '_> {
    fn run(mut self, mut parts: Both<'_>) -> Result<Option<Difference>, Error> {
        let mut current: Option<Part> = None;
        let mut outcome = Ok(());
        loop {
            outcome = outcome.and_then(|()| self.progress.check());
            while outcome.is_ok() && self.found.is_none() {
                let (range, states) = match current.take() {
                    Some(part) => part,
                    None => match parts.next() {
                        Ok(Some(part)) => part,
                        Ok(None) => break,
                        Err(error) => {
                            outcome = Err(error);
                            break;
                        }
                    },
                };
                if self.strict && states[0] != states[1] {
                    self.found = Some(Difference::Allocation(range.start));
                    break;
                }
                if states.iter().all(|state| state.is_zero()) {
                    self.progress.add(range.end - range.start);
                    continue;
                }
                let Some(tag) = self.pairs.iter().position(Option::is_none) else {
                    current = Some((range, states));
                    break;
                };
                let end = range.end.min((range.start + 1).next_multiple_of(PIECE));
                let begun = self.begin(tag, range.start..end, states);
                outcome = outcome.and(begun);
                current = (end < range.end).then_some((end..range.end, states));
            }
            if self.pairs.iter().all(Option::is_none) {
                return outcome.map(|()| self.found);
            }
            if let Some(answer) = self.job.wait_for(TICK) {
                let taken = self.take(answer);
                outcome = outcome.and(taken);
            }
        }
    }

    fn begin(&mut self, tag: usize, range: Range<u64>, states: [State; 2]) -> Result<(), Error> {
        let len = range.end - range.start;
        let mut pair = Pair {
            start: range.start,
            len,
            ..Pair::default()
        };
        let mut pages = SmallVec::<[AlignedBuffer; 2]>::new();
        for _ in states.iter().filter(|state| !state.is_zero()) {
            let taken = self.pool.take().map_err(Error::memory)?;
            pages.push(taken.expect("two for each pair"));
        }
        let to_read = self.disks.iter().zip(states);
        let to_read = to_read.filter(|(_, state)| !state.is_zero());
        for ((disk, _), pages) in to_read.zip(pages) {
            pair.awaited += 1;
            disk.client.ask(DiskRequest {
                tag: tag as u64,
                ..DiskRequest::new(Op::Read, range.start, len, Some(pages))
            });
        }
        self.pairs[tag] = Some(pair);
        Ok(())
    }

    fn take(&mut self, answer: DiskReply) -> Result<(), Error> {
        let DiskReply { client, ask, errno } = answer;
        let side = usize::from(client == self.disks[1].client.number());
        let place = &mut self.pairs[ask.tag as usize];
        let pair = place.as_mut().expect("it has begun");
        pair.read[side] = ask.pages;
        pair.awaited -= 1;
        let outcome = match errno {
            0 => Ok(()),
            errno => {
                let path = &self.disks[side].path;
                Err(Error::data(path, "read", ask.offset, ask.len, errno))
            }
        };
        if pair.awaited > 0 {
            return outcome;
        }
        let pair = place.take().expect("it has begun");
        if outcome.is_ok() {
            if let Some(at) = difference(&pair) {
                let found = Difference::Content(pair.start + at);
                let first = self.found.is_none_or(|f| found.offset() < f.offset());
                self.found = if first { Some(found) } else { self.found };
            }
            self.progress.add(pair.len);
        }
        pair.read
            .into_iter()
            .flatten()
            .for_each(|p| self.pool.put(p));
        outcome
    }
}

/// Returns the offset in the pair of the first sector that differs.
fn difference(pair: &Pair) -> Option<u64> {
    let len = pair.len as usize;
    let bytes = pair
        .read
        .each_ref()
        .map(|pages| pages.as_ref().map(|p| &p.bytes()[..len]));
    let differs: Box<dyn Fn(Range<usize>) -> bool> = match bytes {
        [Some(one), Some(two)] => Box::new(move |range| one[range.clone()] != two[range]),
        [Some(one), None] | [None, Some(one)] => Box::new(move |range| !is_zero(&one[range])),
        [None, None] => return None,
    };
    if !differs(0..len) {
        return None;
    }
    let mut sectors = (0..len).step_by(SECTOR);
    let at = sectors.find(|at| differs(*at..len.min(at + SECTOR)))?;
    Some(at as u64)
}
