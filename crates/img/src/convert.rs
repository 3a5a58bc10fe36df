//! `fathom img convert`

use crate::error::{Error, Moving, of, usage};
use crate::job::{Copy, CopyOptions, compressed_at_once};
use crate::open::{OpenOptions, open_locked};
use crate::progress::Progress;
use crate::sink::{Origin, Sink, TargetOptions, flush, granule};
use crate::source::{Opened, Source, located};
use crate::stream;
use crate::streamed::convert_to_stream;
use crate::target::Target;
use fathom_formats::Format;
use fathom_formats::offline::bitmap::copy;
use fathom_formats::served::Storage;
use fathom_stack::Job;
use fathom_storage::Location;

pub use fathom_formats::offline::bitmap::Broken;
use std::ffi::OsStr;
use std::ops::Range;
use std::path::Path;

/// Options for a conversion.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// Target of the copy.
    pub target: TargetOptions,
    /// Maximum transfer rate in bytes per second.
    pub rate: Option<u64>,
    /// Maximum number of concurrent requests.
    pub parallel: usize,
    /// Replace unreadable sectors with zeroes.
    pub salvage: bool,
    /// Also copy persistent bitmaps, and handle broken bitmaps in this way.
    pub bitmaps: Option<Broken>,
    /// Range in bytes to copy of each source, in whole sectors. The range is cut off at the end of
    /// the source.
    pub part: Option<Range<u64>>,
    /// Write a stream, for a target that cannot seek. Standard output is always written as a
    /// stream.
    pub to_stream: bool,
}

/// Size of a request in bytes.
const PIECE: u64 = 512 << 10;

/// Copies the concatenated sources to the target, which is a location, or `-` for standard output.
/// Unless the target is a stream, all data is durable when this function returns.
pub fn convert(
    sources: &[Source],
    target: &OsStr,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    if options.target.compress && options.target.create.format != Format::Qcow2 {
        return Err(cannot_compress(Path::new(target)));
    }
    let is_stream = options.to_stream || target == stream::NAME;
    if options.target.has_backing() && sources.len() > 1 {
        let problem = "a backing file (-B) needs exactly one source; name one source, or omit -B";
        return Err(usage(Path::new(target), problem));
    }
    if is_stream {
        refuse_what_seeks(options, sources.len())?;
    }
    let mut job = Job::default();
    let mut opened = Source::open_all(sources, &mut job)?;
    if let Some(part) = &options.part {
        opened.iter_mut().try_for_each(|source| source.take(part))?;
    }
    if is_stream {
        let (options, rate) = (&options.target, options.rate);
        return convert_to_stream(&job, &opened, target, options, rate, progress);
    }
    let location = &located(target)?;
    let path = &*location.name();
    let origins: Vec<_> = opened.iter().map(origin).collect();
    let sink = Sink::open(location, &origins, &options.target)?;
    let copied = move_data(&mut job, &opened, &sink, path, options, progress);
    sink.finish(copied, path, progress, |target, progress| {
        copy_bitmaps(&opened, location, target, options, progress)
    })
}

fn origin(source: &Opened) -> Origin<'_> {
    Origin {
        path: &source.path,
        size: source.size(),
        files: source.files().collect(),
    }
}

/// Copies the source's bitmaps into a target that is no longer in use.
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
            "bitmaps of several images cannot be merged; name one source, or omit --bitmaps",
        ));
    };
    let from = match source.image() {
        Some((from, Format::Qcow2)) if options.target.create.format == Format::Qcow2 => from,
        _ => {
            return Err(usage(
                path,
                "bitmaps can be copied only from qcow2 to qcow2",
            ));
        }
    };
    let to = match target {
        Some(target) => target.image().clone(),
        None => open_locked(location, &OpenOptions::writing(None))?,
    };
    for name in copy(from.bytes(), to.bytes(), broken).map_err(of(path))? {
        progress.warn(&format!("bitmap '{name}' is broken, and was not copied"));
    }
    Ok(())
}

fn move_data(
    job: &mut Job,
    opened: &[Opened],
    sink: &Sink,
    path: &Path,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    let target = job.client(sink.disk(), options.target.engine)?;
    let unit = match options.target.compress {
        false => None,
        true => Some(sink.compress_unit().ok_or_else(|| cannot_compress(path))?),
    };
    let piece = unit.unwrap_or(PIECE);
    progress.begin(opened.iter().map(Opened::size).sum());
    let mut behind = sink.write_behind(options.target.cache);
    let mut shift = 0i64;
    for source in opened {
        let copy = Copy {
            job,
            source: &source.client,
            target: &target,
            options: CopyOptions {
                piece,
                shift: shift - source.start() as i64,
                depth: depth(options, unit),
                granule: granule(&target, options.target.sparse, unit, piece),
                target_is_zero: sink.is_zero(&options.target),
                unmap: options.target.unmaps(),
                compress: unit.is_some(),
                rate: options.rate,
                salvage: options.salvage,
            },
            moving: Moving {
                source: &source.path,
                target: path,
            },
        };
        shift += source.size() as i64;
        let layers = if options.target.has_backing() {
            1
        } else {
            usize::MAX
        };
        copy.run(&mut source.segments(job, layers)?, &mut behind, progress)?;
    }
    let copied = opened.iter().map(Opened::size).sum();
    sink.clear_behind(copied, job, &target, path, &options.target, progress)?;
    flush(job, &target, path)?;
    progress.end();
    Ok(())
}

fn cannot_compress(path: &Path) -> Error {
    let problem = "cannot be compressed; only qcow2 images without a data file can (-O qcow2)";
    usage(path, problem)
}

/// Returns the number of concurrent requests. Each unit of compression is a request of its own.
fn depth(options: &ConvertOptions, unit: Option<u64>) -> usize {
    unit.map_or(options.parallel, |unit| {
        compressed_at_once(unit).max(options.parallel)
    })
}

/// Rejects options that need a target that can seek.
fn refuse_what_seeks(options: &ConvertOptions, sources: usize) -> Result<(), Error> {
    let target = &options.target;
    let problem = match target.create.format {
        _ if target.no_create => "written from its beginning to its end; omit -n",
        _ if target.compress => {
            "begins with the image's tables, so data cannot be compressed; omit -c, and pipe the \
             stream into a compressor"
        }
        _ if options.bitmaps.is_some() || options.salvage => {
            "written from its beginning to its end; omit --bitmaps and --salvage"
        }
        Format::Qcow2
            if target
                .create
                .backing
                .as_ref()
                .is_some_and(|b| b.format.is_none()) =>
        {
            "its backing file is not examined; name its format with -F"
        }
        Format::Raw if target.create.given().next().is_some() => {
            "contains only the disk's bytes as raw; omit -o"
        }
        Format::Qed | Format::Luks | Format::Foreign(_) => {
            "only raw disks and qcow2 images can be streamed; pass -O raw or -O qcow2"
        }
        Format::Qcow2 if sources != 1 => {
            "needs exactly one source as qcow2; pass -O raw for several"
        }
        Format::Raw | Format::Qcow2 => return Ok(()),
    };
    Err(usage(Path::new(stream::ANY), problem))
}
