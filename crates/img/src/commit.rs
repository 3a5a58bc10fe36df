//! `fathom img commit`

use crate::chain::{Chain, OpenOptions};
use crate::error::{Error, Moving, of, usage};
use crate::info::{Info, Link, below};
use crate::job::{Copy, CopyOptions, Job, Segment, Segments, State, WriteBehind};
use crate::open::{identity, identity_of, open_writable};
use crate::progress::Progress;
use crate::resize::{NewSize, Preallocation, ResizeOptions, resize};
use crate::source::Opened;
use fathom_formats::offline::backing::make_empty;
use fathom_formats::offline::bitmap::{self, Bitmaps, Listed};
use fathom_formats::{Format, resolve};
use fathom_storage::{Cache, lock_image};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// How to commit.
#[derive(Clone, Debug)]
pub struct CommitOptions {
    /// None: what the image looks like.
    pub format: Option<Format>,
    /// The image of the chain to write to, as seen from where the image above it is; none: the
    /// backing file.
    pub base: Option<PathBuf>,
    /// Leave in the image what is in it.
    pub keep: bool,
    pub rate: Option<u64>,
    pub cache: Cache,
    /// Where files may be that the image names, besides its own directory.
    pub allow_dirs: Vec<PathBuf>,
    /// The external data file of the image that is written to, whatever that calls it.
    pub data_file: Option<PathBuf>,
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
    let top = Info::read(path, &file, Some(format)).map_err(of(path))?;
    let mut below = below(&file, &top, &options.allow_dirs)?;
    let layers = 1 + find_base(path, &top, &below, options)?;
    below.truncate(layers);
    let base = below.pop().map(Base::new).expect("it is one of them");
    below
        .iter()
        .try_for_each(|link| lock_image(&link.path, &link.file, false))?;
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
    drop(below);
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

impl Base {
    fn new(link: Link) -> Base {
        Base {
            format: link.info.image.format(),
            path: link.path,
        }
    }
}

/// Which of the images below is to be written to.
fn find_base(
    path: &Path,
    top: &Info,
    below: &[Link],
    options: &CommitOptions,
) -> Result<usize, Error> {
    let above = std::iter::once(top).chain(below.iter().map(|link| &link.info));
    let found = above.zip(below).position(|(above, link)| {
        options.base.as_deref().is_none_or(|name| {
            let name = name.as_os_str().as_bytes();
            let there = resolve(&above.path, name).ok();
            let there = there.and_then(|path| identity_of(&path));
            above.image.backing_file() == Some(name)
                || there.is_some() && there == identity(&link.file).ok()
        })
    });
    found.ok_or_else(|| {
        let problem = match &options.base {
            None => "has no backing file to commit to".to_owned(),
            Some(base) => format!("{} is not among its backing files", base.display()),
        };
        usage(path, problem)
    })
}

impl CommitOptions {
    fn open_base(&self, base: &Base) -> OpenOptions {
        OpenOptions {
            cache: self.cache,
            allow_dirs: self.allow_dirs.clone(),
            data_file: self.data_file.clone(),
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
        data_file: options.data_file.clone(),
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
