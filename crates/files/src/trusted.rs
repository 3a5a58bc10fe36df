//! Opens files for less privileged processes, without following symbolic links that they could have
//! placed.
//!
//! A link in a directory of a less privileged user must not lead a privileged process to another
//! file. Links that belong to root or to this process's user are followed: `/dev/disk/by-id`, for
//! example, names devices by such links.

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, openat, openat2, readlinkat, statat,
};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

/// Maximum number of links that are followed, as in the kernel.
const MAX_LINKS: usize = 40;

/// Opens `path` with O_PATH, which has no side effects on the file.
pub fn open_path(path: &Path) -> io::Result<OwnedFd> {
    let no_links = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match openat2(
        CWD,
        path,
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
        no_links,
    ) {
        Err(Errno::LOOP) => walk(path),
        opened => Ok(opened?),
    }
}

/// Opens a `path` with links in it, component by component.
fn walk(path: &Path) -> io::Result<OwnedFd> {
    let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let start = |path: &Path| -> io::Result<OwnedFd> {
        let start = if path.is_absolute() { "/" } else { "." };
        Ok(openat(CWD, start, directory, Mode::empty())?)
    };
    let mut at = start(path)?;
    let mut left = components(path);
    let mut links = 0;
    while let Some(name) = left.pop_front() {
        match enter(at.as_fd(), &name, left.is_empty())? {
            Found::File(file) => at = file,
            Found::Link(target) => {
                links += 1;
                if links > MAX_LINKS {
                    return Err(Errno::LOOP.into());
                }
                let target = Path::new(&target);
                if target.is_absolute() {
                    at = start(target)?;
                }
                for name in components(target).into_iter().rev() {
                    left.push_front(name);
                }
            }
        }
    }
    Ok(at)
}

fn components(path: &Path) -> VecDeque<OsString> {
    let names = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    names.collect()
}

enum Found {
    File(OwnedFd),
    /// A link that may be followed, and its target.
    Link(OsString),
}

fn enter(dir: BorrowedFd<'_>, name: &OsStr, is_last: bool) -> io::Result<Found> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    if !is_last {
        // The suffix `/.` triggers an automount.
        let mut inside = name.to_owned();
        inside.push("/.");
        match openat2(
            dir,
            &inside,
            flags,
            Mode::empty(),
            ResolveFlags::NO_SYMLINKS,
        ) {
            Err(Errno::LOOP) => {}
            opened => return Ok(Found::File(opened?)),
        }
    }
    let file = openat(dir, name, flags | OFlags::NOFOLLOW, Mode::empty())?;
    let meta = statat(&file, "", AtFlags::EMPTY_PATH)?;
    if FileType::from_raw_mode(meta.st_mode) != FileType::Symlink {
        return Ok(Found::File(file));
    }
    let own = rustix::process::geteuid().as_raw();
    if ![0, own].contains(&meta.st_uid) {
        return Err(io::Error::other(format!(
            "symbolic link '{}' belongs to user {}, so it is not followed",
            name.to_string_lossy().escape_debug(),
            meta.st_uid
        )));
    }
    let target = readlinkat(&file, "", Vec::new())?;
    Ok(Found::Link(OsStr::from_bytes(target.as_bytes()).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::io::Read;
    use std::os::unix::fs::{lchown, symlink};

    fn content(path: &Path) -> io::Result<String> {
        let file = open_path(path)?;
        let mut text = String::new();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        File::open(path)?.read_to_string(&mut text)?;
        Ok(text)
    }

    #[test]
    fn own_links_are_followed_as_the_kernel_follows_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::create_dir_all(path("a/b")).unwrap();
        fs::write(path("a/b/file"), "text").unwrap();
        symlink("b", path("a/relative")).unwrap();
        symlink(path("a"), path("absolute")).unwrap();
        symlink("../absolute/relative/file", path("a/last")).unwrap();
        symlink("loop", path("loop")).unwrap();
        symlink("nothing", path("dangling")).unwrap();
        for name in [
            "a/b/file",
            "a/relative/file",
            "absolute/b/file",
            "absolute/relative/../b/./file",
            "a/last",
        ] {
            assert_eq!(content(&path(name)).unwrap(), "text", "{name}");
        }
        let errno = |name| content(&path(name)).unwrap_err().raw_os_error();
        assert_eq!(errno("loop"), Some(libc::ELOOP));
        assert_eq!(errno("dangling"), Some(libc::ENOENT));
        assert_eq!(errno("a/b/file/more"), Some(libc::ENOTDIR));
        assert_eq!(errno("absolute/b/file/more"), Some(libc::ENOTDIR));
    }

    #[test]
    fn links_of_others_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::create_dir(path("secret")).unwrap();
        fs::write(path("secret/file"), "text").unwrap();
        symlink("secret", path("dir")).unwrap();
        symlink("secret/file", path("file")).unwrap();
        // Only root can give a link away. Other users check that a link of root is followed.
        if !rustix::process::geteuid().is_root() {
            assert!(open_path(Path::new("/proc/self/root")).is_ok());
            return;
        }
        for name in ["dir", "file"] {
            lchown(path(name), Some(4_000_000), None).unwrap();
        }
        for name in ["dir/file", "file"] {
            let error = content(&path(name)).unwrap_err().to_string();
            assert!(error.contains("user 4000000"), "{error}");
        }
        assert_eq!(content(&path("secret/file")).unwrap(), "text");
    }
}
