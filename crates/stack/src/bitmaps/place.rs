//! The directory of a disk's bitmaps.

use super::bitmap::{is_file, is_left_over, sync_dir};
use super::header::{Left, data_of};
use super::limits::check_bitmap_name;
use fathom_files::gate;
use fathom_storage::Location;
use fathom_units::cause;
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Maximum wait for another process that is about to release the bitmaps.
const PATIENCE: Duration = Duration::from_secs(3);

#[derive(Clone)]
pub(crate) struct Place {
    /// The directory, which need not exist if there are no bitmaps.
    pub(crate) dir: PathBuf,
    /// The image's file, if there is one.
    pub(crate) image: Option<PathBuf>,
    /// The external data file, if there is one.
    pub(crate) data: Option<PathBuf>,
    /// Digest of the disk's name, where the directory may hold bitmaps of other disks.
    pub(crate) of: Option<String>,
    /// The boot identifier of this machine.
    pub(crate) boot: String,
}

impl Place {
    /// Returns the place for a disk. `dir` is the directory if it is not next to the image.
    ///
    /// The error says why the disk has no bitmaps.
    pub(crate) fn of(location: &Location, dir: Option<&Path>) -> Result<Place, String> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let boot = boot.map_err(cause)?.trim().into();
        if let Some(path) = location.path().filter(|path| path.is_file()) {
            // The path is resolved, so that all who serve the image find the same bitmaps.
            let image = gate::real_path(path).map_err(cause)?;
            let mut beside = image.clone().into_os_string();
            beside.push(".bitmaps");
            return Ok(Place {
                dir: dir.map_or(beside.into(), Path::to_owned),
                // A directory next to an image belongs to that image alone.
                of: dir.map(|_| digest(image.as_os_str().as_bytes())),
                image: Some(image),
                data: None,
                boot,
            });
        }
        match dir {
            // For example `memory:SIZE`.
            _ if location.with_size(512).is_some() => {
                Err("its changes are discarded when the server ends".into())
            }
            Some(dir) => Ok(Place {
                dir: dir.to_owned(),
                image: None,
                data: None,
                of: Some(digest(location.to_string().as_bytes())),
                boot,
            }),
            None => Err("its image is not a file; name a directory with --bitmaps".into()),
        }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Returns the path of a successor, which is not a valid bitmap name because of the dot.
    pub(super) fn next_path(&self, name: &str) -> PathBuf {
        self.dir.join(format!(".{name}.next"))
    }

    /// Creates the directory, durably, if it does not exist.
    pub(super) fn make(&self) -> io::Result<()> {
        match fs::create_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made.and_then(|()| sync_dir(&self.dir)),
        }
    }

    /// Returns the present state of the image's file.
    pub(crate) fn image(&self) -> Option<Left> {
        let found = fs::metadata(self.image.as_ref()?).ok()?;
        let data = |path| data_of(fs::metadata(path).ok().as_ref());
        Some(Left::of(&found, self.data.as_ref().map_or(0, data)))
    }

    /// Returns whether the directory is the default one, which is created and removed as needed.
    pub(crate) fn is_beside(&self) -> bool {
        self.of.is_none()
    }

    /// Creates the directory that the user has named.
    ///
    /// The directory's lock keeps other processes away if the disk itself cannot be locked.
    pub(crate) fn make_said(&self) -> Result<(), String> {
        let made = match self.is_beside() {
            true => Ok(()),
            false => self.make(),
        };
        let told = |error| {
            format!(
                "--bitmaps: cannot create {}: {}",
                self.dir.display(),
                cause(error)
            )
        };
        match made.map_err(told) {
            // The image's file is locked instead.
            Err(problem) if self.image.is_some() => {
                tracing::warn!("{problem}");
                Ok(())
            }
            made => made,
        }
    }

    /// Returns whether the path must be a bitmap, because no other disk uses the directory.
    pub(super) fn has_only_bitmaps(&self, path: &Path) -> bool {
        (self.is_beside() || self.image.is_none()) && is_file(path)
    }

    /// Opens and locks the directory. Returns `None` if it does not exist.
    ///
    /// Waits for another process that is about to release it.
    pub(super) fn lock(&self) -> io::Result<Option<File>> {
        let until = Instant::now() + PATIENCE;
        loop {
            let flags = libc::O_DIRECTORY | libc::O_NONBLOCK;
            let dir = File::options()
                .read(true)
                .custom_flags(flags)
                .open(&self.dir);
            let dir = match dir {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                dir => dir?,
            };
            match flock(&dir, FlockOperation::NonBlockingLockExclusive) {
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => {
                    sleep(Duration::from_millis(10));
                }
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err(io::Error::other("another process uses the bitmaps"));
                }
                Err(errno) => return Err(errno.into()),
                Ok(()) if self.is(&dir)? => return Ok(Some(dir)),
                // Another process has removed the directory meanwhile.
                Ok(()) if Instant::now() < until => sleep(Duration::from_millis(10)),
                Ok(()) => return Err(io::Error::other("the file is replaced repeatedly")),
            }
        }
    }

    fn is(&self, dir: &File) -> io::Result<bool> {
        let (dir, now) = (dir.metadata()?, fs::metadata(&self.dir));
        let is = |now: Metadata| (now.dev(), now.ino()) == (dir.dev(), dir.ino());
        match now {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            now => now.map(is),
        }
    }

    /// Returns the names of files that may be bitmaps.
    pub(super) fn names(&self) -> io::Result<Vec<String>> {
        let mut names = self.files()?;
        names.retain(|name| check_bitmap_name(name).is_ok());
        names.sort();
        Ok(names)
    }

    /// Removes unneeded successors and unfinished files.
    ///
    /// The bitmaps continue without these files. A file that cannot be removed does no harm.
    pub(super) fn tidy(&self, pending: &[(String, u64)]) -> io::Result<()> {
        let needed = Vec::from_iter(pending.iter().map(|(name, _)| self.next_path(name)));
        let is_next = |name: &String| {
            name.starts_with('.') && (name.ends_with(".next") || name.ends_with(".new"))
        };
        let next = self.files()?.into_iter().filter(is_next);
        for path in next.map(|name| self.path(&name)) {
            if !needed.contains(&path) && is_left_over(&path) {
                let _ = fs::remove_file(path);
            }
        }
        Ok(())
    }

    fn files(&self) -> io::Result<Vec<String>> {
        let names = fs::read_dir(&self.dir)?.map(|file| Ok(file?.file_name().into_string().ok()));
        names.filter_map(io::Result::transpose).collect()
    }
}

/// Returns a digest of fixed length of a disk's name.
fn digest(name: &[u8]) -> String {
    blake3::hash(name).to_hex()[..32].to_owned()
}
