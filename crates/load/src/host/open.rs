//! Opens a file with the same checks as a server. In addition, rejects loads that would overwrite
//! data by mistake.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use fathom_files::lock::{self, Use};
use fathom_files::magic;
use rustix::fs::{OFlags, SeekFrom, fcntl_getfl, fcntl_setfl, seek};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::options::{File as FileOptions, Load};
use crate::run::Geometry;

fn refused(path: &Path, problem: impl std::fmt::Display) -> Error {
    Error::Options(format!("{} {problem}", path.display()))
}

/// Opens a file, and locks it like a QEMU image until it is closed.
pub fn open(target: &FileOptions, load: &Load) -> Result<File> {
    let path = &target.path;
    let cannot = |e| Error::os(format!("cannot open {}", path.display()), e);
    let kind = std::fs::metadata(path).map_err(cannot)?.file_type();
    if kind.is_dir() {
        let problem = "is a directory: --workload mail-server loads the files in one";
        return Err(refused(path, problem));
    }
    if !kind.is_file() && !kind.is_block_device() {
        return Err(refused(path, "is not a regular file or a block device"));
    }
    // The kernel refuses exclusive use of a device that is in use, for example by a file system or
    // as swap.
    let exclusive = kind.is_block_device() && load.writes();
    let file = OpenOptions::new()
        .read(true)
        .write(load.writes())
        .custom_flags(if exclusive { libc::O_EXCL } else { 0 })
        .open(path)
        .map_err(|e| match e.raw_os_error() {
            Some(libc::EBUSY) if exclusive => {
                refused(path, "is mounted, or used by the kernel otherwise")
            }
            _ => cannot(e),
        })?;
    if !target.raw {
        refuse_images(path, &file)?;
    }
    // A load that only reads allows other users of the file.
    let (writes, share) = (load.writes(), !load.writes());
    lock::take(path, &file, Use { writes, share }).map_err(|e| refused(path, e))?;
    if !target.buffered {
        go_direct(path, &file)?;
    }
    Ok(file)
}

/// Rejects image files: their bytes are not those of the disk, and overwriting them would destroy
/// the image.
fn refuse_images(path: &Path, file: &File) -> Result<()> {
    let found =
        magic::detect(file).map_err(|e| Error::os(format!("cannot read {}", path.display()), e))?;
    let Some(format) = found else { return Ok(()) };
    Err(refused(
        path,
        format_args!(
            "looks like {format}: load the disk in it through a server (fathom serve, and \
             --vhost-user here), or pass --format raw to load the file's own bytes"
        ),
    ))
}

fn go_direct(path: &Path, file: &File) -> Result<()> {
    let flags = fcntl_getfl(file).map_err(|e| Error::os("asking for a file's flags", e))?;
    fcntl_setfl(file, flags | OFlags::DIRECT)
        .map_err(|_| refused(path, "cannot be opened with O_DIRECT; use --buffered"))
}

/// Returns an error if the range that the load writes contains data, or may contain data.
pub fn refuse_data(file: &File, target: &FileOptions, load: &Load, area: Geometry) -> Result<()> {
    if !load.writes() || target.overwrite {
        return Ok(());
    }
    let path = &target.path;
    let is_device = file
        .metadata()
        .map_err(|e| Error::os(format!("examining {}", path.display()), e))?
        .file_type()
        .is_block_device();
    if is_device {
        let problem = "is a device, and --rw would overwrite its data: if it may, pass --overwrite";
        return Err(refused(path, problem));
    }
    let end = load.offset + area.blocks * u64::from(load.bs);
    let at = match seek(file, SeekFrom::Data(load.offset)) {
        Ok(at) if at >= end => return Ok(()),
        Err(Errno::NXIO) => return Ok(()),
        Ok(at) => at,
        // The file system does not support SEEK_DATA.
        Err(_) => load.offset,
    };
    Err(refused(
        path,
        format_args!(
            "has data at offset {at}, which --rw {} would overwrite: if it may, pass --overwrite",
            load.rw.name()
        ),
    ))
}
