//! The directory of the persistent disks' definitions: for each disk a file `NAME.toml`, with the
//! keys of a `[[disk]]`.
//!
//! A file is complete or absent, even if the process or the machine stops at any time: a new file
//! is written under another name, synced, and renamed.

use fathom_control::Found;
use fathom_spec::{DiskSpec, check_name, read_definition, stem};
use fathom_units::cause;
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Prefix of the names of incomplete files. The next server removes the files of a server that was
/// killed.
const UNFINISHED: &str = ".unfinished";

/// The directory, which is locked against other servers while this value exists.
pub struct KeptDisks {
    path: PathBuf,
    dir: File,
}

impl KeptDisks {
    /// Opens and locks the directory, and creates it if it is missing. The error is one line for
    /// the user.
    pub fn open(path: &Path) -> Result<KeptDisks, String> {
        let failed =
            |what| move |error: io::Error| format!("{}: {what}: {}", path.display(), cause(error));
        match fs::DirBuilder::new().mode(0o755).create(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            made => made.map_err(failed("cannot create the directory"))?,
        }
        let dir = File::open(path).map_err(failed("cannot open the directory"))?;
        flock(&dir, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            let path = path.display();
            format!(
                "{path}: another server keeps its disks there; give each server its own disks-dir"
            )
        })?;
        let kept = KeptDisks {
            path: path.to_owned(),
            dir,
        };
        for leftover in kept.files(|name| name.starts_with(UNFINISHED)) {
            fs::remove_file(&leftover).map_err(failed("cannot remove an unfinished file"))?;
        }
        Ok(kept)
    }

    /// Takes over a predecessor's directory, with its lock.
    pub fn adopt(path: PathBuf, dir: OwnedFd) -> KeptDisks {
        let dir = dir.into();
        KeptDisks { path, dir }
    }

    /// Returns what a successor needs: the path, and the directory, which stays locked while any
    /// process has it open.
    pub fn lock(&self) -> io::Result<(PathBuf, OwnedFd)> {
        Ok((self.path.clone(), self.dir.try_clone()?.into()))
    }

    fn files(&self, is_meant: impl Fn(&str) -> bool) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        let meant = entries.filter(|entry| entry.file_name().to_str().is_some_and(&is_meant));
        let mut paths: Vec<_> = meant.map(|entry| entry.path()).collect();
        paths.sort_unstable();
        paths
    }

    /// Reads all definitions, in the order of the files' names.
    pub fn read(&self) -> Found {
        let mut found = Found::default();
        for path in self.files(is_disk_file) {
            match read_definition(&path) {
                Ok(disk) => found.disks.push(disk),
                Err(problem) => {
                    let line = format!("{}{problem}", path.display());
                    found.problems.push((stem(&path).to_owned(), line));
                }
            }
        }
        found
    }

    /// Reads the file of one disk; `None`: there is no such file.
    pub fn read_one(&self, name: &str) -> Result<Option<Box<DiskSpec>>, String> {
        let path = self.path_of(name);
        match fs::metadata(&path) {
            Ok(metadata) if !metadata.is_file() => return Ok(None),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{}: {}", path.display(), cause(error))),
        }
        let disk =
            read_definition(&path).map_err(|problem| format!("{}{problem}", path.display()))?;
        Ok(Some(Box::new(disk)))
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.toml"))
    }

    /// Stores a definition durably. After an error, the file is the old one or the new one, but
    /// never a part.
    pub fn keep(&self, disk: &DiskSpec) -> Result<(), String> {
        let path = self.path_of(&disk.name);
        let failed = |error: io::Error| {
            format!(
                "{}: cannot write the file: {}",
                path.display(),
                cause(error)
            )
        };
        let text = toml::to_string(disk);
        let text = text.map_err(|error| {
            format!(
                "{}: cannot express the disk's options in TOML: {error}",
                path.display()
            )
        })?;
        let file = tempfile::Builder::new()
            .prefix(UNFINISHED)
            .permissions(fs::Permissions::from_mode(0o600))
            .tempfile_in(&self.path);
        let mut file = file.map_err(failed)?;
        file.write_all(text.as_bytes()).map_err(failed)?;
        file.as_file().sync_all().map_err(failed)?;
        file.persist(&path).map_err(|error| failed(error.error))?;
        self.dir.sync_all().map_err(failed)
    }

    /// Removes a disk's definition durably. A missing file is no error.
    pub fn forget(&self, name: &str) -> Result<(), String> {
        let path = self.path_of(name);
        let removed = match fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            other => other,
        };
        let removed = removed.and_then(|()| self.dir.sync_all());
        removed.map_err(|error| {
            format!(
                "{}: cannot remove the file: {}",
                path.display(),
                cause(error)
            )
        })
    }
}

/// Whether a file of this name defines a disk. A name that begins with a dot counts if the rest is
/// a disk's name: such a file is rejected with an error instead of being ignored. (Editors create
/// other names, like `.#a.toml`.)
fn is_disk_file(name: &str) -> bool {
    let Some(stem) = name.strip_suffix(".toml") else {
        return false;
    };
    match stem.strip_prefix('.') {
        Some(rest) => {
            check_name(rest.trim_start_matches('.')).is_ok() && !name.starts_with(UNFINISHED)
        }
        None => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(name: &str, image: &str) -> DiskSpec {
        DiskSpec::new(name.into(), image.parse().unwrap())
    }

    #[test]
    fn what_is_kept_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d");
        let kept = KeptDisks::open(&path).unwrap();
        let mut b = disk("b", "null:1G");
        b.filters = vec!["delay:read=1ms".parse().unwrap()];
        b.size = Some(1 << 40);
        b.export_description = "of the \"first\"\nmachine".into();
        kept.keep(&disk("a", "/srv/a.qcow2")).unwrap();
        kept.keep(&disk("b", "null:2G")).unwrap();
        kept.keep(&b).unwrap();
        kept.keep(&disk("c", "null:1G")).unwrap();
        kept.forget("c").unwrap();
        kept.forget("never").unwrap();
        assert!(KeptDisks::open(&path).is_err(), "two servers have it");
        drop(kept);
        fs::write(path.join(".unfinishedX"), "name = ").unwrap();
        let found = KeptDisks::open(&path).unwrap().read();
        assert_eq!(found.disks, [disk("a", "/srv/a.qcow2"), b]);
        assert!(found.problems.is_empty());
        assert!(!path.join(".unfinishedX").exists());
    }

    #[test]
    fn files_that_cannot_be_used_are_told_one_by_one() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write("good.toml", "image = 'null:1G'");
        write("other.toml", "name = 'good'\nimage = 'null:1G'");
        write("bad.toml", "\nimage = 'null:1G'\nquues = 1");
        write("a b.toml", "image = 'null:1G'");
        write("readme", "not a disk");
        write(".hidden.toml", "image = 'null:1G'");
        write(".#good.toml", "an editor's");
        let found = KeptDisks::open(dir.path()).unwrap().read();
        assert_eq!(found.disks, [disk("good", "null:1G")]);
        let [(_, dot), (_, name), (stem, line), (_, other)] = &found.problems[..] else {
            panic!("{:?}", found.problems);
        };
        assert!(
            dot.contains(".hidden.toml: ") && dot.contains("dot"),
            "{dot}"
        );
        assert!(name.contains("letters"), "{name}");
        assert_eq!(stem, "bad");
        assert!(line.contains("bad.toml:3: unknown key"), "{line}");
        assert!(other.contains("defines disk 'good'"), "{other}");
    }
}
