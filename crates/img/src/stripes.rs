//! Reads the stripes of a disk, and hashes them or stores them in an archive.

use crate::background::{Background, pause_after};
use crate::error::Error;
use crate::job::{Pool, Segments, State};
use crate::progress::Progress;
use crate::source::Opened;
use fathom_archive::{Hash, Manifest, Put, Writer};
use fathom_core::{AlignedBuffer, Op, is_zero};
use fathom_stack::{DiskReply, DiskRequest, Job};
use std::iter::Peekable;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Size of a request in bytes.
const PIECE: u64 = 512 << 10;
/// Approximate number of bytes in all stripes in progress.
const UNDER_WAY: u64 = 64 << 20;
const SECTOR: u64 = 512;
/// Maximum wait between two checks for cancellation.
const TICK: Duration = Duration::from_millis(100);

/// Returns the number of stripes to process concurrently.
pub(crate) fn depth(stripe_size: u32) -> usize {
    (UNDER_WAY / u64::from(stripe_size)).clamp(4, 32) as usize
}

/// The way in which stripes that were read are used.
#[derive(Clone)]
pub(crate) enum Keep {
    /// Only compute their hashes.
    Hashes,
    Archive(Arc<Writer>),
}

/// Result of reading all stripes of a disk.
#[derive(Debug, Default)]
pub(crate) struct Striped {
    pub(crate) hashes: Vec<Option<Hash>>,
    /// Number of bytes read.
    pub(crate) read: u64,
    /// Number of stripes that were added, and number of those that the archive had already.
    pub(crate) new: u32,
    pub(crate) known: u32,
    /// Number of `new` stripes that replaced damaged copies.
    pub(crate) repaired: u32,
    /// Stored size in bytes of the new stripes.
    pub(crate) stored: u64,
}

/// A buffer with the bytes of a stripe.
pub(crate) struct Filled {
    pages: AlignedBuffer,
    len: usize,
}

impl AsRef<[u8]> for Filled {
    fn as_ref(&self) -> &[u8] {
        &self.pages.bytes()[..self.len]
    }
}

/// A stripe that was hashed or stored.
pub(crate) struct Kept {
    index: u32,
    filled: Filled,
    put: Result<Put, fathom_archive::Error>,
}

impl Keep {
    async fn keep(self, index: u32, filled: Filled) -> Kept {
        let (put, filled) = match self {
            Keep::Hashes => {
                let (hash, filled) = Hash::taking(filled).await;
                let put = Put {
                    hash,
                    stored: None,
                    repaired: false,
                };
                (Ok(put), filled)
            }
            Keep::Archive(writer) => put_patiently(&writer, filled).await,
        };
        Kept { index, filled, put }
    }
}

async fn put_patiently(
    writer: &Writer,
    mut filled: Filled,
) -> (Result<Put, fathom_archive::Error>, Filled) {
    for attempt in 0.. {
        let (put, back) = writer.put(filled).await;
        filled = back;
        match pause_after(&put, attempt) {
            None => return (put, filled),
            Some(pause) => tokio::time::sleep(pause).await,
        }
    }
    unreachable!("attempts end")
}

/// Reads all stripes of a disk and hashes or stores them. `frame` has the sizes for the manifest.
/// The disk may be longer than the manifest says by a part of a sector.
pub(crate) fn read(
    job: &Job,
    source: &Opened,
    frame: &Manifest,
    keep: Keep,
    background: &Background<Kept>,
    progress: &mut Progress<'_>,
) -> Result<Striped, Error> {
    progress.begin(frame.size());
    let depth = depth(frame.stripe_size());
    let mut run = Run {
        job,
        source,
        frame,
        keep,
        background,
        pool: Pool::new(frame.stripe_size() as usize, depth),
        parts: std::iter::repeat_with(|| None).take(depth).collect(),
        keeping: 0,
        striped: Striped {
            hashes: vec![None; frame.stripes().len()],
            ..Striped::default()
        },
        progress,
    };
    let mut plan = Plan {
        segments: source.segments(job, usize::MAX)?.peekable(),
        frame,
        next: 0,
    };
    let outcome = run.run(&mut plan);
    // Wait for the pending reads, because they own the buffers.
    while run.reads() > 0 {
        let answer = run.job.wait();
        run.parts[answer.ask.tag as usize] = None;
    }
    outcome?;
    run.progress.end();
    Ok(run.striped)
}

/// Determines which part of each stripe has to be read.
struct Plan<'a> {
    segments: Peekable<Segments<'a>>,
    frame: &'a Manifest,
    next: u32,
}

/// Index of a stripe, and the range of the disk that contains all its data, if it has any.
type Planned = (u32, Option<Range<u64>>);

impl Plan<'_> {
    fn next(&mut self) -> Result<Option<Planned>, Error> {
        let index = self.next;
        let (start, len) = (start_of(self.frame, index), self.frame.len_of(index));
        if len == 0 {
            return Ok(None);
        }
        let end = start + len as u64;
        let mut data: Option<Range<u64>> = None;
        while let Some(segment) = self.segments.peek() {
            let Ok(segment) = segment else {
                let failed = self.segments.next().and_then(Result::err);
                return Err(failed.expect("it was just seen"));
            };
            if segment.range.start >= end {
                break;
            }
            if segment.state == State::Data {
                let from = segment.range.start.max(start);
                // A disk has whole sectors, even if its file ends within a sector.
                let to = segment.range.end.min(end.next_multiple_of(SECTOR));
                data = Some(data.map_or(from, |data| data.start)..to);
            }
            if segment.range.end > end {
                break;
            }
            self.segments.next();
        }
        self.next += 1;
        Ok(Some((index, data)))
    }
}

/// Returns the offset of a stripe in the disk.
pub(crate) fn start_of(frame: &Manifest, index: u32) -> u64 {
    u64::from(index) * u64::from(frame.stripe_size())
}

/// A stripe that is being read.
#[derive(Clone, Debug)]
struct Part {
    index: u32,
    /// The part of the stripe that is still to be read, as a range of the disk.
    left: Range<u64>,
}

struct Run<'a, 'p> {
    job: &'a Job,
    source: &'a Opened,
    frame: &'a Manifest,
    keep: Keep,
    background: &'a Background<Kept>,
    pool: Pool,
    /// Stripes that are being read. The index is the tag of their requests.
    parts: Vec<Option<Part>>,
    /// Number of stripes that are being hashed or stored.
    keeping: usize,
    striped: Striped,
    progress: &'a mut Progress<'p>,
}

impl Run<'_, '_> {
    fn run(&mut self, plan: &mut Plan<'_>) -> Result<(), Error> {
        let mut is_read = false;
        loop {
            self.progress.check()?;
            while !is_read && let Some(pages) = self.pool.take().map_err(Error::memory)? {
                is_read = !self.begin(plan, pages)?;
            }
            let wait = match self.reads() {
                0 if self.keeping == 0 => return Ok(()),
                0 => TICK,
                _ => {
                    if let Some(answer) = self.job.wait_for(TICK) {
                        self.take(answer)?;
                    }
                    Duration::ZERO
                }
            };
            let mut kept = self.background.wait_for(wait);
            while let Some(one) = kept {
                self.kept(one)?;
                kept = self.background.wait_for(Duration::ZERO);
            }
        }
    }

    /// Returns the number of stripes that are being read.
    fn reads(&self) -> usize {
        self.parts.iter().flatten().count()
    }

    /// Starts reading the next stripe that has data. Returns `false` if no such stripe is left.
    fn begin(&mut self, plan: &mut Plan<'_>, mut pages: AlignedBuffer) -> Result<bool, Error> {
        while let Some((index, data)) = plan.next()? {
            let Some(left) = data else {
                self.progress.add(self.frame.len_of(index) as u64);
                continue;
            };
            let start = start_of(self.frame, index);
            let bytes = pages.bytes_mut();
            // Clear the contents of the stripe that used the buffer before.
            bytes[..(left.start - start) as usize].fill(0);
            bytes[(left.end - start) as usize..].fill(0);
            self.striped.read += left.end - left.start;
            let tag = self.parts.iter().position(Option::is_none);
            let tag = tag.expect("as many as there are buffers");
            self.go_on(tag, Part { index, left }, pages);
            return Ok(true);
        }
        self.pool.put(pages);
        Ok(false)
    }

    /// Reads the next piece of a stripe or, when it is complete, starts hashing or storing it.
    fn go_on(&mut self, tag: usize, part: Part, pages: AlignedBuffer) {
        let Part { index, left } = part.clone();
        if !left.is_empty() {
            self.parts[tag] = Some(part);
            let len = PIECE.min(left.end - left.start);
            return self.source.client.ask(DiskRequest {
                tag: tag as u64,
                skip: (left.start - start_of(self.frame, index)) as usize,
                ..DiskRequest::new(Op::Read, left.start, len, Some(pages))
            });
        }
        self.parts[tag] = None;
        let len = self.frame.len_of(index);
        let filled = Filled { pages, len };
        if is_zero(filled.as_ref()) {
            self.progress.add(len as u64);
            return self.pool.put(filled.pages);
        }
        self.keeping += 1;
        self.background.begin(self.keep.clone().keep(index, filled));
    }

    fn take(&mut self, answer: DiskReply) -> Result<(), Error> {
        let DiskReply { ask, errno, .. } = answer;
        let tag = ask.tag as usize;
        let mut part = self.parts[tag].take().expect("it has begun");
        if errno != 0 {
            let path = &self.source.path;
            return Err(Error::data(path, "read", ask.offset, ask.len, errno));
        }
        part.left.start += ask.len;
        self.go_on(tag, part, ask.pages.expect("a read has pages"));
        Ok(())
    }

    fn kept(&mut self, kept: Kept) -> Result<(), Error> {
        let Kept { index, filled, put } = kept;
        self.keeping -= 1;
        let put = put?;
        match put.stored {
            Some(bytes) => {
                self.striped.new += 1;
                self.striped.repaired += u32::from(put.repaired);
                self.striped.stored += bytes;
            }
            None => self.striped.known += 1,
        }
        self.striped.hashes[index as usize] = Some(put.hash);
        self.progress.add(filled.len as u64);
        self.pool.put(filled.pages);
        Ok(())
    }
}
