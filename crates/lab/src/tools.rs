//! A read-only disk with the host's own programs for the guest: fio, mkfs and their libraries.

use std::collections::BTreeSet;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Context, Error, Result};
use crate::host;

/// Programs that guests get in /usr/bin, beyond busybox: (the host's name, the guest's). Where
/// busybox has a command of the same name its shell prefers its own, unless the path is given.
const PROGRAMS: &[(&str, &str)] = &[
    ("fio", "fio"),
    ("mke2fs", "mkfs.ext4"),
    ("e2fsck", "fsck.ext4"),
    ("blkdiscard", "blkdiscard"),
];
const CONFIGURATION: &[&str] = &["/etc/mke2fs.conf"];
/// Changes when the layout of the image does.
const LAYOUT: u32 = 3;

/// The image, made when it is not in the cache yet. It is named by what is in it, so that an
/// updated fio makes a new one.
///
/// # Errors
/// When a program is missing or the image cannot be made.
pub fn image() -> Result<PathBuf> {
    let files = contents()?;
    let cache = cache_dir()?;
    let path = cache.join(format!("tools-{:016x}.img", key(&files)?));
    if !path.exists() {
        make(&files, &cache, &path)?;
        remove_older(&cache, &path);
    }
    Ok(path)
}

fn cache_dir() -> Result<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
        .join("fathom");
    fs::create_dir_all(&cache).context(|| format!("cannot create {}", cache.display()))?;
    Ok(cache)
}

/// The programs and every library they load, as (host path, path in the image).
fn contents() -> Result<BTreeSet<(PathBuf, PathBuf)>> {
    let mut files = BTreeSet::new();
    for (name, guest_name) in PROGRAMS {
        let program = host::program(name)?;
        for library in libraries(&program)? {
            files.insert((library.clone(), in_image(&library)));
        }
        files.insert((program, Path::new("usr/bin").join(guest_name)));
    }
    for path in CONFIGURATION.iter().map(PathBuf::from) {
        files.insert((path.clone(), in_image(&path)));
    }
    Ok(files)
}

fn in_image(path: &Path) -> PathBuf {
    path.strip_prefix("/").unwrap_or(path).to_owned()
}

fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let text = host::run("ldd", &[&program.to_string_lossy()])?;
    Ok(parse_ldd(&text))
}

/// Lines are "name => path (address)" or, for the loader, "path (address)"; the vdso has no path.
fn parse_ldd(text: &str) -> Vec<PathBuf> {
    text.lines()
        .filter_map(|line| {
            let target = line.split_once("=>").map_or(line, |(_, path)| path).trim();
            let path = target.split(" (").next()?.trim();
            path.starts_with('/').then(|| PathBuf::from(path))
        })
        .collect()
}

fn key(files: &BTreeSet<(PathBuf, PathBuf)>) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    LAYOUT.hash(&mut hasher);
    for (path, _) in files {
        let meta = fs::metadata(path).context(|| format!("cannot read {}", path.display()))?;
        (path, meta.len(), meta.mtime(), meta.mtime_nsec()).hash(&mut hasher);
    }
    Ok(hasher.finish())
}

fn make(files: &BTreeSet<(PathBuf, PathBuf)>, cache: &Path, path: &Path) -> Result<()> {
    let stage = tempfile::tempdir_in(cache).context(|| "cannot create a directory".into())?;
    let root = stage.path().join("root");
    let mut bytes = 0;
    for (from, to) in files {
        let to = root.join(to);
        let dir = to.parent().unwrap_or(&root);
        fs::create_dir_all(dir).context(|| format!("cannot create {}", dir.display()))?;
        bytes += fs::copy(from, &to).context(|| format!("cannot copy {}", from.display()))?;
    }
    for dir in ["lib", "lib64", "usr/lib", "usr/sbin", "etc"] {
        fs::create_dir_all(root.join(dir)).context(|| format!("cannot create {dir}"))?;
    }
    // Ready under its own name only when complete: two labs may start at once.
    let unfinished = stage.path().join("image");
    let kib = (bytes / 1024) * 11 / 10 + 8 * 1024;
    let output = Command::new(host::program("mke2fs")?)
        .args([
            "-q",
            "-F",
            "-t",
            "ext4",
            "-O",
            "^has_journal",
            "-m",
            "0",
            "-d",
        ])
        .arg(&root)
        .arg(&unfinished)
        .arg(format!("{kib}k"))
        .output()
        .context(|| "cannot run mke2fs".into())?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Error::Unusable {
            path: unfinished,
            reason,
        });
    }
    fs::rename(&unfinished, path).context(|| format!("cannot create {}", path.display()))
}

fn remove_older(cache: &Path, keep: &Path) {
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.path() != keep && name.starts_with("tools-") && name.ends_with(".img") {
            let _ = fs::remove_file(entry.path()); // only saves space
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldd_lines_of_every_kind() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                    \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let paths: Vec<_> = parse_ldd(text)
            .iter()
            .map(|p| p.display().to_string())
            .collect();
        assert_eq!(
            paths,
            [
                "/lib/x86_64-linux-gnu/libc.so.6",
                "/lib64/ld-linux-x86-64.so.2"
            ]
        );
        assert!(parse_ldd("\tnot a dynamic executable\n").is_empty());
    }
}
