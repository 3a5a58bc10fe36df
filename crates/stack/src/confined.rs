//! Opens the files that images name: backing files and external data files.
//!
//! An image may come from an untrusted source, and the files that it names are opened with our
//! rights. Therefore these files are opened only below directories that the user allows, which the
//! kernel enforces (openat2(2) with RESOLVE_BENEATH). The files must be regular files or block
//! devices: opening other types of files may block or have side effects. A file is opened for
//! writing only for a job that the user has started. The external data file of a writable image
//! must be named by the user.

use fathom_core::DiskError;
use fathom_files::gate::{self, Wanted};
use fathom_files::trusted;
use fathom_formats::{file_name_of, resolve};
use fathom_units::cause;
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2, readlinkat};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

/// Maximum number of symbolic links to follow, as in the kernel.
const MAX_LINKS: usize = 40;
/// Maximum number of attempts at openat2(2) while others rename directories.
const MAX_RACES: usize = 100;

/// The directories below which files may be opened because an image names them.
#[derive(Debug)]
pub struct AllowedDirs(Way);

#[derive(Debug)]
enum Way {
    /// The directories are open in this process.
    Own(Vec<AllowedDir>),
    /// Another process opens files: the path of the first image, and additional directories.
    Gate(PathBuf, Vec<PathBuf>),
}

#[derive(Debug)]
struct AllowedDir {
    /// The path as the user wrote it, made absolute.
    given: PathBuf,
    /// The path without symbolic links.
    real: PathBuf,
    fd: OwnedFd,
}

impl AllowedDir {
    fn open(path: &Path) -> io::Result<AllowedDir> {
        let real = path.canonicalize()?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(AllowedDir {
            given: std::path::absolute(path)?,
            fd: rustix::fs::open(&real, flags, Mode::empty())?,
            real,
        })
    }

    /// Opens the directory without following links that another user could have placed.
    fn open_for_other(path: &Path) -> io::Result<AllowedDir> {
        let fd = trusted::open_path(path)?;
        let own = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let real = std::fs::read_link(&own)?;
        if !std::fs::metadata(&own)?.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        let given = std::path::absolute(path)?;
        Ok(AllowedDir { given, real, fd })
    }

    /// Opens `path` with O_PATH, which has no side effects.
    ///
    /// Returns `None` if `path` is not in this directory.
    fn open_path(&self, path: &Path, more: OFlags) -> Option<Result<OwnedFd, Errno>> {
        let rest = [&self.given, &self.real].map(|dir| path.strip_prefix(dir).ok());
        let rest = rest.into_iter().flatten().next()?;
        // The path of the directory itself.
        let rest = if rest == Path::new("") {
            Path::new(".")
        } else {
            rest
        };
        let flags = OFlags::PATH | OFlags::CLOEXEC | more;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let attempt = || openat2(&self.fd, rest, flags, Mode::empty(), resolve);
        let undisturbed = |result: &Result<OwnedFd, Errno>| !matches!(result, Err(Errno::AGAIN));
        let attempts = std::iter::repeat_with(attempt).take(MAX_RACES);
        let result = { attempts }.find(undisturbed);
        Some(result.unwrap_or(Err(Errno::AGAIN)))
    }
}

impl AllowedDirs {
    /// Allows the directory of `image`, and those in `more`.
    ///
    /// The root directory is allowed only if `more` contains it: otherwise an image in the root
    /// directory could name any file.
    pub fn new(image: &Path, more: &[PathBuf]) -> Result<AllowedDirs, DiskError> {
        if gate::other().is_some() {
            return Ok(AllowedDirs(Way::Gate(image.to_owned(), more.to_vec())));
        }
        AllowedDirs::own(image, more, AllowedDir::open)
    }

    /// Like [`AllowedDirs::new`], on behalf of a process of another user with fewer rights.
    ///
    /// Links on the way to the directories are followed only if no such process could have placed
    /// them.
    pub fn for_other(image: &Path, more: &[PathBuf]) -> Result<AllowedDirs, DiskError> {
        AllowedDirs::own(image, more, AllowedDir::open_for_other)
    }

    fn own(
        image: &Path,
        more: &[PathBuf],
        open: fn(&Path) -> io::Result<AllowedDir>,
    ) -> Result<AllowedDirs, DiskError> {
        let unusable = |path: &Path, what| {
            let path = path.to_owned();
            move |source| DiskError::Io { path, what, source }
        };
        let own = directory_of(image);
        let own_opened = open(own).map_err(unusable(own, "cannot use the image's directory"))?;
        let mut dirs = Vec::new();
        if own_opened.real != Path::new("/") {
            dirs.push(own_opened);
        }
        for dir in more {
            let opened = open(dir);
            dirs.push(opened.map_err(unusable(dir, "cannot use --allow-dir"))?);
        }
        Ok(AllowedDirs(Way::Own(dirs)))
    }

    /// Opens the file that `image` calls `name`, for reading, and returns its path, too.
    ///
    /// A relative name is resolved from the directory of `image`.
    pub fn open(&self, image: &Path, name: &[u8]) -> Result<(PathBuf, File), DiskError> {
        self.open_for(image, name, false)
    }

    /// Like [`AllowedDirs::open`], but also for writing, because the user and not the image asks
    /// for it.
    pub fn open_writable(&self, image: &Path, name: &[u8]) -> Result<(PathBuf, File), DiskError> {
        if let Way::Gate(..) = self.0 {
            let problem = "it names a file that only another user's process can read";
            return Err(unusable(image, problem.into()));
        }
        self.open_for(image, name, true)
    }

    fn open_for(
        &self,
        image: &Path,
        name: &[u8],
        write: bool,
    ) -> Result<(PathBuf, File), DiskError> {
        let refused = |problem: String| unusable(image, problem);
        if let (Way::Gate(first, more), Some(gate)) = (&self.0, gate::other()) {
            let wanted = Wanted::Named {
                image: first.clone(),
                more: more.clone(),
                layer: image.to_owned(),
                name: name.to_vec(),
            };
            let got = gate.get(&wanted, None).map_err(|no| refused(no.text))?;
            return Ok((got.path.unwrap_or_default(), got.file.into()));
        }
        let shown = shown(name);
        let failed = |error: io::Error| {
            refused(format!(
                "cannot open the file that it names, {shown}: {}",
                cause(error)
            ))
        };
        let path = file_name_of(name).map_err(|error| refused(error.to_string()))?;
        let mut path = seen_from(image, path).map_err(failed)?;
        let found = match self.find(&mut path) {
            Err(Errno::XDEV) => {
                let dir = directory_of(&path).display();
                return Err(refused(format!(
                    "it names {shown}, which is outside of the directories that images may use; \
                     add --allow-dir {dir} to allow it"
                )));
            }
            Err(error) => return Err(failed(error.into())),
            Ok(found) => found,
        };
        let file = reopen(&found, write).map_err(failed)?;
        Ok((path, file))
    }

    /// Opens the file at `path`, which is absolute, with O_PATH.
    ///
    /// If `path` is a link out of an allowed directory, `path` is replaced by the link's target.
    /// Returns `EXDEV` if the file is not in the allowed directories.
    fn find(&self, path: &mut PathBuf) -> Result<OwnedFd, Errno> {
        for _ in 0..MAX_LINKS {
            match self.open_path(path, OFlags::empty()) {
                Err(Errno::XDEV) => {}
                outcome => return outcome,
            }
            let link = self.open_path(path, OFlags::NOFOLLOW)?;
            let target = readlinkat(&link, "", Vec::new()).map_err(|_| Errno::XDEV)?;
            let target = Path::new(OsStr::from_bytes(target.as_bytes()));
            *path = seen_from(path, target).map_err(|_| Errno::NOENT)?;
        }
        Err(Errno::LOOP)
    }

    /// Opens `path` in the first directory that contains it.
    ///
    /// Otherwise returns the first error other than `EXDEV`, if any.
    fn open_path(&self, path: &Path, more: OFlags) -> Result<OwnedFd, Errno> {
        let mut told = Errno::XDEV;
        let Way::Own(dirs) = &self.0 else {
            return Err(told);
        };
        for outcome in dirs.iter().filter_map(|dir| dir.open_path(path, more)) {
            match outcome {
                Ok(found) => return Ok(found),
                Err(error) if told == Errno::XDEV => told = error,
                Err(_) => {}
            }
        }
        Err(told)
    }
}

/// Returns the external data file of a writable image, which calls it `name`.
///
/// The path is the one that the user has given. If the image's name for it were trusted, an
/// untrusted image could have other tenants' files overwritten.
pub fn data_file<'a>(
    image: &Path,
    name: &[u8],
    given: Option<&'a Path>,
) -> Result<&'a Path, DiskError> {
    given.ok_or_else(|| {
        let path = resolve(image, name).ok();
        let path = path.map_or(shown(name), |path| shown(path.as_os_str().as_bytes()));
        let problem = format!(
            "its data is in another file, which is written only if you name the file; add \
             --data-file {path}"
        );
        unusable(image, problem)
    })
}

/// Returns the error for a data file that the user named for an image that has none.
pub fn no_data_file(image: &Path) -> DiskError {
    let problem = "no external data file; --data-file applies to images that have one";
    unusable(image, problem.into())
}

fn unusable(image: &Path, problem: String) -> DiskError {
    let path = image.to_owned();
    DiskError::Unusable { path, problem }
}

fn shown(name: &[u8]) -> String {
    String::from_utf8_lossy(name).escape_debug().to_string()
}

/// Returns the directory of a file.
fn directory_of(file: &Path) -> &Path {
    let dir = file.parent().unwrap_or(file);
    if dir == Path::new("") {
        return Path::new(".");
    }
    dir
}

/// Resolves `name` from the directory of `file`.
///
/// Leading `..` components are resolved here, since no link can precede them. These components may
/// lead from one allowed directory to another.
fn seen_from(file: &Path, name: &Path) -> io::Result<PathBuf> {
    let mut path = PathBuf::from("/");
    if name.is_relative() {
        path = directory_of(file).canonicalize()?;
    }
    let mut at_start = name.is_relative();
    for component in name.components() {
        match component {
            Component::ParentDir if at_start => drop(path.pop()),
            Component::RootDir | Component::CurDir => {}
            other => {
                at_start = false;
                path.push(other);
            }
        }
    }
    Ok(path)
}

/// Opens the file behind an O_PATH descriptor if opening its type has no side effects.
fn reopen(found: &OwnedFd, write: bool) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", found.as_raw_fd());
    let kind = std::fs::metadata(&path)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(io::Error::other("not a regular file or a block device"));
    }
    OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(libc::O_NOCTTY)
        .open(path)
}

#[cfg(test)]
#[path = "confined_tests.rs"]
mod tests;
