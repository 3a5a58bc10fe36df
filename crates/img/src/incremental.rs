//! Incremental backups: what a dirty bitmap of a server marks, in a new image on the backup before.

use crate::create::{Backing, CreateOptions};
use crate::error::{Error, Moving, usage};
use crate::job::{Copy, CopyOptions, Segment, State, compressed_at_once};
use crate::open::identity_of;
use crate::progress::Progress;
use crate::sink::{Origin, Sink, TargetOptions, flush, granule};
use crate::source::{Asked, located};
use fathom_core::Disk;
use fathom_formats::Format;
use fathom_formats::offline::create::Preallocation;
use fathom_nbd::NbdUri;
use fathom_stack::{Client, Job, KeyRing};
use fathom_storage::{Cache, EngineKind, Location, NbdDisk, NbdOptions};
use std::ffi::OsStr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How to make an incremental backup.
#[derive(Clone, Debug)]
pub struct IncrementalOptions {
    /// The backup before, as it is to be named in the new image, with its format.
    pub backing: Backing,
    /// What else the new image is to be: qcow2. Its size is the disk's.
    pub create: CreateOptions,
    /// How it is written.
    pub cache: Cache,
    pub engine: EngineKind,
    pub compress: bool,
    /// Bytes a second.
    pub rate: Option<u64>,
    /// Requests at once.
    pub parallel: usize,
    /// Where files may be that the backup before names, besides its own directory.
    pub allow_dirs: Vec<PathBuf>,
    /// What unlocks the backup before, and encrypts the new one.
    pub keys: KeyRing,
}

/// Bytes of a request, if clusters are not larger.
const PIECE: u64 = 512 << 10;

/// Zeroes of so many bytes are not written as data, if clusters are not larger.
const SPARSE: u64 = 4096;

/// QEMU's bitmaps have names of so many bytes at most.
const MAX_NAME: usize = 1023;

/// Makes a new image `target` on the backup before it. Of the disk that the NBD server at `uri` has, it holds
/// what this bitmap of the server marks, in whole clusters, and nothing else; on its backing file it reads as
/// the disk does.
///
/// It is durable when this returns. After an error nothing is left of it, unless the process is killed where
/// files cannot be without a name. While this goes on, neither the disk nor the bitmap may change.
pub fn incremental(
    uri: &OsStr,
    bitmap: &str,
    target: &OsStr,
    options: &IncrementalOptions,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    let location = &located(target)?;
    let path = &*location.name();
    refuse(location, options)?;
    let mut job = Job::default();
    let source = Marked::open(uri, bitmap, &mut job)?;
    let origin = Origin {
        path: &source.path,
        size: source.size(),
        files: Vec::new(),
    };
    let target = target_options(options, source.size());
    let sink = Sink::open(location, &[origin], &target)?;
    let copied = copy(&mut job, &source, &sink, path, options, progress);
    sink.finish(copied, path, progress, |_, _| Ok(()))
}

/// What would make no backup, or end another one.
fn refuse(location: &Location, options: &IncrementalOptions) -> Result<(), Error> {
    let create = &options.create;
    let problem = match create.format {
        Format::Raw | Format::Qed | Format::Luks | Format::Foreign(_) => {
            "a backup with a backing file must be a qcow2 image (-O qcow2)"
        }
        // Space that is there for data hides the backup before.
        Format::Qcow2 if create.preallocation != Preallocation::Off => {
            "a backup with a backing file contains only changes; omit preallocation"
        }
        // It would be left behind, or written over, when something fails.
        Format::Qcow2 if create.qcow2.data_file.is_some() => "a backup is one file; omit data_file",
        // It may be an older backup, or the disk.
        Format::Qcow2 if !location.kind().images || identity_of(location).is_some() => {
            "already exists; choose another name for the new backup"
        }
        Format::Qcow2 => return Ok(()),
    };
    Err(usage(&location.name(), problem))
}

fn target_options(options: &IncrementalOptions, size: u64) -> TargetOptions {
    let mut create = options.create.clone();
    create.size = Some(size);
    create.backing = Some(options.backing.clone());
    TargetOptions {
        create,
        cache: options.cache,
        engine: options.engine,
        no_create: false,
        target_is_zero: false,
        compress: options.compress,
        sparse: SPARSE,
        allow_dirs: options.allow_dirs.clone(),
        data_file: None,
        keys: options.keys.clone(),
    }
}

/// A disk that is not copied as it is: block status of it tells what a bitmap marks, and not where zeroes
/// are.
struct Marked {
    /// For people.
    path: PathBuf,
    client: Client,
}

impl Marked {
    fn open(uri: &OsStr, bitmap: &str, job: &mut Job) -> Result<Marked, Error> {
        let path = PathBuf::from(uri);
        let parsed = uri.to_string_lossy().parse::<NbdUri>();
        let parsed = parsed.map_err(|problem| usage(&path, problem))?;
        if !(1..=MAX_NAME).contains(&bitmap.len()) {
            let problem = format!("not a bitmap's name, which has 1 to {MAX_NAME} bytes");
            return Err(usage(&path, problem));
        }
        let disk = NbdDisk::connect(
            &parsed,
            NbdOptions {
                read_only: true,
                // A server that has been away may have another disk, or another bitmap.
                reconnect: None,
                dirty_bitmap: Some(bitmap.to_owned()),
                ..NbdOptions::default()
            },
        )?;
        disk.activate()?;
        let client = job.client(Arc::new(disk), Default::default())?;
        Ok(Marked { path, client })
    }

    /// Bytes of the disk.
    fn size(&self) -> u64 {
        self.client.info().size
    }

    /// What the bitmap marks, in clusters of `cluster` bytes.
    fn clusters<'a>(
        &'a self,
        job: &'a Job,
        cluster: u64,
    ) -> Result<impl Iterator<Item = Result<Segment, Error>> + use<'a>, Error> {
        let parts = Asked::new(job, &self.client, 0..self.size())?;
        let cluster = cluster.max(u64::from(self.client.info().block_size));
        let marked = parts.or_fail(&self.path);
        Ok(Clusters::new(marked, cluster, self.size()))
    }
}

/// Parts that have data, in whole clusters of a disk: in order, and each cluster once.
struct Clusters<I> {
    parts: I,
    cluster: u64,
    /// Up to which byte of the disk there is nothing left to be told.
    done: u64,
    size: u64,
}

impl<I> Clusters<I> {
    fn new(parts: I, cluster: u64, size: u64) -> Clusters<I> {
        Clusters {
            parts,
            cluster,
            done: 0,
            size,
        }
    }

    /// What is in clusters that were not told before.
    fn widen(&mut self, range: Range<u64>) -> Option<Segment> {
        let start = range.start / self.cluster * self.cluster;
        let end = range.end.next_multiple_of(self.cluster).min(self.size);
        let range = start.max(self.done)..end;
        if range.is_empty() {
            return None;
        }
        self.done = end;
        let state = State::Data;
        Some(Segment { range, state })
    }
}

impl<I: Iterator<Item = Result<Segment, Error>>> Iterator for Clusters<I> {
    type Item = Result<Segment, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.parts.next()? {
                Ok(part) if part.state != State::Data => {}
                Ok(part) => {
                    if let Some(segment) = self.widen(part.range) {
                        return Some(Ok(segment));
                    }
                }
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

fn copy(
    job: &mut Job,
    source: &Marked,
    sink: &Sink,
    path: &Path,
    options: &IncrementalOptions,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    let target = job.client(sink.disk(), options.engine)?;
    let unit = sink.compress_unit().filter(|_| options.compress);
    let cluster = options.create.cluster_size;
    let mut total = 0;
    for segment in source.clusters(job, cluster)? {
        progress.check()?;
        let range = segment?.range;
        total += range.end - range.start;
    }
    progress.begin(total);
    // Whole clusters: of those that are written in part the rest would be read from the backup before.
    let piece = unit.unwrap_or(PIECE.max(cluster));
    let copy = Copy {
        job,
        source: &source.client,
        target: &target,
        options: CopyOptions {
            piece,
            shift: 0,
            depth: unit.map_or(0, compressed_at_once).max(options.parallel),
            granule: granule(&target, SPARSE, unit, piece),
            // The backup before may have something there.
            target_is_zero: false,
            unmap: true,
            compress: unit.is_some(),
            rate: options.rate,
            salvage: false,
        },
        moving: Moving {
            source: &source.path,
            target: path,
        },
    };
    let mut behind = sink.write_behind(options.cache);
    copy.run(&mut source.clusters(job, cluster)?, &mut behind, progress)?;
    flush(job, &target, path)?;
    progress.end();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cluster_is_told_once_and_whole() {
        use State::{Data, Hole};
        let parts = [
            (0..10, Hole),
            (10..20, Data),
            (20..30, Hole),
            (30..110, Data),
            (110..120, Hole),
            (120..130, Data),
            (130..400, Hole),
            (400..410, Data),
            (410..640, Hole),
            (640..650, Data),
        ];
        let parts = parts.map(|(range, state)| Ok(Segment { range, state }));
        let told = Clusters::new(parts.into_iter(), 64, 650);
        let told: Vec<_> = told.map(|segment| segment.unwrap().range).collect();
        assert_eq!(told, [0..64, 64..128, 128..192, 384..448, 640..650]);
    }
}
