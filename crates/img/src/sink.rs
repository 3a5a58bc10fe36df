//! What a disk's data is moved to.

use crate::chain::Chain;
use crate::create::{CreateOptions, create_in, size_of};
use crate::error::{Error, of, usage};
use crate::job::WriteBehind;
use crate::open::{OpenOptions, identity_of, open_bare};
use crate::progress::Progress;
use crate::target::{Target, parent};
use fathom_core::{Disk, Op};
use fathom_formats::offline::create::Preallocation;
use fathom_stack::{Ask, Client, Job, KeyRing, Pages, seen_from};
use fathom_storage::{Cache, EngineKind, Location};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What is to be written to, and how.
#[derive(Clone, Debug)]
pub struct TargetOptions {
    /// What the target is to be; its size is that of the sources.
    pub create: CreateOptions,
    /// How the target is written.
    pub cache: Cache,
    pub engine: EngineKind,
    /// The target is there, and stays what it is but for its data.
    pub no_create: bool,
    /// With `no_create`: it reads as zeroes.
    pub target_is_zero: bool,
    pub compress: bool,
    /// Zeroes of so many bytes are not written as data; 0: all are.
    pub sparse: u64,
    /// Where files may be that the target, or its backing file, names.
    pub allow_dirs: Vec<PathBuf>,
    /// The external data file of a target that is there, whatever it calls it.
    pub data_file: Option<PathBuf>,
    /// What unlocks it, and what is below it.
    pub keys: KeyRing,
}

impl TargetOptions {
    /// But for what its image names.
    fn open(&self) -> OpenOptions {
        OpenOptions {
            cache: self.cache,
            engine: self.engine,
            compress: self.compress,
            allow_dirs: self.allow_dirs.clone(),
            data_file: self.data_file.clone(),
            keys: self.keys.clone(),
            ..OpenOptions::writing(Some(self.create.format))
        }
    }

    /// Whether writes of zeroes may give up space: not what the user wants to be allocated.
    pub(crate) fn unmaps(&self) -> bool {
        self.no_create || self.create.preallocation == Preallocation::Off
    }

    /// Only what its source itself has is written.
    pub(crate) fn has_backing(&self) -> bool {
        self.create.backing.is_some() && !self.no_create
    }
}

/// What a target is written from.
pub(crate) struct Origin<'a> {
    /// For people.
    pub(crate) path: &'a Path,
    /// Bytes of its disk.
    pub(crate) size: u64,
    /// The identities of its files.
    pub(crate) files: Vec<(u64, u64)>,
}

/// What is written to.
pub(crate) enum Sink {
    Image {
        chain: Chain,
        /// The new image; `None`: the image existed before and keeps its metadata.
        target: Option<Target>,
        /// The new disk reads as zeroes, apart from what is in its backing file.
        reads_as_zeroes: bool,
        /// Bytes that the new disk was asked to have.
        size: u64,
    },
    /// A disk that others make, an NBD server say.
    Bare(Arc<dyn Disk>),
}

/// Bytes of a write of zeroes, where the target has no such request.
const ZEROES: usize = 512 << 10;

const SECTOR: u64 = 512;

impl Sink {
    /// For all that the origins have, one behind the other.
    pub(crate) fn open(
        location: &Location,
        origins: &[Origin<'_>],
        options: &TargetOptions,
    ) -> Result<Sink, Error> {
        let path = &*location.name();
        if !location.kind().images && !options.no_create {
            let problem = "an existing disk; add --no-create (-n)";
            return Err(usage(path, problem));
        }
        let Some(disk) = open_bare(location, &options.open())? else {
            return open_image(location, origins, options);
        };
        disk.activate()?;
        let info = disk.info();
        refuse_smaller(path, info.size, size_of_all(origins))?;
        refuse_odd(path, info.block_size, origins)?;
        Ok(Sink::Bare(disk))
    }

    pub(crate) fn disk(&self) -> Arc<dyn Disk> {
        match self {
            Sink::Image { chain, .. } => chain.bytes(),
            Sink::Bare(disk) => disk.clone(),
        }
    }

    /// Whether it can be written compressed, and in which units.
    pub(crate) fn compress_unit(&self) -> Option<u64> {
        match self {
            Sink::Image { chain, .. } => chain.disk().compress_unit(),
            Sink::Bare(_) => None,
        }
    }

    /// Whether zeroes need not be written.
    pub(crate) fn is_zero(&self, options: &TargetOptions) -> bool {
        self.reads_as_zeroes(options) && options.sparse > 0
    }

    /// Whether all that is not written of the target reads as zeroes.
    fn reads_as_zeroes(&self, options: &TargetOptions) -> bool {
        match self {
            _ if options.no_create => options.target_is_zero,
            Sink::Image {
                reads_as_zeroes, ..
            } => *reads_as_zeroes && !options.has_backing(),
            Sink::Bare(_) => false,
        }
    }

    /// Writes zeroes to what a new disk has behind its first `copied` bytes, unless that part reads
    /// as zeroes already. An existing target keeps what it has there.
    pub(crate) fn clear_behind(
        &self,
        copied: u64,
        job: &Job,
        target: &Client,
        path: &Path,
        options: &TargetOptions,
        progress: &Progress<'_>,
    ) -> Result<(), Error> {
        let size = match self {
            Sink::Image { size, .. } => (*size).min(target.info().size),
            Sink::Bare(_) => return Ok(()),
        };
        let start = copied.next_multiple_of(SECTOR);
        if options.no_create || start >= size || self.reads_as_zeroes(options) {
            return Ok(());
        }
        write_zeroes(job, target, path, start..size, options.unmaps(), progress)
    }

    /// Who has the kernel write meanwhile.
    pub(crate) fn write_behind(&self, cache: Cache) -> WriteBehind {
        WriteBehind::new(match self {
            Sink::Image { chain, .. } => chain.write_behind(cache),
            Sink::Bare(_) => None,
        })
    }

    /// Ends its use, after all of its clients; `moved` is what became of the data. `last` is done to an image
    /// that is complete but for its name.
    pub(crate) fn finish(
        self,
        moved: Result<(), Error>,
        path: &Path,
        progress: &mut Progress<'_>,
        last: impl FnOnce(Option<&Target>, &mut Progress<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match (self, moved.and_then(|()| progress.check())) {
            (Sink::Bare(disk), finished) => finished.and(disk.deactivate().map_err(Error::from)),
            (Sink::Image { chain, target, .. }, Ok(())) => {
                chain.close()?;
                last(target.as_ref(), progress)?;
                target.map_or(Ok(()), Target::complete)
            }
            (Sink::Image { chain, target, .. }, Err(error)) => {
                drop(chain);
                let is_new = target.as_ref().is_some_and(|target| !target.overwrites());
                if is_new && matches!(error, Error::Interrupted) {
                    progress.warn(&format!("{} was not created", path.display()));
                } else if !is_new {
                    let path = path.display();
                    progress.warn(&format!(
                        "{path} is incomplete, and its old contents are lost"
                    ));
                }
                Err(error)
            }
        }
    }
}

/// Writes zeroes, one request after the other.
fn write_zeroes(
    job: &Job,
    target: &Client,
    path: &Path,
    range: Range<u64>,
    unmap: bool,
    progress: &Progress<'_>,
) -> Result<(), Error> {
    let limits = target.info().write_zeroes;
    let (op, most) = match limits {
        Some(limits) => (Op::WriteZeroes, limits.max_len & !(SECTOR - 1)),
        None => (Op::Write, ZEROES as u64),
    };
    let mut pages = match limits {
        Some(_) => None,
        None => {
            let mut pages = Pages::new(ZEROES).map_err(Error::memory)?;
            pages.bytes_mut().fill(0);
            Some(pages)
        }
    };
    let mut at = range.start;
    while at < range.end {
        progress.check()?;
        let len = (range.end - at).min(most.max(SECTOR));
        let ask = Ask {
            unmap,
            ..Ask::new(op, at, len, pages)
        };
        let answer = job.answer_to(target, ask);
        if answer.errno != 0 {
            return Err(Error::data(path, "write", at, len, answer.errno));
        }
        pages = answer.ask.pages;
        at += len;
    }
    Ok(())
}

/// How many zeroes are written as such; 0: none are. A cluster that has any data has space anyway. Not all
/// NBD servers know zeroes that are not sent.
pub(crate) fn granule(target: &Client, sparse: u64, unit: Option<u64>, piece: u64) -> u64 {
    match target.info().write_zeroes {
        Some(limits) if sparse > 0 => {
            let cluster = u64::from(limits.alignment);
            unit.unwrap_or_else(|| sparse.max(cluster).min(piece))
        }
        _ => 0,
    }
}

/// What was written becomes durable.
pub(crate) fn flush(job: &Job, target: &Client, path: &Path) -> Result<(), Error> {
    match job.flush(target) {
        0 => Ok(()),
        errno => Err(Error::flush(path, errno)),
    }
}

fn size_of_all(origins: &[Origin<'_>]) -> u64 {
    origins.iter().map(|origin| origin.size).sum()
}

fn refuse_smaller(path: &Path, is: u64, needed: u64) -> Result<(), Error> {
    if is >= needed {
        return Ok(());
    }
    let problem = format!("has {is} bytes, and {needed} are needed; enlarge it");
    Err(usage(path, problem))
}

/// A server takes whole blocks only.
fn refuse_odd(path: &Path, block: u32, origins: &[Origin<'_>]) -> Result<(), Error> {
    let is_odd = |origin: &&Origin<'_>| !origin.size.is_multiple_of(u64::from(block));
    let Some(origin) = origins.iter().find(is_odd) else {
        return Ok(());
    };
    let (name, size) = (origin.path.display(), origin.size);
    let problem = format!(
        "has blocks of {block} bytes, of which the {size} bytes of {name} are not a multiple; \
         resize {name}"
    );
    Err(usage(path, problem))
}

/// Bytes of the disk of a new image at `path`, for one of `size` bytes.
pub(crate) fn size_for(create: &CreateOptions, size: u64, path: &Path) -> Result<u64, Error> {
    match create.size {
        Some(given) if given < size => {
            let problem =
                format!("-o size is smaller than the {size} bytes of the disk to be copied");
            Err(usage(path, problem))
        }
        given => Ok(given.unwrap_or(size)),
    }
}

fn open_image(
    location: &Location,
    origins: &[Origin<'_>],
    options: &TargetOptions,
) -> Result<Sink, Error> {
    let path = &*location.name();
    refuse_origins(location, origins)?;
    if let Some(data_file) = &options.data_file {
        refuse_origins(&Location::file(data_file.clone()), origins)?;
    }
    let size = size_of_all(origins);
    let mut open = options.open();
    if options.no_create {
        let chain = Chain::open(location, &open)?;
        refuse_smaller(path, chain.size(), size)?;
        return Ok(Sink::Image {
            chain,
            target: None,
            reads_as_zeroes: false,
            size,
        });
    }
    let mut create = options.create.clone();
    create.size = Some(size_for(&create, size, path)?);
    create.validate().map_err(of(path))?;
    let size = size_of(location, &create, false)?;
    // What the image names is what the user has named.
    let named = |name: &str| seen_from(location, name.as_bytes());
    if let Some(name) = &create.qcow2.data_file {
        let data_file = named(name)?;
        refuse_origins(&data_file, origins)?;
        open.data_file = Some(data_file.name());
    }
    let target = Target::open(location, create.qcow2.data_file.is_some(), &open)?;
    let reads_as_zeroes = create_in(&target, location, &create, size, &options.keys)?;
    if let Some(backing) = &create.backing
        && let Some(below) = named(&backing.name)?.path()
    {
        let dir = parent(below).to_owned();
        let is_root = dir.canonicalize().is_ok_and(|dir| dir == Path::new("/"));
        open.allow_dirs.extend((!is_root).then_some(dir));
    }
    let chain = Chain::of(target.image().clone(), &open)?;
    Ok(Sink::Image {
        chain,
        target: Some(target),
        reads_as_zeroes,
        size,
    })
}

/// Refuses a target, or a data file of the target, that is read from.
fn refuse_origins(location: &Location, origins: &[Origin<'_>]) -> Result<(), Error> {
    let own = identity_of(location);
    let is_read = |origin: &Origin<'_>| origin.files.iter().any(|file| own == Some(*file));
    match own.is_some() && origins.iter().any(is_read) {
        true => Err(usage(
            &location.name(),
            "also a source; choose another name",
        )),
        false => Ok(()),
    }
}
