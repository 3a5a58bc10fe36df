//! Sources of image commands.

use crate::chain::Chain;
use crate::error::{Error, usage};
use crate::job::{Segment, Segments, State};
use crate::open::{OpenOptions, open_bare};
use crate::stream;
use fathom_core::extents::extents;
use fathom_core::{AlignedBuffer, Op};
use fathom_formats::Format;
use fathom_formats::served::{Host, MapExtent, Storage};
use fathom_stack::{Client, DiskRequest, Job, StoredImage};
use fathom_storage::{EngineKind, Location};
use std::ffi::OsStr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The source of a job.
#[derive(Clone, Debug)]
pub enum Source {
    /// An image, or a disk without an image format.
    At {
        /// Location of the image or disk.
        location: Location,
        /// Options for opening the image or disk.
        open: OpenOptions,
    },
    /// Standard input. A pipe is first copied to an unnamed file.
    Input {
        /// Options for opening the input.
        open: OpenOptions,
    },
}

/// A source in use.
pub(crate) struct Opened {
    /// Name of the source, for messages.
    pub(crate) path: PathBuf,
    pub(crate) client: Client,
    kind: Kind,
    /// Range of the disk that is used, in bytes.
    part: Range<u64>,
}

enum Kind {
    Image(Chain),
    /// A disk without an image format, such as an NBD server's.
    Bare,
}

/// Maximum length of a block status request in bytes, and size of the buffer for its reply.
const ASKED: u64 = 1 << 30;
const ANSWER: usize = 64 << 10;

/// Length in bytes after which a segment is returned even if it continues, so that copying can
/// start.
const ENOUGH: u64 = 64 << 20;

/// Parses a location given by the user.
pub(crate) fn located(text: &OsStr) -> Result<Location, Error> {
    Location::parse(text).map_err(|error| usage(Path::new(text), error))
}

impl Source {
    /// Parses a source: `-` for standard input, or the location of an image or a disk. `open` says
    /// how to open it.
    pub fn new(text: &OsStr, open: OpenOptions) -> Result<Source, Error> {
        if text == stream::NAME {
            return Ok(Source::Input { open });
        }
        Source::at(located(text)?, open)
    }

    /// Creates a source at a known location.
    pub fn at(location: Location, open: OpenOptions) -> Result<Source, Error> {
        if open.snapshot.is_some() && !location.kind().images {
            let problem = format!("{} has no internal snapshots", location.kind().what);
            return Err(usage(&location.name(), problem));
        }
        Ok(Source::At { location, open })
    }

    /// Opens the sources in the given order.
    pub(crate) fn open_all<'a>(
        sources: impl IntoIterator<Item = &'a Source>,
        job: &mut Job,
    ) -> Result<Vec<Opened>, Error> {
        let sources = Vec::from_iter(sources);
        let inputs = sources.iter().filter(|s| matches!(s, Source::Input { .. }));
        if inputs.count() > 1 {
            let problem = "can be read only once; name it (-) once";
            return Err(usage(Path::new(stream::INPUT), problem));
        }
        sources.iter().map(|source| source.open(job)).collect()
    }

    pub(crate) fn open(&self, job: &mut Job) -> Result<Opened, Error> {
        match self {
            Source::At { location, open } => {
                let Some(disk) = open_bare(location, open)? else {
                    return Opened::of(Chain::open(location, open)?, open.engine, job);
                };
                disk.activate()?;
                let client = job.client(disk, Default::default())?;
                Ok(Opened::whole(location.name(), client, Kind::Bare))
            }
            Source::Input { open } => {
                let (path, file) = (Path::new(stream::INPUT), stream::standard_input()?);
                let image = StoredImage::from_file(path, file, (&open.storage()).into())?;
                let chain = Chain::of(Arc::new(image), open)?;
                Opened::of(chain, Default::default(), job)
            }
        }
    }
}

impl Opened {
    /// Creates a source from an open backing chain.
    pub(crate) fn of(chain: Chain, engine: EngineKind, job: &mut Job) -> Result<Opened, Error> {
        let path = chain.image().path().to_owned();
        let client = job.client(chain.disk().clone(), engine)?;
        Ok(Opened::whole(path, client, Kind::Image(chain)))
    }

    fn whole(path: PathBuf, client: Client, kind: Kind) -> Opened {
        let part = 0..client.info().size;
        Opened {
            path,
            client,
            kind,
            part,
        }
    }

    /// Restricts the source to a range of its disk, in bytes. The range is cut off at the end of
    /// the disk.
    pub(crate) fn take(&mut self, part: &Range<u64>) -> Result<(), Error> {
        let (start, size) = (part.start, self.part.end);
        if start > size {
            let problem = format!("has {size} bytes, so {start} bytes cannot be skipped");
            return Err(usage(&self.path, problem));
        }
        let end = part.end.min(size);
        let block = u64::from(self.client.info().block_size);
        if !start.is_multiple_of(block) || !end.is_multiple_of(block) {
            let problem =
                format!("has blocks of {block} bytes, and only whole blocks can be copied");
            return Err(usage(&self.path, problem));
        }
        self.part = start..end;
        Ok(())
    }

    /// Closes the source, after writing back data that is only in memory.
    pub(crate) fn close(self) -> Result<(), Error> {
        drop(self.client);
        match self.kind {
            Kind::Image(chain) => chain.close(),
            Kind::Bare => Ok(()),
        }
    }

    /// Returns the size in bytes of the used range of the disk.
    pub(crate) fn size(&self) -> u64 {
        self.part.end - self.part.start
    }

    /// Returns the offset in the disk at which the used range begins.
    pub(crate) fn start(&self) -> u64 {
        self.part.start
    }

    /// Returns the storage and the format of the image, or `None` if the source is not an image.
    pub(crate) fn image(&self) -> Option<(&StoredImage, Format)> {
        match &self.kind {
            Kind::Image(chain) => Some((chain.image(), chain.format())),
            Kind::Bare => None,
        }
    }

    /// Returns the identities of all files that the source reads.
    pub(crate) fn files(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let chain = match &self.kind {
            Kind::Image(chain) => Some(chain.disk().files()),
            Kind::Bare => None,
        };
        chain.into_iter().flatten()
    }

    /// Calls `look` with the map of a range, and with the names of the files that contain its
    /// parts.
    pub(crate) fn extents<T, E: From<Error>>(
        &self,
        job: &Job,
        range: Range<u64>,
        look: impl FnOnce(
            &mut dyn Iterator<Item = Result<MapExtent, Error>>,
            &[PathBuf],
        ) -> Result<T, E>,
    ) -> Result<T, E> {
        match &self.kind {
            Kind::Image(chain) => {
                let mut mapper = chain.disk().mapper().map_err(Error::from)?;
                let (all, paths) = (mapper.depth(), mapper.paths().to_vec());
                let mut extents = mapper.extents(range, all).map(|extent| Ok(extent?));
                look(&mut extents, &paths)
            }
            Kind::Bare => {
                let mut parts = Asked::new(job, &self.client, range)?.peekable();
                let mut next = || -> Result<Option<MapExtent>, Error> {
                    let Some(first) = parts.next().transpose()? else {
                        return Ok(None);
                    };
                    let mut extent = extent_of(&first);
                    while let Some(more) = parts.next_if(|next| {
                        next.as_ref()
                            .is_ok_and(|next| extent.merge(&extent_of(next)))
                    }) {
                        more?;
                    }
                    Ok(Some(extent))
                };
                let mut extents = std::iter::from_fn(|| next().transpose());
                look(&mut extents, std::slice::from_ref(&self.path))
            }
        }
    }

    /// Returns the segments of the used range. Only the first `layers` images of the backing chain
    /// are examined.
    pub(crate) fn segments<'a>(
        &'a self,
        job: &'a Job,
        layers: usize,
    ) -> Result<Segments<'a>, Error> {
        let all = self.part.clone();
        Ok(match &self.kind {
            Kind::Image(chain) => Box::new(mapped(chain, all, layers)?),
            Kind::Bare => Box::new(Asked::new(job, &self.client, all)?),
        })
    }
}

/// Returns the segments that the images' tables describe.
fn mapped(
    chain: &Chain,
    mut left: Range<u64>,
    layers: usize,
) -> Result<impl Iterator<Item = Result<Segment, Error>> + use<>, Error> {
    let mut mapper = chain.disk().mapper()?;
    let mut next = move || -> Result<Option<Segment>, Error> {
        let mut found: Option<Segment> = None;
        while !left.is_empty() {
            let extent = mapper.at(left.start, left.end - left.start, layers)?;
            let state = match extent.is_below() {
                true => State::Below,
                false if !extent.zero => State::Data,
                false if extent.present => State::Zero,
                false => State::Hole,
            };
            let end = left.start + extent.len;
            match &mut found {
                None => {
                    let range = left.start..end;
                    found = Some(Segment { range, state });
                }
                Some(segment) if segment.state == state => segment.range.end = end,
                Some(_) => break,
            }
            left.start = end;
            if found
                .as_ref()
                .is_some_and(|s| end - s.range.start >= ENOUGH)
            {
                break;
            }
        }
        Ok(found)
    };
    Ok(std::iter::from_fn(move || next().transpose()))
}

/// Converts a segment of an export into a map extent. The export counts as its own only file.
fn extent_of(segment: &Segment) -> MapExtent {
    let start = segment.range.start;
    MapExtent {
        start,
        len: segment.range.end - start,
        present: true,
        zero: segment.state != State::Data,
        data: matches!(segment.state, State::Data | State::Zero),
        host: Some(Host {
            file: 0,
            offset: start,
        }),
        ..MapExtent::default()
    }
}

/// Iterates over the segments that a disk reports as block status.
pub(crate) struct Asked<'a> {
    job: &'a Job,
    client: &'a Client,
    /// Name of the disk if its block status is required, for the error message.
    needed: Option<&'a Path>,
    left: Range<u64>,
    known: Vec<Segment>,
    pages: Option<AlignedBuffer>,
}

impl<'a> Asked<'a> {
    pub(crate) fn new(
        job: &'a Job,
        client: &'a Client,
        left: Range<u64>,
    ) -> Result<Asked<'a>, Error> {
        Ok(Asked {
            job,
            client,
            needed: None,
            left,
            known: Vec::new(),
            pages: Some(AlignedBuffer::try_new(ANSWER).map_err(Error::memory)?),
        })
    }

    /// Makes failures of block status requests an error. `path` is the name of the disk in the
    /// error.
    pub(crate) fn or_fail(self, path: &'a Path) -> Asked<'a> {
        let needed = Some(path);
        Asked { needed, ..self }
    }

    fn ask(&mut self) -> Result<(), Error> {
        let len = (self.left.end - self.left.start).min(ASKED);
        let ask = DiskRequest::new(Op::BlockStatus, self.left.start, len, self.pages.take());
        let answer = self.job.answer_to(self.client, ask);
        let pages = answer.ask.pages.expect("what was sent");
        let mut at = self.left.start;
        let told = match (answer.errno, self.needed) {
            (0, _) => extents(pages.bytes()).collect(),
            // If the disk cannot report block status, treat all of it as data.
            (_, None) => Vec::new(),
            (errno, Some(path)) => {
                let start = std::mem::replace(&mut self.left.start, self.left.end);
                return Err(Error::data(path, "map", start, len, errno));
            }
        };
        for (status, len) in told {
            let range = at..at + len;
            at = range.end;
            let state = match (status.zero, status.hole) {
                (true, true) => State::Hole,
                (true, false) => State::Zero,
                (false, _) => State::Data,
            };
            self.known.push(Segment { range, state });
        }
        if at == self.left.start {
            at += len;
            let range = self.left.start..at;
            let state = State::Data;
            self.known.push(Segment { range, state });
        }
        self.known.reverse();
        self.left.start = at;
        self.pages = Some(pages);
        Ok(())
    }
}

impl Iterator for Asked<'_> {
    type Item = Result<Segment, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.known.is_empty()
            && !self.left.is_empty()
            && let Err(error) = self.ask()
        {
            return Some(Err(error));
        }
        self.known.pop().map(Ok)
    }
}
