//! `fathom img convert`

use crate::chain::Chain;
use crate::create::{CreateOptions, create_in, size_of};
use crate::error::{Error, Moving, of, usage};
use crate::job::{Copy, CopyOptions, WriteBehind, compressed_at_once};
use crate::open::{OpenOptions, identity_of, open_bare, open_locked};
use crate::progress::Progress;
use crate::source::{Opened, Source, located};
use crate::stream;
use crate::streamed::to_standard_output;
use crate::target::{Target, parent};
use fathom_core::Disk;
use fathom_formats::Format;
use fathom_formats::offline::bitmap::copy;
use fathom_formats::served::Storage;
use fathom_stack::{Client, Job, seen_from};
use fathom_storage::{Cache, EngineKind, Location};

pub use fathom_formats::offline::bitmap::Broken;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What to convert an image into.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
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
    /// Bytes a second.
    pub rate: Option<u64>,
    /// Requests at once.
    pub parallel: usize,
    /// What cannot be read is zeroes.
    pub salvage: bool,
    /// Copy persistent bitmaps, too; what to do with broken ones.
    pub bitmaps: Option<Broken>,
    /// Where files may be that the target, or its backing file, names.
    pub allow_dirs: Vec<PathBuf>,
    /// The external data file of a target that is there, whatever it calls it.
    pub data_file: Option<PathBuf>,
}

/// Bytes of a request.
const PIECE: u64 = 512 << 10;

/// What is written to.
enum Sink {
    Image {
        chain: Chain,
        target: Option<Target>,
    },
    /// A disk that others make, an NBD server say.
    Bare(Arc<dyn Disk>),
}

impl Sink {
    fn disk(&self) -> Arc<dyn Disk> {
        match self {
            Sink::Image { chain, .. } => chain.disk().clone(),
            Sink::Bare(disk) => disk.clone(),
        }
    }

    /// Whether it can be written compressed, and in which units.
    fn compress_unit(&self) -> Option<u64> {
        match self {
            Sink::Image { chain, .. } => chain.disk().compress_unit(),
            Sink::Bare(_) => None,
        }
    }
}

/// Copies the sources, one behind the other, to the target: where that is, or `-` for standard output.
/// Everything is durable when it returns.
pub fn convert(
    sources: &[Source],
    target: &OsStr,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    if options.compress && options.create.format != Format::Qcow2 {
        return Err(cannot_compress(Path::new(target)));
    }
    let mut job = Job::default();
    let mut opened = Source::open_all(sources, &mut job)?;
    let size = opened.iter().map(Opened::size).sum();
    if target == stream::NAME {
        refuse_stream(options)?;
        progress.begin(size);
        return opened
            .iter()
            .try_for_each(|source| to_standard_output(&job, source, progress))
            .map(|()| progress.end());
    }
    let location = &located(target)?;
    let path = &*location.name();
    let sink = open_sink(location, size, &opened, options)?;
    let copied = move_data(&mut job, &mut opened, &sink, path, options, progress);
    let finished = copied.and_then(|()| progress.check());
    match (sink, finished) {
        (Sink::Bare(disk), finished) => finished.and(disk.deactivate().map_err(Error::from)),
        (Sink::Image { chain, target }, Ok(())) => {
            chain.close()?;
            copy_bitmaps(&opened, location, target.as_ref(), options, progress)?;
            target.map_or(Ok(()), Target::complete)
        }
        (Sink::Image { chain, target }, Err(error)) => {
            drop(chain);
            let is_new = target.as_ref().is_some_and(|target| !target.overwrites());
            if is_new && matches!(error, Error::Interrupted) {
                progress.warn(&format!("{} was not made", path.display()));
            } else if !is_new {
                let path = path.display();
                progress.warn(&format!(
                    "{path} is written to in part: its old disk is lost"
                ));
            }
            Err(error)
        }
    }
}

/// The source's bitmaps, into a target that is not in use any more.
fn copy_bitmaps(
    sources: &[Opened],
    location: &Location,
    target: Option<&Target>,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    let Some(broken) = options.bitmaps else {
        return Ok(());
    };
    let path = &*location.name();
    let [source] = sources else {
        return Err(usage(
            path,
            "bitmaps of several images cannot be put together",
        ));
    };
    let from = match source.image() {
        Some((from, Format::Qcow2)) if options.create.format == Format::Qcow2 => from,
        _ => return Err(usage(path, "bitmaps are copied from qcow2 to qcow2 only")),
    };
    let to = match target {
        Some(target) => target.image().clone(),
        None => open_locked(location, &OpenOptions::writing(None))?,
    };
    for name in copy(from.bytes(), to.bytes(), broken).map_err(of(path))? {
        progress.warn(&format!("bitmap '{name}' is broken, and left out"));
    }
    Ok(())
}

fn move_data(
    job: &mut Job,
    opened: &mut [Opened],
    sink: &Sink,
    path: &Path,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    let target = job.client(sink.disk(), options.engine)?;
    let has_backing = options.create.backing.is_some() && !options.no_create;
    let unit = match options.compress {
        false => None,
        true => Some(sink.compress_unit().ok_or_else(|| cannot_compress(path))?),
    };
    let piece = unit.unwrap_or(PIECE);
    let target_is_zero = match options.no_create {
        true => options.target_is_zero,
        false => !has_backing && reads_as_zeroes(sink),
    };
    progress.begin(opened.iter().map(Opened::size).sum());
    let file = match sink {
        Sink::Image { chain, .. } => chain.write_behind(options.cache),
        Sink::Bare(_) => None,
    };
    let mut behind = WriteBehind::new(file);
    let mut shift = 0;
    for source in opened {
        let copy = Copy {
            job,
            source: &source.client,
            target: &target,
            options: CopyOptions {
                piece,
                shift,
                depth: depth(options, unit),
                granule: granule(&target, options, unit, piece),
                target_is_zero: target_is_zero && options.sparse > 0,
                compress: unit.is_some(),
                rate: options.rate,
                salvage: options.salvage,
            },
            moving: Moving {
                source: &source.path,
                target: path,
            },
        };
        shift += source.size();
        let layers = if has_backing { 1 } else { usize::MAX };
        copy.run(&mut source.segments(job, layers)?, &mut behind, progress)?;
    }
    flush(job, &target, path)?;
    progress.end();
    Ok(())
}

fn cannot_compress(path: &Path) -> Error {
    let problem = "cannot be written compressed: only qcow2 without a data file can (-O qcow2)";
    usage(path, problem)
}

/// A unit of compression is a request of its own.
fn depth(options: &ConvertOptions, unit: Option<u64>) -> usize {
    unit.map_or(options.parallel, |unit| {
        compressed_at_once(unit).max(options.parallel)
    })
}

/// A cluster that has any data has space anyway. Not all NBD servers know zeroes that are not sent.
fn granule(target: &Client, options: &ConvertOptions, unit: Option<u64>, piece: u64) -> u64 {
    match target.info().write_zeroes {
        Some(limits) if options.sparse > 0 => {
            let cluster = u64::from(limits.alignment);
            unit.unwrap_or_else(|| options.sparse.max(cluster).min(piece))
        }
        _ => 0,
    }
}

/// Whether a new target does where nothing is written.
fn reads_as_zeroes(sink: &Sink) -> bool {
    match sink {
        Sink::Image { chain, .. } => chain.format() != Format::Raw || chain.image().is_file(),
        Sink::Bare(_) => false,
    }
}

fn flush(job: &Job, target: &Client, path: &Path) -> Result<(), Error> {
    match job.flush(target) {
        0 => Ok(()),
        errno => Err(Error::flush(path, errno)),
    }
}

/// Only a raw disk can be written from its first byte to its last.
fn refuse_stream(options: &ConvertOptions) -> Result<(), Error> {
    let is_plain = options.create.format == Format::Raw && !options.compress && !options.no_create;
    match is_plain {
        true => Ok(()),
        false => {
            let problem = "takes a raw disk only: -O raw, without -c, -n and -B";
            Err(usage(Path::new("standard output"), problem))
        }
    }
}

/// The target's options, but for what its image names.
fn open_options(options: &ConvertOptions) -> OpenOptions {
    OpenOptions {
        cache: options.cache,
        engine: options.engine,
        compress: options.compress,
        allow_dirs: options.allow_dirs.clone(),
        data_file: options.data_file.clone(),
        ..OpenOptions::writing(Some(options.create.format))
    }
}

/// For a disk of so many bytes.
fn open_sink(
    location: &Location,
    size: u64,
    sources: &[Opened],
    options: &ConvertOptions,
) -> Result<Sink, Error> {
    let path = &*location.name();
    if !location.kind().images && !options.no_create {
        let problem = "is a disk that is there already: add --no-create (-n)";
        return Err(usage(path, problem));
    }
    let Some(disk) = open_bare(location, &open_options(options))? else {
        return open_image(location, size, sources, options);
    };
    disk.activate()?;
    let info = disk.info();
    refuse_smaller(path, info.size, size)?;
    refuse_odd(path, info.block_size, sources)?;
    Ok(Sink::Bare(disk))
}

fn refuse_smaller(path: &Path, is: u64, needed: u64) -> Result<(), Error> {
    if is >= needed {
        return Ok(());
    }
    let problem = format!("is a disk of {is} bytes, and {needed} are needed: make it larger");
    Err(usage(path, problem))
}

/// A server takes whole blocks only.
fn refuse_odd(path: &Path, block: u32, sources: &[Opened]) -> Result<(), Error> {
    let is_odd = |source: &&Opened| !source.size().is_multiple_of(u64::from(block));
    let Some(source) = sources.iter().find(is_odd) else {
        return Ok(());
    };
    let (name, size) = (source.path.display(), source.size());
    let problem = format!(
        "is written in blocks of {block} bytes, and {name} has {size}: resize it to a multiple"
    );
    Err(usage(path, problem))
}

fn open_image(
    location: &Location,
    size: u64,
    sources: &[Opened],
    options: &ConvertOptions,
) -> Result<Sink, Error> {
    let path = &*location.name();
    refuse_sources(location, sources)?;
    let mut open = open_options(options);
    if options.no_create {
        let chain = Chain::open(location, &open)?;
        refuse_smaller(path, chain.size(), size)?;
        return Ok(Sink::Image {
            chain,
            target: None,
        });
    }
    let mut create = options.create.clone();
    if create.size.is_some_and(|given| given < size) {
        let problem = format!("-o size is too small: the disk to be copied has {size} bytes");
        return Err(usage(path, problem));
    }
    create.size = Some(create.size.unwrap_or(size));
    create.validate().map_err(of(path))?;
    let size = size_of(location, &create, false)?;
    let target = Target::open(location, create.qcow2.data_file.is_some(), &open)?;
    create_in(&target, location, &create, size)?;
    // What it names is what the user has named.
    let named = |name: &str| seen_from(location, name.as_bytes());
    if let Some(name) = &create.qcow2.data_file {
        open.data_file = Some(named(name)?.name());
    }
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
    })
}

/// The target is none of the files that are read.
fn refuse_sources(location: &Location, sources: &[Opened]) -> Result<(), Error> {
    let own = identity_of(location);
    let is_read = |source: &Opened| source.files().any(|file| own == Some(file));
    match own.is_some() && sources.iter().any(is_read) {
        true => Err(usage(
            &location.name(),
            "is read from, too: choose another name",
        )),
        false => Ok(()),
    }
}
