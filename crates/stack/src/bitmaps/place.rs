//! Where a disk's bitmaps are.

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

/// So long one who comes waits for one who is about to leave.
const PATIENCE: Duration = Duration::from_secs(3);

#[derive(Clone)]
pub(crate) struct Place {
    /// The directory, which need not be there as long as there are none.
    pub(crate) dir: PathBuf,
    /// The image's file, if it is in one.
    pub(crate) image: Option<PathBuf>,
    /// The file that its data is in, if that is another one.
    pub(crate) data: Option<PathBuf>,
    /// Stands for what the disk is called, where other disks may be meant.
    pub(crate) of: Option<String>,
    /// The boot of this machine.
    pub(crate) boot: String,
}

impl Place {
    /// Of the disk that is there; `dir` is where it is if not beside its image. The error says why there is none.
    pub(crate) fn of(location: &Location, dir: Option<&Path>) -> Result<Place, String> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let boot = boot.map_err(cause)?.trim().into();
        if let Some(path) = location.path().filter(|path| path.is_file()) {
            // (However it is called: all who serve it must find the same ones.)
            let image = gate::real_path(path).map_err(cause)?;
            let mut beside = image.clone().into_os_string();
            beside.push(".bitmaps");
            return Ok(Place {
                dir: dir.map_or(beside.into(), Path::to_owned),
                // (Beside an image it can be no other's.)
                of: dir.map(|_| digest(image.as_os_str().as_bytes())),
                image: Some(image),
                data: None,
                boot,
            });
        }
        match dir {
            // (`memory:SIZE`, say.)
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

    /// Nobody's bitmap: names do not begin like this.
    pub(super) fn next_path(&self, name: &str) -> PathBuf {
        self.dir.join(format!(".{name}.next"))
    }

    /// The directory is there, durably.
    pub(super) fn make(&self) -> io::Result<()> {
        match fs::create_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made.and_then(|()| sync_dir(&self.dir)),
        }
    }

    /// As it is now.
    pub(crate) fn image(&self) -> Option<Left> {
        let found = fs::metadata(self.image.as_ref()?).ok()?;
        let data = |path| data_of(fs::metadata(path).ok().as_ref());
        Some(Left::of(&found, self.data.as_ref().map_or(0, data)))
    }

    /// Nobody has said where it is, and it is made and removed as it is needed.
    pub(crate) fn is_beside(&self) -> bool {
        self.of.is_none()
    }

    /// What was said is there: it is by that that other processes are kept away, where the disk cannot be locked.
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
            // (Its file is locked.)
            Err(problem) if self.image.is_some() => {
                tracing::warn!("{problem}");
                Ok(())
            }
            made => made,
        }
    }

    /// Nothing but a bitmap can be there: nobody else has anything in the directory.
    pub(super) fn has_only_bitmaps(&self, path: &Path) -> bool {
        (self.is_beside() || self.image.is_none()) && is_file(path)
    }

    /// The directory, for this process alone: another one that uses it is about to leave, or has the disk. None: there
    /// is none.
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
                // (Somebody has removed it meanwhile.)
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

    /// The bitmaps that may be there.
    pub(super) fn names(&self) -> io::Result<Vec<String>> {
        let mut names = self.files()?;
        names.retain(|name| check_bitmap_name(name).is_ok());
        names.sort();
        Ok(names)
    }

    /// Removes what nobody needs: the bitmap that it was to follow goes on in its place. (What cannot be removed is in
    /// nobody's way until then.)
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

/// Stands for what a disk is called, however long that is.
fn digest(name: &[u8]) -> String {
    blake3::hash(name).to_hex()[..32].to_owned()
}
