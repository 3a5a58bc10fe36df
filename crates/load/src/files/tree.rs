//! The directory tree that a run creates and removes.
//!
//! All files are accessed by names without a slash, relative to open directories, and symbolic
//! links are not followed. Therefore nothing outside the tree is changed, even if another process
//! creates files or links in it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, fstatvfs, mkdirat, openat, syncfs, unlinkat};
use rustix::io::{Errno, pwrite};

use super::contents::Memory;
use super::model::{self, File};
use super::options::{Options, SECTOR};
use crate::error::{Error, Result};

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
/// Number of names to try for a new directory.
const NAMES: u32 = 100;
/// Name of the file for finding the alignment that O_DIRECT needs.
const PROBE: &str = "probe";
/// Maximum alignment of direct I/O to try, in bytes.
const LARGEST_ALIGN: u32 = 64 << 10;

/// The root directory and its subdirectories, all open.
#[derive(Debug)]
pub struct Tree {
    /// The parent directory, which the caller named.
    parent: OwnedFd,
    name: String,
    path: PathBuf,
    root: OwnedFd,
    dirs: Vec<OwnedFd>,
    align: u32,
    /// Whether to remove the tree on drop.
    armed: bool,
}

impl Tree {
    /// Creates a new directory below the one in the options, with subdirectories but without files.
    pub fn create(options: &Options) -> Result<Tree> {
        let open = DIRECTORY.difference(OFlags::NOFOLLOW);
        let parent = openat(CWD, &options.dir, open, Mode::empty())
            .map_err(|e| Error::os(format!("cannot open {}", options.dir.display()), e))?;
        let (name, root) = make_root(&parent, &options.dir)?;
        let mut tree = Tree {
            path: options.dir.join(&name),
            armed: !options.keep,
            dirs: Vec::new(),
            align: SECTOR,
            parent,
            name,
            root,
        };
        if options.direct {
            tree.align = tree.probe(options)?;
        }
        tree.check_room(options)?;
        for dir in 0..options.dirs {
            let fd = make_dir(&tree.root, &dir_name(dir)).map_err(|e| {
                let path = tree.path_of_dir(dir);
                tree.failed(format_args!("making {}", path.display()), e)
            })?;
            tree.dirs.push(fd);
        }
        Ok(tree)
    }

    /// Opens the directory in the options, with the subdirectories that an earlier run has created.
    pub fn open(options: &Options) -> Result<Tree> {
        let path = &options.dir;
        let failed = |e| Error::os(format!("cannot open {}", path.display()), e);
        let root = openat(CWD, path, DIRECTORY, Mode::empty()).map_err(failed)?;
        let parent = openat(&root, "..", DIRECTORY, Mode::empty()).map_err(failed)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let mut tree = Tree {
            name: name.into_owned(),
            path: path.clone(),
            // Do not remove the directory before it is known to be from an earlier run.
            armed: false,
            dirs: Vec::new(),
            align: SECTOR,
            parent,
            root,
        };
        for dir in 0..options.dirs {
            let fd = openat(&tree.root, dir_name(dir), DIRECTORY, Mode::empty()).map_err(|e| {
                let path = tree.path_of_dir(dir);
                let what = "must be a directory of --prepare-only with the same options";
                Error::Options(format!("cannot open {}: {e}: {what}", path.display()))
            })?;
            tree.dirs.push(fd);
        }
        if options.direct {
            tree.align = tree.probe(options)?;
        }
        tree.armed = !options.keep;
        Ok(tree)
    }

    /// Returns the alignment of offsets and lengths in bytes.
    pub fn align(&self) -> u32 {
        self.align
    }

    /// Returns an open directory.
    pub fn dir(&self, dir: u16) -> BorrowedFd<'_> {
        self.dirs[usize::from(dir)].as_fd()
    }

    /// Returns the path of a file, for messages.
    pub fn path_of(&self, file: File) -> PathBuf {
        self.path_of_dir(file.dir).join(file_name(file.id))
    }

    /// Returns the path of a directory, for messages.
    pub fn path_of_dir(&self, dir: u16) -> PathBuf {
        self.path.join(dir_name(dir))
    }

    /// Converts the errno of a system call to an error.
    pub fn failed(&self, doing: impl std::fmt::Display, cause: Errno) -> Error {
        match cause {
            Errno::NOSPC | Errno::DQUOT => Error::Full(format!(
                "{doing}: {}: there is no room for these files; --files and --scale make \
                 them fewer",
                fathom_units::cause(cause)
            )),
            _ => Error::os(doing.to_string(), cause),
        }
    }

    /// Writes the whole file system back to its disk, and waits for it.
    pub fn sync(&self) -> Result<()> {
        syncfs(&self.root).map_err(|e| {
            let doing = format!("syncing the file system of {}", self.path.display());
            self.failed(doing, e)
        })
    }

    /// Returns the names of the files in a directory.
    pub fn list(&self, dir: u16) -> Result<Vec<String>> {
        self.names(self.dir(dir))
            .map_err(|e| Error::os(format!("listing {}", self.path_of_dir(dir).display()), e))
    }

    fn names(&self, dir: BorrowedFd<'_>) -> rustix::io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(dir)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Keeps the tree, and returns its path.
    pub fn keep(&mut self) -> PathBuf {
        self.armed = false;
        self.path.clone()
    }

    /// Removes everything that the run has created. Files of other processes stay.
    pub fn remove(&mut self) -> Result<()> {
        self.armed = false;
        self.remove_all().map_err(|e| match e {
            Errno::NOTEMPTY | Errno::EXIST => Error::Changed(format!(
                "{} cannot be removed: another program has created files there",
                self.path.display()
            )),
            e => Error::os(format!("removing {}", self.path.display()), e),
        })
    }

    fn remove_all(&self) -> rustix::io::Result<()> {
        let mut removed = Ok(());
        for (dir, fd) in (0..).zip(&self.dirs) {
            // Remove as much as possible, even if a directory cannot be removed.
            removed = removed.and(self.remove_dir(dir, fd.as_fd()));
        }
        removed?;
        gone(unlinkat(&self.root, PROBE, AtFlags::empty()))?;
        gone(unlinkat(&self.parent, &self.name, AtFlags::REMOVEDIR))
    }

    fn remove_dir(&self, dir: u16, fd: BorrowedFd<'_>) -> rustix::io::Result<()> {
        // Repeat: reading a directory that changes meanwhile may not return all files at once.
        while self.remove_files(fd)? > 0 {}
        gone(unlinkat(&self.root, dir_name(dir), AtFlags::REMOVEDIR))
    }

    fn remove_files(&self, dir: BorrowedFd<'_>) -> rustix::io::Result<usize> {
        let mut names = self.names(dir)?;
        names.retain(|name| is_file_name(name));
        for name in &names {
            gone(unlinkat(dir, name.as_str(), AtFlags::empty()))?;
        }
        Ok(names.len())
    }

    /// Finds the alignment that direct I/O needs: the size of the smallest write that succeeds.
    fn probe(&self, options: &Options) -> Result<u32> {
        let path = options.dir.display();
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW;
        let flags = flags | OFlags::CLOEXEC | OFlags::DIRECT;
        let file = openat(&self.root, PROBE, flags, Mode::RUSR | Mode::WUSR);
        let no_direct = || Error::Options(format!("{path} has no direct I/O: use --buffered"));
        let file = file.map_err(|e| match e {
            Errno::INVAL => no_direct(),
            e => self.failed(format_args!("making a file in {path}"), e),
        })?;
        let mut memory = Memory::new(LARGEST_ALIGN as usize, 0);
        let mut align = SECTOR;
        while let Err(e) = pwrite(&file, &memory.get()[..align as usize], 0) {
            match e {
                Errno::INVAL if align < LARGEST_ALIGN => align *= 2,
                Errno::INVAL => return Err(no_direct()),
                e => return Err(self.failed(format_args!("writing to a file in {path}"), e)),
            }
        }
        let _ = unlinkat(&self.root, PROBE, AtFlags::empty());
        if !options.bs.is_multiple_of(align) {
            return Err(Error::Options(format!(
                "--bs must be a multiple of {align}: {path} has no smaller direct I/O"
            )));
        }
        Ok(align)
    }

    /// Rejects a run whose files do not fit into the file system, if the file system reports its
    /// free space.
    fn check_room(&self, options: &Options) -> Result<()> {
        let room = fstatvfs(&self.root).map_err(|e| {
            let doing = format!("asking for the room in {}", options.dir.display());
            Error::os(doing, e)
        })?;
        let block = room.f_frsize.clamp(u64::from(SECTOR), 1 << 20);
        let sizes = model::first_files(options, self.align).map(|f| u64::from(f.size));
        let needed: u64 = sizes.map(|size| size.next_multiple_of(block)).sum();
        let free = room.f_bavail.saturating_mul(block);
        let files = u64::from(options.files) + u64::from(options.dirs);
        let too_few = room.f_files > 0 && room.f_favail < files;
        if (room.f_blocks == 0 || needed <= free) && !too_few {
            return Ok(());
        }
        Err(Error::Full(format!(
            "{} has room for {} files and {} MiB; {files} files of {} MiB are asked for: --files \
             and --scale make them fewer",
            options.dir.display(),
            room.f_favail,
            free >> 20,
            needed.div_ceil(1 << 20),
        )))
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        if self.armed {
            let _ = self.remove_all();
        }
    }
}

/// Treats ENOENT as success, because another process may have removed the file first.
fn gone(result: rustix::io::Result<()>) -> rustix::io::Result<()> {
    match result {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    }
}

/// Creates a directory with an unused name.
fn make_root(parent: &OwnedFd, path: &Path) -> Result<(String, OwnedFd)> {
    let mut number = 0;
    loop {
        let name = format!("fathom-bench.{}.{number}", std::process::id());
        match make_dir(parent, &name) {
            Ok(root) => return Ok((name, root)),
            Err(Errno::EXIST) if number < NAMES => number += 1,
            Err(e) => {
                let doing = format!("cannot make a directory in {}", path.display());
                return Err(Error::os(doing, e));
            }
        }
    }
}

fn make_dir(parent: &OwnedFd, name: &str) -> rustix::io::Result<OwnedFd> {
    mkdirat(parent, name, Mode::RWXU)?;
    openat(parent, name, DIRECTORY, Mode::empty())
}

fn dir_name(dir: u16) -> String {
    format!("d{dir:03}")
}

/// Returns the name of a file in its directory.
pub fn file_name(id: u64) -> String {
    format!("f{id:08}")
}

/// Returns whether a run may have created a file with this name.
fn is_file_name(name: &str) -> bool {
    let digits = name.strip_prefix('f').unwrap_or_default();
    digits.len() >= 8 && digits.bytes().all(|b| b.is_ascii_digit())
}
