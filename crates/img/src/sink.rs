//! Targets of jobs that copy a disk's data.

use crate::chain::Chain;
use crate::create::{CreateOptions, create_in, size_of};
use crate::error::{Error, of, usage};
use crate::job::WriteBehind;
use crate::open::{OpenOptions, identity_of, open_bare};
use crate::progress::Progress;
use crate::target::{Target, parent};
use fathom_core::{AlignedBuffer, Disk, Op};
use fathom_formats::offline::create::Preallocation;
use fathom_stack::{Client, DiskRequest, Job, KeyRing, seen_from};
use fathom_storage::{Cache, EngineKind, Location};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Target of a copy, and options for writing to it.
#[derive(Clone, Debug)]
pub struct TargetOptions {
    /// Creation options of the target. Without a size, the target has the total size of the
    /// sources.
    pub create: CreateOptions,
    /// Cache mode for writes to the target.
    pub cache: Cache,
    /// I/O engine for the target.
    pub engine: EngineKind,
    /// The target exists already; only its data is replaced.
    pub no_create: bool,
    /// With `no_create`: the target reads as zeroes.
    pub target_is_zero: bool,
    /// Compress the copied data, which only some formats support.
    pub compress: bool,
    /// Minimum length in bytes of zeroes that are not written as data. 0 writes all zeroes as data.
    pub sparse: u64,
    /// Directories in which the target and its backing file may name files.
    pub allow_dirs: Vec<PathBuf>,
    /// Path of the external data file of an existing target, overriding the name in the image.
    pub data_file: Option<PathBuf>,
    /// Keys that unlock the target and its backing chain.
    pub keys: KeyRing,
}

impl TargetOptions {
    /// Returns the options for opening the target. Files that a new image will name are added
    /// later.
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

    /// Returns whether writes of zeroes may deallocate space. If the user requests preallocation,
    /// such writes must not deallocate space.
    pub(crate) fn unmaps(&self) -> bool {
        self.no_create || self.create.preallocation == Preallocation::Off
    }

    /// Returns whether only the data of the source's top image is written.
    pub(crate) fn has_backing(&self) -> bool {
        self.create.backing.is_some() && !self.no_create
    }
}

/// A source of the target's data.
pub(crate) struct Origin<'a> {
    /// Name of the source, for messages.
    pub(crate) path: &'a Path,
    /// Size of the source's disk in bytes.
    pub(crate) size: u64,
    /// Identities of the source's files.
    pub(crate) files: Vec<(u64, u64)>,
}

/// A target in use.
pub(crate) enum Sink {
    Image {
        chain: Chain,
        /// The new image. `None`: the image existed before and keeps its metadata.
        target: Option<Target>,
        /// The new disk reads as zeroes, except for the contents of its backing file.
        reads_as_zeroes: bool,
        /// Requested size of the new disk in bytes.
        size: u64,
    },
    /// A disk without an image format, such as an NBD server's.
    Bare(Arc<dyn Disk>),
}

/// Size in bytes of a write of zeroes, if the target does not support write-zeroes requests.
const ZEROES: usize = 512 << 10;

const SECTOR: u64 = 512;

impl Sink {
    /// Opens or creates a target with room for the concatenated data of all origins.
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

    /// Returns the unit of compressed writes in bytes, or `None` if the target cannot be
    /// compressed.
    pub(crate) fn compress_unit(&self) -> Option<u64> {
        match self {
            Sink::Image { chain, .. } => chain.disk().compress_unit(),
            Sink::Bare(_) => None,
        }
    }

    /// Returns whether zeroes may be skipped.
    pub(crate) fn is_zero(&self, options: &TargetOptions) -> bool {
        self.reads_as_zeroes(options) && options.sparse > 0
    }

    /// Returns whether all unwritten parts of the target read as zeroes.
    fn reads_as_zeroes(&self, options: &TargetOptions) -> bool {
        match self {
            _ if options.no_create => options.target_is_zero,
            Sink::Image {
                reads_as_zeroes, ..
            } => *reads_as_zeroes && !options.has_backing(),
            Sink::Bare(_) => false,
        }
    }

    /// Writes zeroes after the first `copied` bytes of a new disk, unless that part reads as zeroes
    /// already. An existing target keeps its contents there.
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

    /// Returns the object that starts write-back of the target during the copy.
    pub(crate) fn write_behind(&self, cache: Cache) -> WriteBehind {
        WriteBehind::new(match self {
            Sink::Image { chain, .. } => chain.write_behind(cache),
            Sink::Bare(_) => None,
        })
    }

    /// Closes the target, after all of its clients. `moved` is the result of the copy. After
    /// success, `last` is called with an image that is complete except for its name.
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

/// Writes zeroes with one request at a time.
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
            let mut pages = AlignedBuffer::try_new(ZEROES).map_err(Error::memory)?;
            pages.bytes_mut().fill(0);
            Some(pages)
        }
    };
    let mut at = range.start;
    while at < range.end {
        progress.check()?;
        let len = (range.end - at).min(most.max(SECTOR));
        let ask = DiskRequest {
            unmap,
            ..DiskRequest::new(op, at, len, pages)
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

/// Returns the granularity for detecting zeroes in data; 0 disables detection. Zeroes within an
/// otherwise allocated cluster save no space. Not all NBD servers support write-zeroes requests.
pub(crate) fn granule(target: &Client, sparse: u64, unit: Option<u64>, piece: u64) -> u64 {
    match target.info().write_zeroes {
        Some(limits) if sparse > 0 => {
            let cluster = u64::from(limits.alignment);
            unit.unwrap_or_else(|| sparse.max(cluster).min(piece))
        }
        _ => 0,
    }
}

/// Makes the written data durable.
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

/// Rejects sources whose size is not a multiple of the server's block size.
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

/// Returns the size in bytes of a new disk at `path` for `size` bytes of data. Returns an error if
/// the given size is too small.
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
    // The user has named these files, so the image may refer to them.
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

/// Rejects a target, or a data file of the target, that is also a source.
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
