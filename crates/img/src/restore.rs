//! `fathom img restore`

use crate::background::{Background, pause_after};
use crate::error::{Error, Moving, usage};
use crate::job::{Pool, WriteBehind, run_of};
use crate::progress::Progress;
use crate::sink::{Origin, Sink, TargetOptions, flush, granule};
use crate::source::located;
use crate::stream;
use crate::stripes::{depth, start_of};
use fathom_archive::{Image, Manifest};
use fathom_core::{AlignedBuffer, Op};
use fathom_stack::{Client, DiskReply, DiskRequest, Job};
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Size of a request in bytes.
const PIECE: u64 = 512 << 10;
/// Maximum wait between two checks for cancellation.
const TICK: Duration = Duration::from_millis(100);

/// A fetched stripe: its index, and its contents.
type Fetched = (u32, Result<Vec<u8>, fathom_archive::Error>);

/// Restores a disk from an archive. `manifest` is the address of the image's manifest. Each stripe
/// is compared with its hash before it is written. All data is durable when this function returns.
pub fn restore(
    manifest: &str,
    target: &OsStr,
    options: &TargetOptions,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    if target == stream::NAME {
        let problem = "cannot be a target; name a file";
        return Err(usage(Path::new("standard output"), problem));
    }
    let background = Background::new()?;
    let image = Arc::new(background.run(Image::open(manifest))?);
    let path = Path::new(manifest);
    let files = std::fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let origin = Origin {
        path,
        size: image.manifest().size(),
        files: files.into_iter().collect(),
    };
    let location = &located(target)?;
    let sink = Sink::open(location, &[origin], options)?;
    let target = &*location.name();
    let moving = Moving {
        source: path,
        target,
    };
    let moved = move_data(&image, &sink, moving, options, &background, progress);
    sink.finish(moved, target, progress, |_, _| Ok(()))
}

fn move_data(
    image: &Arc<Image>,
    sink: &Sink,
    moving: Moving<'_>,
    options: &TargetOptions,
    background: &Background<Fetched>,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    let mut job = Job::default();
    let client = job.client(sink.disk(), options.engine)?;
    progress.begin(image.manifest().size());
    let depth = depth(image.manifest().stripe_size());
    let mut run = Run {
        job: &job,
        image,
        target: &client,
        moving,
        granule: granule(&client, options.sparse, None, PIECE),
        target_is_zero: sink.is_zero(options),
        unmap: options.unmaps(),
        background,
        behind: sink.write_behind(options.cache),
        pool: Pool::new(image.manifest().stripe_size() as usize, depth),
        parts: std::iter::repeat_with(|| None).take(depth).collect(),
        next: 0,
        fetching: 0,
        depth,
        unwritten: data_of(image.manifest()),
        progress,
    };
    let outcome = run.run();
    // Wait for the pending writes, because they own the buffers.
    while run.writes() > 0 {
        let answer = run.job.wait();
        run.parts[answer.ask.tag as usize] = None;
    }
    outcome?;
    let (path, size) = (moving.target, image.manifest().size());
    sink.clear_behind(size, run.job, run.target, path, options, run.progress)?;
    flush(run.job, run.target, path)?;
    run.progress.end();
    Ok(())
}

/// A stripe that is being written.
#[derive(Clone, Copy, Debug)]
struct Part {
    /// Offset in the disk in bytes.
    start: u64,
    len: u64,
    written: u64,
    /// Whether the manifest has a hash of the stripe.
    is_data: bool,
}

struct Run<'a, 'p> {
    job: &'a Job,
    image: &'a Arc<Image>,
    target: &'a Client,
    moving: Moving<'a>,
    /// Minimum length in bytes of zeroes that are not written as data. 0 writes all zeroes as data.
    granule: u64,
    target_is_zero: bool,
    /// Writes of zeroes may deallocate space in the target.
    unmap: bool,
    background: &'a Background<Fetched>,
    behind: WriteBehind,
    pool: Pool,
    /// Stripes that are being written. The index is the tag of their requests.
    parts: Vec<Option<Part>>,
    /// Index of the next stripe to fetch.
    next: u32,
    /// Number of stripes that are being fetched.
    fetching: usize,
    depth: usize,
    /// Bytes of stripes with data that are not completely written.
    unwritten: u64,
    progress: &'a mut Progress<'p>,
}

impl Run<'_, '_> {
    fn run(&mut self) -> Result<(), Error> {
        loop {
            self.progress.check()?;
            while self.fetching + self.writes() < self.depth && self.fetch_next() {}
            let wait = match self.writes() {
                0 if self.fetching == 0 => return Ok(()),
                0 => TICK,
                _ => {
                    if let Some(answer) = self.job.wait_for(TICK) {
                        self.take(answer)?;
                    }
                    Duration::ZERO
                }
            };
            let mut fetched = self.background.wait_for(wait);
            while let Some((index, bytes)) = fetched {
                self.fetching -= 1;
                self.begin(index, &bytes?)?;
                fetched = self.background.wait_for(Duration::ZERO);
            }
        }
    }

    /// Returns the number of stripes that are being written.
    fn writes(&self) -> usize {
        self.parts.iter().flatten().count()
    }

    /// Starts fetching the next stripe. Returns `false` if the fetch of every stripe has been
    /// started.
    fn fetch_next(&mut self) -> bool {
        let manifest = self.image.manifest();
        while let Some(hash) = manifest.stripes().get(self.next as usize) {
            let index = self.next;
            self.next += 1;
            if hash.is_none() && self.target_is_zero {
                self.progress.add(manifest.len_of(index) as u64);
                continue;
            }
            self.fetching += 1;
            self.background.begin(fetch(self.image.clone(), index));
            return true;
        }
        false
    }

    fn begin(&mut self, index: u32, bytes: &[u8]) -> Result<(), Error> {
        let pages = self.pool.take().map_err(Error::memory)?;
        let mut pages = pages.expect("as many as stripes under way");
        pages.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        let tag = self.parts.iter().position(Option::is_none);
        let part = Part {
            start: start_of(self.image.manifest(), index),
            len: bytes.len() as u64,
            written: 0,
            is_data: self.image.manifest().stripes()[index as usize].is_some(),
        };
        self.go_on(tag.expect("likewise"), part, pages);
        Ok(())
    }

    /// Writes the next run of a stripe.
    fn go_on(&mut self, tag: usize, mut part: Part, pages: AlignedBuffer) {
        while part.written < part.len {
            let left = &pages.bytes()[part.written as usize..part.len as usize];
            let at = part.start + part.written;
            let (is_zero, len) = run_of(left, at, self.granule);
            if is_zero && self.target_is_zero {
                part.written += len;
                continue;
            }
            let most = match self.target.info().write_zeroes {
                Some(limits) if is_zero => limits.max_len & !(PIECE - 1),
                _ => PIECE,
            };
            let len = len.min(most.max(PIECE));
            self.parts[tag] = Some(part);
            let op = if is_zero { Op::WriteZeroes } else { Op::Write };
            return self.target.ask(DiskRequest {
                unmap: is_zero && self.unmap,
                skip: part.written as usize,
                tag: tag as u64,
                ..DiskRequest::new(op, at, len, Some(pages))
            });
        }
        self.parts[tag] = None;
        if part.is_data {
            self.unwritten -= part.len;
        }
        self.behind.add(part.len);
        self.progress.add(part.len);
        self.pool.put(pages);
    }

    fn take(&mut self, answer: DiskReply) -> Result<(), Error> {
        let DiskReply { ask, errno, .. } = answer;
        let tag = ask.tag as usize;
        if errno != 0 {
            let failed = self.moving.write_error(ask.offset, ask.len, errno);
            self.parts[tag] = None;
            return Err(failed.needing(|| self.unwritten));
        }
        let mut part = self.parts[tag].expect("it has begun");
        part.written += ask.len;
        self.go_on(tag, part, ask.pages.expect("what was sent"));
        Ok(())
    }
}

fn data_of(manifest: &Manifest) -> u64 {
    let all = (0..).zip(manifest.stripes());
    let data = all.filter(|(_, hash)| hash.is_some());
    data.map(|(index, _)| manifest.len_of(index) as u64).sum()
}

async fn fetch(image: Arc<Image>, index: u32) -> Fetched {
    for attempt in 0.. {
        let stripe = image.stripe(index).await;
        match pause_after(&stripe, attempt) {
            None => return (index, stripe),
            Some(pause) => tokio::time::sleep(pause).await,
        }
    }
    unreachable!("attempts end")
}
