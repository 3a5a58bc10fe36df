//! `fathom img rebase`

use crate::chain::Chain;
use crate::error::{Error, Moving, of, usage};
use crate::job::{Burst, Pool, Segment, Segments, State, compressed_at_once};
use crate::open::{OpenOptions, format_of, identity_of, open};
use crate::progress::Progress;
use crate::source::Opened;
use fathom_core::{AlignedBuffer, Op, is_zero};
use fathom_formats::Format;
use fathom_formats::offline::backing::{NewBacking, set_backing};
use fathom_formats::served::Storage;
use fathom_stack::{Client, DiskReply, DiskRequest, Job, KeyRing, StoredImage, seen_from};
use fathom_storage::{Cache, Location};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Options for changing an image's backing file.
#[derive(Clone, Debug)]
pub struct RebaseOptions {
    /// Format of the image. `None`: detect it.
    pub format: Option<Format>,
    /// Name of the new backing file, as it is written into the image, and its format. `None`: no
    /// backing file.
    pub backing: Option<(String, Option<Format>)>,
    /// Change only the name. The caller knows that the new file has the same contents as the old
    /// one.
    pub only_name: bool,
    /// Compress the copied data (qcow2 only).
    pub compress: bool,
    /// Cache mode for the image and its present backing chain.
    pub cache: Cache,
    /// Cache mode for the new backing chain.
    pub backing_cache: Cache,
    /// Allow other processes to write to the old and the new backing files.
    pub force_share: bool,
    /// Directories in which the images may name files now, besides their own directories.
    pub allow_dirs: Vec<PathBuf>,
    /// Path of the external data file, overriding the name in the image.
    pub data_file: Option<PathBuf>,
    /// Keys that unlock encrypted images.
    pub keys: KeyRing,
}

/// Changes the backing file of an image.
///
/// Unless only the name is to change, the disk keeps its contents: data that differs in the new
/// backing file is first copied into the image. A kill at any time leaves the old backing file and
/// an unchanged disk.
pub fn rebase(
    location: &Location,
    options: &RebaseOptions,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    let writing = OpenOptions {
        cache: options.cache,
        ..OpenOptions::writing(None)
    };
    let image = open(location, &writing)?;
    let path = image.path();
    let format = format_of(&image, options.format)?;
    if !format.has_tables() {
        let problem = format!("{format} images have no backing file");
        return Err(usage(path, problem));
    }
    if !options.only_name {
        let new = open_new(&image, options)?;
        let copied = copy(&image, format, new, options, progress);
        if let Err(error) = copied.and_then(|()| progress.check()) {
            if error.is_midway() {
                let path = path.display();
                progress.warn(&format!(
                    "{path} is unchanged, and keeps its old backing file"
                ));
            }
            return Err(error);
        }
    }
    // The image has stayed locked since the copy, so the copied data has not changed.
    image.disk().activate()?;
    let backing = match &options.backing {
        None => None,
        Some((name, format)) => Some(NewBacking {
            name: name.as_bytes(),
            format: backing_format(&image, name, *format, options.only_name)?,
        }),
    };
    set_backing(image.bytes(), format, backing).map_err(of(path))?;
    progress.end();
    Ok(())
}

/// Returns the format of the new backing file, which is required: it is never detected.
fn backing_format(
    image: &StoredImage,
    name: &str,
    format: Option<Format>,
    may_be_away: bool,
) -> Result<Format, Error> {
    let Some(format) = format else {
        let problem = format!("the format of backing file {name} is not given; add -F");
        return Err(usage(image.path(), problem));
    };
    let below = seen_from(image.location(), name.as_bytes())?;
    if !may_be_away && identity_of(&below) == Some(image.identity()) {
        return Err(usage(
            image.path(),
            "an image cannot be its own backing file",
        ));
    }
    Ok(format)
}

/// Opens the new backing file that the user has named.
fn open_new(image: &StoredImage, options: &RebaseOptions) -> Result<Option<Chain>, Error> {
    let Some((name, format)) = &options.backing else {
        return Ok(None);
    };
    let format = backing_format(image, name, *format, false)?;
    let below = seen_from(image.location(), name.as_bytes())?;
    let open = OpenOptions {
        cache: options.backing_cache,
        force_share: options.force_share,
        allow_dirs: options.allow_dirs.clone(),
        keys: options.keys.clone(),
        ..OpenOptions::reading(Some(format))
    };
    let chain = Chain::open(&below, &open)?;
    if chain.disk().files().contains(&image.identity()) {
        let problem = format!("in the backing chain of {below}, so this would be a loop");
        return Err(usage(image.path(), problem));
    }
    Ok(Some(chain))
}

/// Copies all data into the image that differs in the new backing file. Leaves the image locked: it
/// must not change before the name of its backing file does.
fn copy(
    own: &Arc<StoredImage>,
    format: Format,
    new: Option<Chain>,
    options: &RebaseOptions,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    let open = OpenOptions {
        cache: options.cache,
        force_share: options.force_share,
        allow_dirs: options.allow_dirs.clone(),
        keys: options.keys.clone(),
        data_file: options.data_file.clone(),
        compress: options.compress,
        rebasing: true,
        keep_bitmaps: true,
        ..OpenOptions::writing(Some(format))
    };
    let mut job = Job::default();
    let path = own.path();
    let chain = Chain::of(own.clone(), &open)?;
    let unit = match options.compress {
        false => None,
        true => Some(
            chain
                .disk()
                .compress_unit()
                .ok_or_else(|| usage(path, "cannot be compressed; only qcow2 images can"))?,
        ),
    };
    let allocated = chain.disk().allocation_unit();
    let image = Opened::of(chain, open.engine, &mut job)?;
    let new = new.map(|new| Opened::of(new, open.engine, &mut job));
    let new = new.transpose()?;
    progress.begin(image.size());
    let piece = unit.unwrap_or(PIECE.max(allocated));
    let under_way = unit.map_or(0, compressed_at_once);
    let mut run = Run {
        job: &job,
        image: &image.client,
        new: new.as_ref().map(|new| (&new.client, new.size())),
        moving: Moving {
            source: path,
            target: path,
        },
        granule: unit.unwrap_or(allocated.min(PIECE)),
        piece,
        compress: unit.is_some(),
        pool: Pool::new(piece as usize, 2 + under_way),
        in_flight: 0,
        burst: Burst::new(under_way.div_ceil(2)),
        failure: None,
    };
    let compared = run.run(image.segments(&job, 1)?, progress);
    let written = run.finish();
    compared.and(written)?;
    match job.flush(&image.client) {
        0 => {}
        errno => return Err(Error::flush(path, errno)),
    }
    image.close()
}

/// Size of a request in bytes.
const PIECE: u64 = 1 << 20;

struct Run<'a> {
    job: &'a Job,
    /// The image on top of its old backing file.
    image: &'a Client,
    /// The new backing file, and the size of its disk in bytes.
    new: Option<(&'a Client, u64)>,
    moving: Moving<'a>,
    /// Granularity of the comparison: a granule is copied as a whole.
    granule: u64,
    /// Bytes that are compared at once; one granule if the image is compressed.
    piece: u64,
    compress: bool,
    pool: Pool,
    /// Number of compressed writes in flight, including those in `burst`.
    in_flight: usize,
    /// Compressed writes that have not been submitted yet.
    burst: Burst,
    /// First error of a compressed write, which completes in the background.
    failure: Option<Error>,
}

impl Run<'_> {
    fn run(&mut self, segments: Segments<'_>, progress: &mut Progress<'_>) -> Result<(), Error> {
        for segment in segments {
            let Segment { range, state } = segment?;
            // A hole is allocated in no image of the chain, but the new backing file may have data
            // there.
            if !matches!(state, State::Below | State::Hole) {
                progress.add(range.end - range.start);
                continue;
            }
            let mut at = range.start;
            while at < range.end {
                progress.check()?;
                let end = range.end.min((at + 1).next_multiple_of(self.piece));
                self.piece(at..end)?;
                progress.add(end - at);
                at = end;
            }
        }
        Ok(())
    }

    /// Submits the remaining writes, and waits until all have completed.
    fn finish(&mut self) -> Result<(), Error> {
        self.burst.release(self.image);
        while self.in_flight > 0 {
            let answer = self.job.wait();
            self.written(answer);
        }
        self.failure.take().map_or(Ok(()), Err)
    }

    fn take_pages(&mut self) -> Result<AlignedBuffer, Error> {
        loop {
            if let Some(pages) = self.pool.take().map_err(Error::memory)? {
                return Ok(pages);
            }
            // All other buffers are in use by pending writes.
            self.burst.release(self.image);
            let answer = self.job.wait();
            self.written(answer);
        }
    }

    fn written(&mut self, answer: DiskReply) {
        let DiskReply { ask, errno, .. } = answer;
        self.in_flight -= 1;
        if errno != 0 {
            let error = self.moving.write_error(ask.offset, ask.len, errno);
            self.failure.get_or_insert(error);
        }
        ask.pages.into_iter().for_each(|pages| self.pool.put(pages));
    }

    /// Waits for the next reply to a read, and handles replies to writes in between.
    fn read(&mut self) -> DiskReply {
        loop {
            let answer = self.job.wait();
            if answer.ask.op == Op::Read {
                return answer;
            }
            self.written(answer);
        }
    }

    /// Reads a range of both chains concurrently, and writes the granules that differ.
    fn piece(&mut self, range: Range<u64>) -> Result<(), Error> {
        let len = (range.end - range.start) as usize;
        let (old, mut new) = (self.take_pages()?, self.take_pages()?);
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        let new_end = self
            .new
            .map_or(0, |(_, size)| size)
            .clamp(range.start, range.end);
        new.bytes_mut()[(new_end - range.start) as usize..].fill(0);
        let mut awaited = 1;
        let read = |len: u64, pages| DiskRequest::new(Op::Read, range.start, len, Some(pages));
        self.image.ask(read(len as u64, old));
        let mut kept = None;
        match self.new {
            Some((client, _)) if new_end > range.start => {
                client.ask(read(new_end - range.start, new));
                awaited += 1;
            }
            _ => kept = Some(new),
        }
        let mut old = None;
        let mut failure = None;
        for _ in 0..awaited {
            let DiskReply { client, ask, errno } = self.read();
            if errno != 0 {
                failure = Some(self.moving.read_error(ask.offset, ask.len, errno));
            }
            match client == self.image.number() {
                true => old = ask.pages,
                false => kept = ask.pages,
            }
        }
        let both = old.zip(kept);
        let (old, new) = both.expect("both have come back");
        if let Some(error) = failure {
            return Err(error);
        }
        let mut old = Some(old);
        let mut at = 0;
        while at < len
            && let Some(pages) = old.take()
        {
            let (differs, end) = self.run_at(range.start, at, &pages.bytes()[..len], new.bytes());
            let start = range.start + at as u64;
            old = match differs {
                true if self.compress => self.write_later(start, at..end, pages),
                true => Some(self.write(start, at..end, pages)?),
                false => Some(pages),
            };
            at = end;
        }
        old.into_iter()
            .chain([new])
            .for_each(|pages| self.pool.put(pages));
        Ok(())
    }

    /// Writes old data to the image that differs in the new backing file, and waits for completion.
    fn write(
        &self,
        offset: u64,
        part: Range<usize>,
        old: AlignedBuffer,
    ) -> Result<AlignedBuffer, Error> {
        let ask = self.ask_to_write(offset, part, old);
        let len = ask.len;
        let answer = self.job.answer_to(self.image, ask);
        match answer.errno {
            0 => Ok(answer.ask.pages.expect("what was sent")),
            errno => Err(self.moving.write_error(offset, len, errno)),
        }
    }

    /// Like [`Run::write`], but does not wait. Used for compressed pieces, which are written as a
    /// whole. The reply returns the buffer.
    fn write_later(
        &mut self,
        offset: u64,
        part: Range<usize>,
        old: AlignedBuffer,
    ) -> Option<AlignedBuffer> {
        let ask = self.ask_to_write(offset, part, old);
        self.in_flight += 1;
        self.burst.push(self.image, ask);
        None
    }

    fn ask_to_write(&self, offset: u64, part: Range<usize>, old: AlignedBuffer) -> DiskRequest {
        let len = (part.end - part.start) as u64;
        let op = match is_zero(&old.bytes()[part.clone()]) {
            true => Op::WriteZeroes,
            false => Op::Write,
        };
        DiskRequest {
            skip: part.start,
            ..DiskRequest::new(op, offset, len, Some(old))
        }
    }

    /// Returns whether the two buffers differ from byte `at`, and the end of the run of granules
    /// for which that is the same.
    fn run_at(&self, start: u64, at: usize, old: &[u8], new: &[u8]) -> (bool, usize) {
        let mut found = None;
        let mut end = at;
        while end < old.len() {
            let next = (start + end as u64 + 1).next_multiple_of(self.granule) - start;
            let next = (next as usize).min(old.len());
            let differs = old[end..next] != new[end..next];
            match found {
                None => found = Some(differs),
                Some(before) if before != differs => break,
                _ => {}
            }
            end = next;
        }
        (found.unwrap_or(false), end)
    }
}
