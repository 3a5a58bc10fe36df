//! `fathom img commit`

use crate::chain::Chain;
use crate::error::{Error, Moving, of, usage};
use crate::info::{Info, Link, below};
use crate::job::{Copy, CopyOptions, Segment, Segments, State, WriteBehind};
use crate::open::{
    OpenOptions, clear_mark, format_of, identity_of, info_of, open as open_image, open_locked,
};
use crate::progress::Progress;
use crate::resize::{Preallocation, ResizeOptions, resize};
use crate::source::Opened;
use fathom_formats::Format;
use fathom_formats::offline::backing::make_empty;
use fathom_formats::offline::bitmap::{self, Bitmaps, Listed};
use fathom_formats::served::Storage;
use fathom_stack::{Job, KeyRing, StoredImage, seen_from};
use fathom_storage::{Cache, Location};
use fathom_units::NewSize;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Options for a commit.
#[derive(Clone, Debug)]
pub struct CommitOptions {
    /// Format of the image. `None`: detect it.
    pub format: Option<Format>,
    /// The image of the chain to write to, named relative to the image directly above it. `None`:
    /// the backing file.
    pub base: Option<PathBuf>,
    /// Keep the data in the committed image instead of emptying it.
    pub keep: bool,
    /// Maximum transfer rate in bytes per second. `None`: no limit.
    pub rate: Option<u64>,
    /// Cache mode for the image and the base image.
    pub cache: Cache,
    /// Directories in which the image may name files, besides its own directory.
    pub allow_dirs: Vec<PathBuf>,
    /// Path of the external data file of the base image, overriding the name in that image.
    pub data_file: Option<PathBuf>,
    /// Keys that unlock encrypted images.
    pub keys: KeyRing,
}

/// Size of a request in bytes, and maximum number of concurrent requests.
const PIECE: u64 = 512 << 10;
const DEPTH: usize = 16;

/// Writes the data of an image into its backing file, or into a lower image of the chain. The
/// written image then reads as the committed one does.
///
/// The committed image becomes empty, unless `keep` or `base` is given or its format cannot be
/// emptied. A kill at any time leaves the contents of the image's disk unchanged. Returns the path
/// of the written image.
pub fn commit(
    location: &Location,
    options: &CommitOptions,
    progress: &mut Progress<'_>,
) -> Result<PathBuf, Error> {
    let path = &*location.name();
    let locked = OpenOptions {
        cache: options.cache,
        allow_dirs: options.allow_dirs.clone(),
        keys: options.keys.clone(),
        ..OpenOptions::writing(options.format)
    };
    let own = open_locked(location, &locked)?;
    let format = format_of(&own, options.format)?;
    let top = info_of(path, &own, Some(format))?;
    let looked_at = OpenOptions {
        read_only: true,
        ..locked
    };
    let mut below = below(&own, &top, &looked_at)?;
    let layers = 1 + find_base(&own, &top, &below, options)?;
    below.truncate(layers);
    let base = below.pop().map(Base::new).expect("it is one of them");
    below
        .iter()
        .try_for_each(|link| link.image.disk().activate())?;
    let mut job = Job::default();
    // The chain is read while its base is written, so locking all of it would conflict.
    let open = OpenOptions {
        format: Some(format),
        force_share: true,
        ..looked_at
    };
    let image = Opened::of(Chain::of(own.clone(), &open)?, open.engine, &mut job)?;
    lengthen(&base, image.size(), options)?;
    record(&base, image.segments(&job, layers)?)?;
    let target = Chain::open(&base.location, &options.open_base(&base))?;
    let copied = copy(
        &mut job,
        &image,
        &target,
        (path, target.image().path()),
        layers,
        options,
        progress,
    );
    image.close()?;
    let closed = target.close();
    if let Err(error) = copied.and(closed) {
        if error.is_midway() {
            let (path, base) = (path.display(), &base.location);
            progress.warn(&format!(
                "{path} is unchanged; {base} has a part of its data; repeat the command"
            ));
        }
        return Err(error);
    }
    drop(below);
    let written = open_image(&base.location, &OpenOptions::looking(true))?;
    clear_mark(&written)?;
    let empties = !options.keep && options.base.is_none();
    if empties && !make_empty(own.bytes(), format).map_err(of(path))? {
        let what = format!(
            "{}: not emptied, because {format} images cannot be",
            path.display()
        );
        progress.warn(&what);
    }
    progress.end();
    Ok(base.location.name())
}

/// The image that is written to, below the committed one.
struct Base {
    location: Location,
    format: Format,
}

impl Base {
    fn new(link: Link) -> Base {
        Base {
            format: link.info.image.format(),
            location: link.image.location().clone(),
        }
    }
}

/// Returns the index in `below` of the image to write to.
fn find_base(
    image: &StoredImage,
    top: &Info,
    below: &[Link],
    options: &CommitOptions,
) -> Result<usize, Error> {
    let links = below.iter().map(|link| (&link.info, &link.image));
    let above = std::iter::once((top, image)).chain(links);
    let found = above.zip(below).position(|((above, image), link)| {
        options.base.as_deref().is_none_or(|name| {
            let name = name.as_os_str().as_bytes();
            let there = seen_from(image.location(), name).ok();
            let there = there.and_then(|there| identity_of(&there));
            above.image.backing_file() == Some(name) || there == Some(link.image.identity())
        })
    });
    found.ok_or_else(|| {
        let problem = match &options.base {
            None => "no backing file to commit to".to_owned(),
            Some(base) => format!("{} is not one of its backing files", base.display()),
        };
        usage(image.path(), problem)
    })
}

impl CommitOptions {
    fn open_base(&self, base: &Base) -> OpenOptions {
        OpenOptions {
            cache: self.cache,
            allow_dirs: self.allow_dirs.clone(),
            data_file: self.data_file.clone(),
            keys: self.keys.clone(),
            keep_bitmaps: true,
            becomes_newest: true,
            ..OpenOptions::writing(Some(base.format))
        }
    }
}

/// Enlarges the base's disk if it is smaller than the image's disk.
fn lengthen(base: &Base, size: u64, options: &CommitOptions) -> Result<(), Error> {
    let chain = Chain::open(&base.location, &options.open_base(base))?;
    let is_enough = chain.size() >= size;
    chain.close()?;
    if is_enough {
        return Ok(());
    }
    if base.format == Format::Luks {
        let problem = "smaller than the image, and the new part of a luks image reads as random bytes; \
             resize it, and write zeroes there";
        return Err(usage(&base.location.name(), problem));
    }
    let larger = ResizeOptions {
        size: NewSize::To(size),
        preallocation: Preallocation::Off,
        shrink: false,
        allow_dirs: options.allow_dirs.clone(),
        data_file: options.data_file.clone(),
        keys: options.keys.clone(),
    };
    resize(&base.location, Some(base.format), &larger)?;
    Ok(())
}

/// Records the ranges that will be written in the base's bitmaps. Because they are recorded before
/// the copy, the bitmaps never miss a change.
fn record(base: &Base, segments: Segments) -> Result<(), Error> {
    if base.format != Format::Qcow2 {
        return Ok(());
    }
    let writing = OpenOptions {
        becomes_newest: true,
        ..OpenOptions::writing(None)
    };
    let image = open_locked(&base.location, &writing)?;
    let told = of(image.path());
    let bitmaps = bitmap::list(image.bytes()).map_err(&told)?;
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
    let mut bitmaps = Bitmaps::open(image.bytes()).map_err(&told)?;
    let recorded = bitmaps.record(|| written.iter().cloned());
    recorded.and_then(|()| bitmaps.commit()).map_err(&told)
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
    let client = job.client(base.bytes(), Default::default())?;
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
            unmap: true,
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
