//! Where data is read from.

use crate::chain::{Chain, OpenOptions};
use crate::error::{Error, usage};
use crate::job::{Ask, Client, Copy, Job, Pages, Segment};
use crate::progress::Progress;
use fathom_core::extents::extents;
use fathom_core::{Disk, Op};
use fathom_formats::img::Format;
use fathom_storage::{NbdDisk, NbdOptions, NbdUri};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A source.
#[derive(Clone, Debug)]
pub enum Source {
    Image { path: PathBuf, open: OpenOptions },
    Nbd(NbdUri),
}

/// A source in use.
pub(crate) struct Opened {
    /// For people.
    pub(crate) path: PathBuf,
    pub(crate) client: Client,
    kind: Kind,
}

enum Kind {
    Image(Chain),
    Nbd(Arc<NbdDisk>),
}

/// Bytes that a server is asked about at once, and bytes of its answer.
const ASKED: u64 = 1 << 30;
const ANSWER: usize = 64 << 10;

impl Source {
    /// An NBD URI, or the path of an image that is opened like this.
    pub fn new(text: &str, open: OpenOptions) -> Result<Source, Error> {
        if !NbdUri::is_one(text) {
            let path = text.into();
            return Ok(Source::Image { path, open });
        }
        if open.format.is_some_and(|format| format != Format::Raw) {
            return Err(usage(
                Path::new(text),
                "an NBD export is a raw disk: -f raw",
            ));
        }
        let uri = text.parse();
        uri.map(Source::Nbd)
            .map_err(|error| usage(Path::new(text), format!("{error}")))
    }

    pub(crate) fn open(&self, job: &mut Job) -> Result<Opened, Error> {
        match self {
            Source::Image { path, open } => {
                let chain = Chain::open(path, open)?;
                Ok(Opened {
                    path: path.clone(),
                    client: job.client(chain.disk().clone(), open.engine)?,
                    kind: Kind::Image(chain),
                })
            }
            Source::Nbd(uri) => {
                let options = NbdOptions {
                    read_only: true,
                    ..NbdOptions::default()
                };
                let disk = Arc::new(NbdDisk::connect(uri, options)?);
                disk.activate()?;
                Ok(Opened {
                    path: uri.to_string().into(),
                    client: job.client(disk.clone(), Default::default())?,
                    kind: Kind::Nbd(disk),
                })
            }
        }
    }
}

impl Opened {
    /// Bytes of the disk.
    pub(crate) fn size(&self) -> u64 {
        self.client.info().size
    }

    /// The identities of all files that are read.
    pub(crate) fn files(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let chain = match &self.kind {
            Kind::Image(chain) => Some(chain.disk().files()),
            Kind::Nbd(_) => None,
        };
        chain.into_iter().flatten()
    }

    pub(crate) fn chain(&self) -> Option<&Chain> {
        match &self.kind {
            Kind::Image(chain) => Some(chain),
            Kind::Nbd(_) => None,
        }
    }

    /// Copies what the first `layers` images of the chain decide.
    pub(crate) fn copy(
        &self,
        copy: &Copy<'_>,
        layers: usize,
        progress: &mut Progress<'_>,
    ) -> Result<(), Error> {
        let all = 0..self.size();
        match &self.kind {
            Kind::Image(chain) => {
                let mut mapper = chain.disk().mapper()?;
                let mut segments = mapper.extents(all, layers).filter_map(|extent| {
                    let extent = match extent {
                        Ok(extent) => extent,
                        Err(error) => return Some(Err(error.into())),
                    };
                    let range = extent.start..extent.start + extent.len;
                    match extent.is_below() {
                        true => None,
                        false if extent.zero => Some(Ok(Segment::Zero(range))),
                        false => Some(Ok(Segment::Data(range))),
                    }
                });
                copy.run(&mut segments, progress)
            }
            Kind::Nbd(_) => {
                let mut segments = Asked::new(copy.job, &self.client, all)?;
                copy.run(&mut segments, progress)
            }
        }
    }
}

/// Segments as the disk itself tells them.
struct Asked<'a> {
    job: &'a Job,
    client: &'a Client,
    left: Range<u64>,
    known: Vec<Segment>,
    pages: Option<Pages>,
}

impl<'a> Asked<'a> {
    fn new(job: &'a Job, client: &'a Client, left: Range<u64>) -> Result<Asked<'a>, Error> {
        Ok(Asked {
            job,
            client,
            left,
            known: Vec::new(),
            pages: Some(Pages::new(ANSWER).map_err(Error::memory)?),
        })
    }

    fn ask(&mut self) {
        let len = (self.left.end - self.left.start).min(ASKED);
        let ask = Ask::new(Op::BlockStatus, self.left.start, len, self.pages.take());
        let answer = self.job.answer_to(self.client, ask);
        let pages = answer.ask.pages.expect("what was sent");
        let mut at = self.left.start;
        // Who cannot say has data everywhere.
        let told = match answer.errno {
            0 => extents(pages.bytes()).collect(),
            _ => Vec::new(),
        };
        for (status, len) in told {
            let range = at..at + len;
            at = range.end;
            self.known.push(match status.zero {
                true => Segment::Zero(range),
                false => Segment::Data(range),
            });
        }
        if at == self.left.start {
            at += len;
            self.known.push(Segment::Data(self.left.start..at));
        }
        self.known.reverse();
        self.left.start = at;
        self.pages = Some(pages);
    }
}

impl Iterator for Asked<'_> {
    type Item = Result<Segment, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.known.is_empty() && !self.left.is_empty() {
            self.ask();
        }
        self.known.pop().map(Ok)
    }
}
