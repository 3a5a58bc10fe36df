//! Opens images and determines their type, size and capabilities.

use super::flushes::{Flushes, OwnFile};
use super::marked::refuse_superseded;
use super::plan::Planner;
use super::{Cache, FileOptions, Kind, Shared, align, lock_error};
use crate::engine::EngineKind;
use fathom_core::DiskError;
use fathom_files::lock::{self, LockError};
use fathom_files::{FileId, gate, missing_directory};
use fathom_units::cause;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// See statfs(2).
const TMPFS_MAGIC: i64 = 0x0102_1994;
const RAMFS_MAGIC: i64 = 0x8584_58f6;
const EXT_MAGIC: i64 = 0xef53;
const XFS_MAGIC: i64 = 0x5846_5342;
const BTRFS_MAGIC: i64 = 0x9123_683e;
const F2FS_MAGIC: i64 = 0xf2f5_2010;

/// Maximum number of times a file is opened again for workers' flushes.
const MAX_OWN_FILES: usize = 64;

/// `ioctl(2)` numbers of block devices (linux/fs.h).
mod ioctl {
    pub(super) const BLKROGET: libc::Ioctl = 0x125e;
    pub(super) const BLKIOOPT: libc::Ioctl = 0x1279;
    pub(super) const BLKPBSZGET: libc::Ioctl = 0x127b;
    pub(super) const BLKSSZGET: libc::Ioctl = 0x1268;
    pub(super) const BLKGETSIZE64: libc::Ioctl = 0x8008_1272_u32 as libc::Ioctl;
}

pub(super) fn open(path: &Path, options: FileOptions) -> Result<Shared, DiskError> {
    if options.force_share && !options.read_only {
        return Err(unusable(path, "--force-share: needs --readonly"));
    }
    let file = gate::open_image(path, !options.read_only)
        .map_err(|error| open_error(path, &options, error))?;
    examine(path, file, options)
}

/// Determines the type, size and capabilities of an open file.
pub(super) fn examine(path: &Path, file: File, options: FileOptions) -> Result<Shared, DiskError> {
    let metadata = file
        .metadata()
        .map_err(|error| failed(path, "cannot read the file's attributes", error))?;
    let kind = kind_of(path, &metadata)?;
    // A device node is often on tmpfs; the device's data is not.
    let in_memory = kind == Kind::Regular
        && is_in_memory(&file)
            .map_err(|e| failed(path, "cannot read the type of its file system", e))?;
    if kind == Kind::BlockDevice && !options.read_only {
        check_writable(path, &file)?;
    }
    refuse_superseded(path, &file, &options)?;
    check_locks(path, &file, &options)?;
    if options.engine == EngineKind::Native && options.cache != Cache::None && !in_memory {
        return Err(unusable(
            path,
            "--aio native: needs --cache none, because it would block on the page cache; or use \
             --aio io_uring or threads",
        ));
    }
    let file_len = length_of(path, &file)?;
    let size = match options.growable {
        true => file_len,
        false => visible_size(path, file_len, options.read_only)?,
    };
    let logical_block = ioctl_u32(&file, ioctl::BLKSSZGET).filter(|_| kind == Kind::BlockDevice);
    let alignment = if options.cache == Cache::None && !in_memory {
        Some(go_direct(path, &file, logical_block)?)
    } else {
        None
    };
    let at_least = options.min_direct_block.unwrap_or(1);
    let block = alignment.map_or(1, |a| a.block.max(at_least));
    let physical_block_size = match kind {
        Kind::Regular => metadata.blksize().clamp(512, 4096) as u32,
        Kind::BlockDevice => ioctl_u32(&file, ioctl::BLKPBSZGET).unwrap_or(512),
    };
    let optimal_io_size = match kind {
        Kind::Regular => 0,
        Kind::BlockDevice => ioctl_u32(&file, ioctl::BLKIOOPT).unwrap_or(0),
    };
    let named = is_named(path, &file);
    let flushes = Arc::new(Flushes::default());
    let own_files = match options.read_only || in_memory || alignment.is_some() {
        true => Vec::new(),
        false => own_files(&file, kind, options.workers, &flushes),
    };
    Ok(Shared {
        seen: Default::default(),
        path: path.to_owned(),
        file,
        kind,
        id: FileId::of(&metadata),
        address_align: alignment.map_or(1, |a| a.address),
        physical_block_size: physical_block_size.max(block),
        optimal_io_size,
        in_memory,
        size: AtomicU64::new(size),
        own_files,
        flushes,
        file_len: AtomicU64::new(file_len),
        told_end: Default::default(),
        planner: Planner {
            block: u64::from(block),
            allocation_unit: logical_block.map_or(1, u64::from),
            is_device: kind == Kind::BlockDevice,
            may_unmap: options.discard,
            unsupported: Default::default(),
        },
        ranges: Default::default(),
        bounced: AtomicU64::new(0),
        padded: AtomicBool::new(false),
        end_guard: Default::default(),
        named,
        has_marked: AtomicBool::new(false),
        options,
    })
}

fn failed(path: &Path, what: &'static str, source: io::Error) -> DiskError {
    DiskError::Io {
        path: path.to_owned(),
        what,
        source,
    }
}

fn unusable(path: &Path, problem: impl Into<String>) -> DiskError {
    DiskError::Unusable {
        path: path.to_owned(),
        problem: problem.into(),
    }
}

fn kind_of(path: &Path, metadata: &Metadata) -> Result<Kind, DiskError> {
    let kind = metadata.file_type();
    if kind.is_file() {
        Ok(Kind::Regular)
    } else if kind.is_block_device() {
        Ok(Kind::BlockDevice)
    } else {
        let problem = "not a file; a disk needs a regular file or a block device";
        Err(unusable(path, problem))
    }
}

fn open_error(path: &Path, options: &FileOptions, error: io::Error) -> DiskError {
    let problem = match error.raw_os_error() {
        None => error.to_string(),
        Some(libc::ENOENT | libc::ENOTDIR) => match missing_directory(path) {
            Some(dir) => format!("no such directory: {}", dir.display()),
            None => "no such file; create an image with 'fathom img create'".to_owned(),
        },
        Some(libc::EACCES) if gate::open_image(path, false).is_err() => {
            "no permission to read the file; change its owner or mode, or run this program as another user".to_owned()
        }
        Some(libc::EROFS | libc::EACCES) if !options.read_only => match options.patient {
            true => format!(
                "no permission to write: {}; change the file's owner or mode, or serve the disk with --readonly",
                cause(error)
            ),
            false => format!("no permission to write: {}; change the file's owner or mode", cause(error)),
        },
        Some(_) => return failed(path, "cannot open the file", error),
    };
    unusable(path, problem)
}

/// Checks the image's locks. For a patient caller, a conflict is only a warning: the caller may be
/// the target of a live migration, whose source holds the image until the end.
fn check_locks(path: &Path, file: &File, options: &FileOptions) -> Result<(), DiskError> {
    match lock::check(path, file, options.lock_use()) {
        Err(LockError::InUse(_)) if options.succeeds => Ok(()),
        Err(error @ LockError::InUse(_)) if options.patient => {
            tracing::warn!(
                "{}: {error}; the disk cannot be used until that process releases the image, as \
                 the source of a live migration does",
                path.display()
            );
            Ok(())
        }
        other => other.map_err(|error| lock_error(path, error, !options.read_only)),
    }
}

/// Rejects a read-only block device, which open(2) allows to open for writing.
fn check_writable(path: &Path, file: &File) -> Result<(), DiskError> {
    match ioctl_u32(file, ioctl::BLKROGET) {
        Some(0) | None => Ok(()),
        Some(_) => Err(unusable(
            path,
            "the device is read-only; serve it with --readonly",
        )),
    }
}

/// Returns whether the path leads to the file.
pub(super) fn is_named(path: &Path, file: &File) -> bool {
    // A file without a link has no name to look up.
    let own = file.metadata().ok().filter(|own| own.nlink() > 0);
    own.is_some_and(|own| FileId::at(path).is_ok_and(|found| found == FileId::of(&own)))
}

/// Returns the length of a file or block device in bytes.
pub(super) fn length_of(path: &Path, file: &File) -> Result<u64, DiskError> {
    let len = match file.metadata() {
        Ok(m) if m.file_type().is_block_device() => device_size(file),
        other => other.map(|m| m.len()),
    };
    len.map_err(|error| failed(path, "cannot read the file's size", error))
}

/// Returns the disk's size in bytes, a multiple of 512.
///
/// A file that ends within a sector is served read-only: the missing bytes of that sector read as
/// zeroes. Writing is refused, because it would have to change the file's length.
pub(super) fn visible_size(path: &Path, size: u64, read_only: bool) -> Result<u64, DiskError> {
    if size < 512 {
        let problem = format!("{size} bytes long; a disk needs at least 512");
        return Err(unusable(path, problem));
    }
    let whole = size.next_multiple_of(512);
    if whole != size && !read_only {
        let over = size % 512;
        let problem = format!(
            "the size of {size} bytes is not a multiple of 512: the last sector has {over} \
             bytes; fill it up with zeroes (truncate -s %512 FILE), or open the image read-only"
        );
        return Err(unusable(path, problem));
    }
    Ok(whole)
}

fn device_size(file: &File) -> io::Result<u64> {
    let mut size = 0u64;
    // SAFETY: BLKGETSIZE64 writes one u64 (its definition's size_t is one on
    // every 64-bit machine).
    let result = unsafe { libc::ioctl(raw(file), ioctl::BLKGETSIZE64, &mut size) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(size)
}

/// Returns a property of a block device, or None if the device does not have it.
fn ioctl_u32(file: &File, request: libc::Ioctl) -> Option<u32> {
    let mut value = 0u32;
    // SAFETY: the requests above other than BLKGETSIZE64 write one int.
    let result = unsafe { libc::ioctl(raw(file), request, &mut value) };
    (result == 0).then_some(value)
}

fn raw(file: &File) -> libc::c_int {
    std::os::fd::AsRawFd::as_raw_fd(file)
}

fn is_in_memory(file: &File) -> io::Result<bool> {
    let kind = kind_of_file_system(file)?;
    Ok(kind == TMPFS_MAGIC || kind == RAMFS_MAGIC)
}

fn kind_of_file_system(file: &File) -> io::Result<i64> {
    Ok(rustix::fs::fstatfs(file.as_fd())?.f_type as i64)
}

/// Opens the file again for each of several workers' flushes. Returns fewer files, or none, if that
/// fails.
fn own_files(file: &File, kind: Kind, workers: usize, flushes: &Flushes) -> Vec<OwnFile> {
    if workers < 2 || !reports_errors_to_each(file, kind) {
        return Vec::new();
    }
    // Opened for reading: udev rescans a device when a descriptor open for writing is closed.
    let files = (0..workers.min(MAX_OWN_FILES)).map_while(|_| gate::open_again(file, false).ok());
    let own = files.map(|file| OwnFile {
        file,
        flushes: Arc::new(flushes.by_another_file()),
    });
    own.collect()
}

/// Returns whether the kernel reports lost writes to each open file description (errseq_t, since
/// Linux 4.13). Network file systems report some errors only to the writer.
fn reports_errors_to_each(file: &File, kind: Kind) -> bool {
    let is_known = |kind| [EXT_MAGIC, XFS_MAGIC, BTRFS_MAGIC, F2FS_MAGIC].contains(&kind);
    kind == Kind::BlockDevice || kind_of_file_system(file).is_ok_and(is_known)
}

/// Switches the file to direct I/O, which bypasses the page cache.
fn go_direct(
    path: &Path,
    file: &File,
    logical_block: Option<u32>,
) -> Result<align::Alignment, DiskError> {
    let refused = || {
        unusable(
            path,
            "its file system does not support direct I/O; use --cache writeback",
        )
    };
    let flags = rustix::fs::fcntl_getfl(file)
        .map_err(|e| failed(path, "cannot switch to direct I/O", e.into()))?;
    rustix::fs::fcntl_setfl(file, flags | rustix::fs::OFlags::DIRECT).map_err(|_| refused())?;
    align::probe(file, logical_block)
        .map_err(|error| failed(path, "cannot read the file", error))?
        .ok_or_else(refused)
}
