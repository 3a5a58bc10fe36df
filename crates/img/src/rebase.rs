//! `fathom img rebase`

use crate::chain::Chain;
use crate::error::{Error, Moving, of, usage};
use crate::job::{Burst, Pool, Segment, Segments, State, compressed_at_once};
use crate::open::{OpenOptions, format_of, identity_of, open};
use crate::progress::Progress;
use crate::source::Opened;
use fathom_core::{Op, is_zero};
use fathom_formats::Format;
use fathom_formats::offline::backing::{NewBacking, set_backing};
use fathom_formats::served::Storage;
use fathom_stack::{Answer, Ask, Client, Job, KeyRing, Pages, StoredImage, seen_from};
use fathom_storage::{Cache, Location};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// What backing file an image is to have.
#[derive(Clone, Debug)]
pub struct RebaseOptions {
    /// None: what it looks like.
    pub format: Option<Format>,
    /// As it is to be written in the image, with its format; none: no backing file.
    pub backing: Option<(String, Option<Format>)>,
    /// Change the name only: the new file is known to hold what the old one does.
    pub only_name: bool,
    /// What is copied is compressed (qcow2 only).
    pub compress: bool,
    pub cache: Cache,
    pub backing_cache: Cache,
    /// Backing files, the old and the new, may be written to by other processes.
    pub force_share: bool,
    /// Where files may be that the images name now, besides their own directories.
    pub allow_dirs: Vec<PathBuf>,
    /// The external data file, whatever the image calls it.
    pub data_file: Option<PathBuf>,
    /// What unlocks images that are encrypted.
    pub keys: KeyRing,
}

/// Gives an image another backing file. Its disk stays what it is, unless only the name is to
/// change: what the new file holds otherwise is copied into the image first. A kill at any instant
/// leaves the old backing file, and a disk that reads as before.
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
    // What was copied has not changed since: it has been locked from then on.
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

/// A format is never left to be guessed.
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

/// The new backing file, which the user has named.
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

/// Copies into the image what the new backing file holds otherwise. Afterwards it is locked: what was
/// copied must not change before the name does.
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

/// Bytes of a request.
const PIECE: u64 = 1 << 20;

struct Run<'a> {
    job: &'a Job,
    /// The image on its old backing file.
    image: &'a Client,
    /// Its new backing file, and the bytes of its disk.
    new: Option<(&'a Client, u64)>,
    moving: Moving<'a>,
    /// What is copied as a whole.
    granule: u64,
    /// What is compared at once: if it is compressed, no more than the granule.
    piece: u64,
    compress: bool,
    pool: Pool,
    /// Compressed writes.
    in_flight: usize,
    /// Of these, some that the image has not been given yet.
    burst: Burst,
    /// Of a write that nobody waits for.
    failure: Option<Error>,
}

impl Run<'_> {
    fn run(&mut self, segments: Segments<'_>, progress: &mut Progress<'_>) -> Result<(), Error> {
        for segment in segments {
            let Segment { range, state } = segment?;
            // What no image of the chain has is a hole, but the new backing file may have something
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

    /// Waits until nothing is under way any more.
    fn finish(&mut self) -> Result<(), Error> {
        self.burst.release(self.image);
        while self.in_flight > 0 {
            let answer = self.job.wait();
            self.written(answer);
        }
        self.failure.take().map_or(Ok(()), Err)
    }

    fn take_pages(&mut self) -> Result<Pages, Error> {
        loop {
            if let Some(pages) = self.pool.take().map_err(Error::memory)? {
                return Ok(pages);
            }
            // The others are being written.
            self.burst.release(self.image);
            let answer = self.job.wait();
            self.written(answer);
        }
    }

    fn written(&mut self, answer: Answer) {
        let Answer { ask, errno, .. } = answer;
        self.in_flight -= 1;
        if errno != 0 {
            let error = self.moving.write_error(ask.offset, ask.len, errno);
            self.failure.get_or_insert(error);
        }
        ask.pages.into_iter().for_each(|pages| self.pool.put(pages));
    }

    /// The next answer to a read.
    fn read(&mut self) -> Answer {
        loop {
            let answer = self.job.wait();
            if answer.ask.op == Op::Read {
                return answer;
            }
            self.written(answer);
        }
    }

    /// Reads both, at once, and writes what differs.
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
        let read = |len: u64, pages| Ask::new(Op::Read, range.start, len, Some(pages));
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
            let Answer { client, ask, errno } = self.read();
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

    /// Writes to the image what it would not read as on the new backing file.
    fn write(&self, offset: u64, part: Range<usize>, old: Pages) -> Result<Pages, Error> {
        let ask = self.ask_to_write(offset, part, old);
        let len = ask.len;
        let answer = self.job.answer_to(self.image, ask);
        match answer.errno {
            0 => Ok(answer.ask.pages.expect("what was sent")),
            errno => Err(self.moving.write_error(offset, len, errno)),
        }
    }

    /// Likewise, and does not wait: all of a piece that is compressed. The pages come back with the
    /// answer.
    fn write_later(&mut self, offset: u64, part: Range<usize>, old: Pages) -> Option<Pages> {
        let ask = self.ask_to_write(offset, part, old);
        self.in_flight += 1;
        self.burst.push(self.image, ask);
        None
    }

    fn ask_to_write(&self, offset: u64, part: Range<usize>, old: Pages) -> Ask {
        let len = (part.end - part.start) as u64;
        let op = match is_zero(&old.bytes()[part.clone()]) {
            true => Op::WriteZeroes,
            false => Op::Write,
        };
        Ask {
            skip: part.start,
            ..Ask::new(op, offset, len, Some(old))
        }
    }

    /// Whether the two differ from byte `at` on, and up to where that is so.
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
