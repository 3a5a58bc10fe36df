//! `fathom img commit`

use crate::chain::{Chain, OpenOptions};
use crate::error::{Error, Moving, of, usage};
use crate::job::{Copy, CopyOptions, Job, Segment, Segments, State, WriteBehind};
use crate::open::{identity_of, open_writable};
use crate::progress::Progress;
use crate::resize::{NewSize, Preallocation, ResizeOptions, resize};
use crate::source::Opened;
use fathom_formats::img::backing::make_empty;
use fathom_formats::img::bitmap::{self, Bitmaps, Listed};
use fathom_formats::img::info;
use fathom_formats::img::{Format, open_read_only};
use fathom_storage::{Cache, lock_image};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// How to commit.
#[derive(Clone, Debug)]
pub struct CommitOptions {
    /// None: what the image looks like.
    pub format: Option<Format>,
    /// The image of the chain to write to; none: the backing file.
    pub base: Option<PathBuf>,
    /// Leave in the image what is in it.
    pub keep: bool,
    pub rate: Option<u64>,
    pub cache: Cache,
    /// Where files may be that the image names, besides its own directory.
    pub allow_dirs: Vec<PathBuf>,
}

/// Bytes of a request, and how many at once.
const PIECE: u64 = 512 << 10;
const DEPTH: usize = 16;

/// Writes what an image holds into its backing file, or into one below, which then reads as the
/// image does; the image becomes empty, unless it is to be kept. A kill at any instant leaves the
/// image's disk as it was. Returns the image that was written to.
pub fn commit(
    path: &Path,
    options: &CommitOptions,
    progress: &mut Progress<'_>,
) -> Result<PathBuf, Error> {
    let file = open_writable(path, false)?;
    let format = match options.format {
        Some(format) => format,
        None => Format::probe(&file).map_err(of(path))?,
    };
    // The chain is read although its base is written; so its own locks would be in the way.
    lock_image(path, &file, true)?;
    let (base, layers) = find_base(path, &file, format, options)?;
    let locked = lock_between(path, &file, format, layers)?;
    let mut job = Job::default();
    let open = OpenOptions {
        cache: options.cache,
        force_share: true,
        allow_dirs: options.allow_dirs.clone(),
        ..OpenOptions::reading(Some(format))
    };
    let image = Opened::of(path, Chain::open(path, &open)?, &mut job)?;
    lengthen(&base, image.size(), options)?;
    record(&base, image.segments(&job, layers)?)?;
    let target = Chain::open(&base.path, &options.open_base(&base))?;
    let copied = copy(
        &mut job,
        &image,
        &target,
        (path, &base.path),
        layers,
        options,
        progress,
    );
    image.close()?;
    let closed = target.close();
    if let Err(error) = copied.and(closed) {
        if error.is_midway() {
            let (path, base) = (path.display(), base.path.display());
            progress.warn(&format!(
                "{path} reads as before; {base} has a part of it: give the command again"
            ));
        }
        return Err(error);
    }
    drop(locked);
    let empties = !options.keep && options.base.is_none();
    if empties && !make_empty(&file, format).map_err(of(path))? {
        let what = format!("{}: {format} images stay as they are", path.display());
        progress.warn(&what);
    }
    progress.end();
    Ok(base.path)
}

/// An image below the one that is committed.
struct Base {
    path: PathBuf,
    format: Format,
}

/// The image to write to, and how many are above it.
fn find_base(
    path: &Path,
    file: &File,
    format: Format,
    options: &CommitOptions,
) -> Result<(Base, usize), Error> {
    let chain = info::chain(path, file, Some(format)).map_err(of(path))?;
    let wanted = options.base.as_deref().map(identity_of);
    let found = chain.iter().enumerate().skip(1).find(|(_, info)| {
        let same_name = options.base.as_deref() == Some(&info.path);
        wanted
            .is_none_or(|wanted| same_name || wanted.is_some() && identity_of(&info.path) == wanted)
    });
    if let Some((layers, info)) = found {
        let base = Base {
            path: info.path.clone(),
            format: info.image.format(),
        };
        return Ok((base, layers));
    }
    Err(usage(
        path,
        match &options.base {
            None => "has no backing file to commit to".to_owned(),
            Some(base) => format!("{} is not among its backing files", base.display()),
        },
    ))
}

/// Locks the images between the image and its base.
fn lock_between(
    path: &Path,
    file: &File,
    format: Format,
    layers: usize,
) -> Result<Vec<File>, Error> {
    let chain = info::chain(path, file, Some(format)).map_err(of(path))?;
    let between = chain.iter().take(layers).skip(1);
    between
        .map(|info| {
            let failed = crate::error::io_error(&info.path, "cannot be opened");
            let file = open_read_only(&info.path).map_err(failed)?;
            lock_image(&info.path, &file, false)?;
            Ok(file)
        })
        .collect()
}

impl CommitOptions {
    fn open_base(&self, base: &Base) -> OpenOptions {
        OpenOptions {
            cache: self.cache,
            allow_dirs: self.allow_dirs.clone(),
            keep_bitmaps: true,
            ..OpenOptions::writing(Some(base.format))
        }
    }
}

/// Makes the base as large as the image at least.
fn lengthen(base: &Base, size: u64, options: &CommitOptions) -> Result<(), Error> {
    let chain = Chain::open(&base.path, &options.open_base(base))?;
    let is_enough = chain.size() >= size;
    chain.close()?;
    if is_enough {
        return Ok(());
    }
    let larger = ResizeOptions {
        size: NewSize::To(size),
        preallocation: Preallocation::Off,
        shrink: false,
        allow_dirs: options.allow_dirs.clone(),
    };
    resize(&base.path, Some(base.format), &larger)?;
    Ok(())
}

/// Tells the base's bitmaps what is going to be written. They are right at any instant: what has
/// not been written yet is marked as if it had been.
fn record(base: &Base, segments: Segments) -> Result<(), Error> {
    if base.format != Format::Qcow2 {
        return Ok(());
    }
    let file = open_writable(&base.path, false)?;
    lock_image(&base.path, &file, true)?;
    let bitmaps = bitmap::list(&file).map_err(of(&base.path))?;
    if !bitmaps.iter().any(Listed::records) {
        return Ok(());
    }
    let mut written: Vec<Range<u64>> = Vec::new();
    for segment in segments {
        let Segment { range, state } = segment?;
        match written.last_mut() {
            _ if state == State::Below => {}
            Some(last) if last.end == range.start => last.end = range.end,
            _ => written.push(range),
        }
    }
    let mut bitmaps = Bitmaps::open(&file).map_err(of(&base.path))?;
    let recorded = bitmaps.record(|| written.iter().cloned());
    recorded
        .and_then(|()| bitmaps.commit())
        .map_err(of(&base.path))
}

fn copy(
    job: &mut Job,
    image: &Opened,
    base: &Chain,
    (source, target): (&Path, &Path),
    layers: usize,
    options: &CommitOptions,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    let client = job.client(base.disk().clone(), Default::default())?;
    let cluster = client.info().write_zeroes.map_or(512, |l| l.alignment);
    progress.begin(image.size());
    let copy = Copy {
        job,
        source: &image.client,
        target: &client,
        options: CopyOptions {
            piece: PIECE,
            shift: 0,
            depth: DEPTH,
            granule: u64::from(cluster).clamp(4096, PIECE),
            target_is_zero: false,
            compress: false,
            rate: options.rate,
            salvage: false,
        },
        moving: Moving { source, target },
    };
    let mut behind = WriteBehind::new(base.write_behind(options.cache));
    copy.run(&mut image.segments(job, layers)?, &mut behind, progress)?;
    match job.flush(&client) {
        0 => Ok(()),
        errno => Err(Error::flush(target, errno)),
    }
}
