//! Builds ext4 images from lists of files. Images are cached under a name that has a hash of their
//! contents.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Context, Error, Result};
use crate::scratch::Scratch;
use crate::{host, libraries};

/// Version of the image layout. Increase it when images are built differently.
const LAYOUT: u32 = 4;

#[derive(Debug)]
enum Entry {
    /// A copy of a file of the host.
    Copy(PathBuf),
    /// An executable script with this text.
    Script(&'static str),
    Link(PathBuf),
    Dir,
}

/// Contents of an image, by paths within the image.
#[derive(Debug, Default)]
pub struct Contents {
    entries: BTreeMap<PathBuf, Entry>,
}

impl Contents {
    /// Adds a file of the host at the same path.
    pub fn file(&mut self, path: &Path) {
        self.file_as(path, path);
    }

    /// Adds a file of the host at another path.
    pub fn file_as(&mut self, from: &Path, to: &Path) {
        self.insert(to, Entry::Copy(from.to_owned()));
    }

    /// Adds a program at `to`, and its libraries at the same paths as on the host.
    ///
    /// # Errors
    /// When the program cannot be read or a library is missing.
    pub fn program(&mut self, from: &Path, to: &Path) -> Result<()> {
        self.libraries(from)?;
        self.file_as(from, to);
        Ok(())
    }

    /// Adds the libraries of a program at the same paths as on the host.
    ///
    /// # Errors
    /// When the program cannot be read or a library is missing.
    pub fn libraries(&mut self, program: &Path) -> Result<()> {
        for library in libraries::of(program)? {
            self.file(&library);
        }
        Ok(())
    }

    /// Adds an executable script.
    pub fn script(&mut self, to: &str, text: &'static str) {
        self.insert(Path::new(to), Entry::Script(text));
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, at: &str, target: &str) {
        self.insert(Path::new(at), Entry::Link(PathBuf::from(target)));
    }

    /// Adds a directory. The parents of files need not be added.
    pub fn dir(&mut self, path: &str) {
        self.insert(Path::new(path), Entry::Dir);
    }

    fn insert(&mut self, to: &Path, entry: Entry) {
        let to = to.strip_prefix("/").unwrap_or(to);
        self.entries.insert(to.to_owned(), entry);
    }

    /// Returns the path of the cached image. If it does not exist, creates it and removes older
    /// images of the same name.
    ///
    /// # Errors
    /// When a file cannot be read or the image cannot be made.
    pub fn cached(&self, name: &str) -> Result<PathBuf> {
        let cache = host::cache_dir()?;
        let path = cache.join(format!("{name}-{:016x}.img", self.key()?));
        if !path.exists() {
            // The image gets its final name only when complete, because two labs may start at once.
            let stage = Scratch::within(&cache)?;
            let unfinished = stage.path().join("image");
            self.make(stage.path(), &unfinished)?;
            fs::rename(&unfinished, &path)
                .context(|| format!("cannot create {}", path.display()))?;
            remove_older(&cache, name, &path);
        }
        Ok(path)
    }

    /// Writes the image. `scratch` temporarily holds a copy of all its contents.
    ///
    /// # Errors
    /// When a file cannot be read or the image cannot be made.
    pub fn make(&self, scratch: &Path, image: &Path) -> Result<()> {
        let root = scratch.join("root");
        fs::create_dir_all(&root).context(|| format!("cannot create {}", root.display()))?;
        let mut bytes = 0;
        for (to, entry) in &self.entries {
            bytes += place(entry, &root.join(to))?;
        }
        let kib = (bytes / 1024) * 11 / 10 + 8 * 1024;
        make_ext4(image, Some(&root), kib)
    }

    /// Returns a hash that changes whenever the image must be rebuilt.
    fn key(&self) -> Result<u64> {
        let mut hasher = DefaultHasher::new();
        LAYOUT.hash(&mut hasher);
        for (to, entry) in &self.entries {
            to.hash(&mut hasher);
            match entry {
                Entry::Copy(from) => {
                    let meta =
                        fs::metadata(from).context(|| format!("cannot read {}", from.display()))?;
                    (from, meta.len(), meta.mtime(), meta.mtime_nsec()).hash(&mut hasher);
                }
                Entry::Script(text) => text.hash(&mut hasher),
                Entry::Link(target) => target.hash(&mut hasher),
                Entry::Dir => {}
            }
        }
        Ok(hasher.finish())
    }
}

/// Copies an entry into the folder from which the image is built, and returns its size in bytes.
fn place(entry: &Entry, to: &Path) -> Result<u64> {
    let what = || format!("cannot create {}", to.display());
    let dir = if matches!(entry, Entry::Dir) {
        Some(to)
    } else {
        to.parent()
    };
    if let Some(dir) = dir {
        fs::create_dir_all(dir).context(what)?;
    }
    match entry {
        Entry::Copy(from) => {
            fs::copy(from, to).context(|| format!("cannot copy {}", from.display()))
        }
        Entry::Script(text) => {
            fs::write(to, text).context(what)?;
            fs::set_permissions(to, fs::Permissions::from_mode(0o755)).context(what)?;
            Ok(text.len() as u64)
        }
        Entry::Link(target) => symlink(target, to).context(what).map(|()| 0),
        Entry::Dir => Ok(0),
    }
}

/// Creates an ext4 file system of `kib` KiB in the file `image`, with the files of `root`.
///
/// # Errors
/// When mke2fs is missing or fails, for example because the disk is full.
pub fn make_ext4(image: &Path, root: Option<&Path>, kib: u64) -> Result<()> {
    let mut command = Command::new(host::program("mke2fs")?);
    command.args(["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0"]);
    if let Some(root) = root {
        command.arg("-d").arg(root);
    }
    let output = command
        .arg(image)
        .arg(format!("{kib}k"))
        .output()
        .context(|| "cannot run mke2fs".into())?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::Unusable {
        path: image.to_owned(),
        reason: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

fn remove_older(cache: &Path, name: &str, keep: &Path) {
    let prefix = format!("{name}-");
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        let file = entry.file_name().to_string_lossy().into_owned();
        if entry.path() != keep && file.starts_with(&prefix) && file.ends_with(".img") {
            let _ = fs::remove_file(entry.path()); // only saves space
        }
    }
}

/// Creates a sparse file of that size and replaces an existing one.
///
/// # Errors
/// When the file cannot be created.
pub fn sparse(path: &Path, bytes: u64) -> Result<()> {
    let what = || format!("cannot create {}", path.display());
    File::create(path)
        .context(what)?
        .set_len(bytes)
        .context(what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_holds_what_was_added() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        fs::write(&source, "some text").unwrap();
        let mut contents = Contents::default();
        contents.file_as(&source, Path::new("/etc/file"));
        contents.script("bin/run", "#!/bin/sh\n");
        contents.link("bin/again", "run");
        contents.dir("empty/place");
        let image = dir.path().join("image");
        contents.make(dir.path(), &image).unwrap();

        // The oracle is e2fsprogs' own reader.
        let image = image.to_string_lossy();
        let ask = |request: &str| host::run("debugfs", &["-R", request, &image]).unwrap();
        assert_eq!(ask("cat /etc/file"), "some text");
        assert!(ask("stat /bin/run").contains("0755"));
        assert!(ask("stat /bin/again").contains("Fast link dest: \"run\""));
        assert!(ask("stat /empty/place").contains("Type: directory"));
    }

    #[test]
    fn the_name_follows_the_contents() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        fs::write(&source, "1").unwrap();
        let mut contents = Contents::default();
        contents.file(&source);
        let first = contents.key().unwrap();
        assert_eq!(contents.key().unwrap(), first);
        fs::write(&source, "12").unwrap();
        let second = contents.key().unwrap();
        assert_ne!(second, first);
        contents.dir("more");
        assert_ne!(contents.key().unwrap(), second);
    }
}
