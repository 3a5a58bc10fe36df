//! Incremental backups: copies the blocks that a server's dirty bitmap marks into a new overlay of
//! the previous backup.

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

/// Options for an incremental backup.
#[derive(Clone, Debug)]
pub struct IncrementalOptions {
    /// The previous backup: its name, as it is written into the new image, and its format.
    pub backing: Backing,
    /// Creation options of the new image, which must be qcow2. The new image has the size of the
    /// disk.
    pub create: CreateOptions,
    /// Cache mode for writes to the new image.
    pub cache: Cache,
    /// I/O engine for the new image.
    pub engine: EngineKind,
    /// Compress the copied data.
    pub compress: bool,
    /// Maximum transfer rate in bytes per second.
    pub rate: Option<u64>,
    /// Maximum number of concurrent requests.
    pub parallel: usize,
    /// Directories in which the previous backup may name files, besides its own directory.
    pub allow_dirs: Vec<PathBuf>,
    /// Keys that unlock the previous backup and encrypt the new image.
    pub keys: KeyRing,
}

/// Minimum size of a request in bytes; larger clusters are copied in one request each.
const PIECE: u64 = 512 << 10;

/// Minimum length in bytes of zeroes that are not written as data; larger clusters raise it.
const SPARSE: u64 = 4096;

/// Maximum length in bytes of the name of a bitmap in QEMU.
const MAX_NAME: usize = 1023;

/// Creates a new image `target` whose backing file is the previous backup.
///
/// The new image contains the whole clusters that the server's dirty bitmap marks in the disk at
/// `uri`, and no other data. On top of its backing file it reads as the disk does.
///
/// The image is durable when this function returns. On an error the new image is removed. A killed
/// process leaves an incomplete image only on file systems that do not support unnamed files. The
/// disk and the bitmap must not change during the backup.
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

/// Rejects options that make no useful incremental backup or overwrite another one.
fn refuse(location: &Location, options: &IncrementalOptions) -> Result<(), Error> {
    let create = &options.create;
    let problem = match create.format {
        Format::Raw | Format::Qed | Format::Luks | Format::Foreign(_) => {
            "a backup with a backing file must be a qcow2 image (-O qcow2)"
        }
        // Preallocated clusters would hide the data of the previous backup.
        Format::Qcow2 if create.preallocation != Preallocation::Off => {
            "a backup with a backing file contains only changes; omit preallocation"
        }
        // A failed backup would leave the data file behind or have overwritten it.
        Format::Qcow2 if create.qcow2.data_file.is_some() => "a backup is one file; omit data_file",
        // The existing image may be an older backup or the disk itself.
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

/// A disk whose block status reports the blocks that a dirty bitmap marks, instead of zeroes and
/// holes.
struct Marked {
    /// Name of the disk, for messages.
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
                // After a reconnect, the server may export another disk or another bitmap.
                reconnect: None,
                dirty_bitmap: Some(bitmap.to_owned()),
                ..NbdOptions::default()
            },
        )?;
        disk.activate()?;
        let client = job.client(Arc::new(disk), Default::default())?;
        Ok(Marked { path, client })
    }

    /// Returns the size of the disk in bytes.
    fn size(&self) -> u64 {
        self.client.info().size
    }

    /// Returns the marked blocks, extended to whole clusters of `cluster` bytes.
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

/// Iterates over the clusters that contain data, in order, and returns each cluster once.
struct Clusters<I> {
    parts: I,
    cluster: u64,
    /// Offset in the disk up to which all clusters have been returned.
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

    /// Extends a range to whole clusters, and returns those that have not been returned before.
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
    // Copy whole clusters: a partial write would read the rest of the cluster from the previous
    // backup.
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
            // The previous backup may have other data where the disk reads as zeroes.
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
