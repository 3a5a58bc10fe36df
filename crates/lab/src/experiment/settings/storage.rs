//! Storage of a cell's disk.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use super::cell::Cell;
use super::parameters::{Scheduler, Storage};
use super::scheduler::{self, Set};
use crate::bed::image;
use crate::error::{Context, Error, Result};
use crate::evidence::device_below;
use crate::host;
use crate::machine::Format;
use crate::scratch::{self, Scratch};

/// An image, and the loop device and scheduler below it.
pub(super) struct Stored {
    /// The path that the server opens.
    pub path: PathBuf,
    /// The path that the same load uses on the host: the path that the server opens, or, if that is
    /// not a raw image, the raw file from which it was made. `None` if the host cannot run the
    /// load.
    pub bare: Option<PathBuf>,
    // Fields are dropped in this order.
    _scheduler: Option<Set>,
    _loop: Option<Loop>,
    dir: Scratch,
}

impl Stored {
    pub fn make(cell: &Cell, progress: &mut dyn FnMut(&str)) -> Result<Stored> {
        let dir = Scratch::on_disk()?;
        let (mut path, mut bare) = match &cell.image {
            Some(path) => (path.clone(), cell.has_bare().then(|| path.clone())),
            None => {
                progress(&format!("writing an image of {} MiB", cell.size >> 20));
                make_image(dir.path(), cell.size, cell.format)?
            }
        };
        let device = match cell.storage {
            Storage::File => None,
            Storage::Loop => Some(Loop::over(&path)?),
        };
        if let Some(made) = &device {
            (path, bare) = (made.path.clone(), Some(made.path.clone()));
        }
        let set = |to| Set::new(&scheduler_of(&path, cell.storage)?, to);
        Ok(Stored {
            _scheduler: cell.host_scheduler.map(set).transpose()?,
            _loop: device,
            path,
            bare,
            dir,
        })
    }

    /// Returns the directory for the server's sockets and logs.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// Creates an image. Also returns a raw file with the same contents, which may be the image itself.
fn make_image(dir: &Path, size: u64, format: Format) -> Result<(PathBuf, Option<PathBuf>)> {
    let raw = dir.join("disk.img");
    image::fill(&raw, size)?;
    if format == Format::Raw {
        return Ok((raw.clone(), Some(raw)));
    }
    let path = dir.join(format!("disk.{format}"));
    let [from, to] = [&raw, &path].map(|path| path.to_string_lossy());
    host::run(
        "qemu-img",
        &["convert", "-f", "raw", "-O", format.name(), &from, &to],
    )?;
    // Data that is still being written would disturb the load.
    let written = File::open(&path).and_then(|file| file.sync_all());
    written.context(|| format!("cannot write {}", path.display()))?;
    Ok((path, Some(raw)))
}

/// Returns the scheduler file of a loop device, or of the device below a file.
fn scheduler_of(path: &Path, storage: Storage) -> Result<PathBuf> {
    if storage == Storage::Loop {
        let name = path.file_name().unwrap_or_default();
        return Ok(scheduler::file_of(&name.to_string_lossy()));
    }
    let device = device_below(path)?.ok_or_else(|| Error::Unusable {
        path: path.to_owned(),
        reason: "no single block device below it has a scheduler".into(),
    })?;
    Ok(scheduler::file_of(&device))
}

/// Checks a scheduler before the image exists.
pub(super) fn check_scheduler(cell: &Cell, wanted: Scheduler) -> Result<()> {
    let file = match (cell.storage, &cell.image) {
        // The number of the loop device is not known yet, but all have the same schedulers.
        (Storage::Loop, _) => {
            let file = scheduler::file_of("loop0");
            if !file.exists() {
                // This loads the kernel's module and creates a device.
                host::run("losetup", &["--find"])?;
            }
            file
        }
        (Storage::File, Some(path)) => scheduler_of(path, cell.storage)?,
        (Storage::File, None) => {
            let dir = scratch::disk();
            let file = tempfile::NamedTempFile::new_in(dir);
            let file = file.context(|| format!("cannot create a file in {}", dir.display()))?;
            scheduler_of(file.path(), cell.storage)?
        }
    };
    scheduler::check(&file, wanted)
}

/// A loop device over a file. The kernel removes it when no process has it open, even if this
/// process is killed.
struct Loop {
    path: PathBuf,
    _open: File,
}

impl Loop {
    fn over(file: &Path) -> Result<Loop> {
        let file = file.to_string_lossy();
        let args = ["--find", "--show", "--direct-io=on", &file];
        let path = PathBuf::from(host::run("losetup", &args)?.trim());
        let what = || format!("cannot open {}", path.display());
        let open = OpenOptions::new().read(true).write(true).open(&path);
        // A device that is open is only marked for removal.
        host::run("losetup", &["--detach", &path.to_string_lossy()])?;
        let open = open.context(what)?;
        Ok(Loop { path, _open: open })
    }
}

/// Whether a name is the URI of an NBD export.
pub(super) fn is_uri(path: &Path) -> bool {
    path.to_string_lossy().contains("://")
}

/// Checks an image that the user has named.
pub(super) fn check_image(path: &Path) -> Result<()> {
    if is_uri(path) {
        return Ok(());
    }
    let found = fs::metadata(path).context(|| format!("--image {}", path.display()))?;
    match found.is_dir() {
        true => Err(Error::Unusable {
            path: path.to_owned(),
            reason: "--image is a file or a block device, not a directory".into(),
        }),
        false => Ok(()),
    }
}
