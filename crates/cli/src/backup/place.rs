//! The place that a backup is written to.

use anyhow::{Context, anyhow, bail};
use fathom_files::lock;
use fathom_img::{self as img, Format};
use fathom_storage::Location;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// The place that a backup is written to.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    /// A file. While it is incomplete, it has the name `part`, which no other process uses.
    File { file: PathBuf, part: PathBuf },
    /// An image on Ceph, which the backup creates.
    New(OsString),
    /// An existing disk of an NBD server, which the backup overwrites.
    Over(OsString),
    /// An image in an archive. Images of an archive share their stripes.
    Archive { archive: String, name: String },
}

impl Place {
    /// Parses a user's target for a copy in `format`.
    pub(super) fn named(text: &OsStr, format: Format) -> anyhow::Result<Place> {
        let named = Location::parse(text);
        let location = named.map_err(|error| anyhow!("{}: {error}", text.display()))?;
        if let Some(path) = location.path() {
            return Place::file(path);
        }
        let what = location.kind().what;
        match location.kind().name {
            "rbd" => Ok(Place::New(text.to_owned())),
            "nbd" if format == Format::Raw => Ok(Place::Over(text.to_owned())),
            "nbd" => bail!("{location}: {what} is a raw disk; use -O raw"),
            _ => bail!("{location}: {what} cannot hold a backup"),
        }
    }

    /// Returns the place of a file. If the path is a symbolic link, its target is replaced.
    pub(super) fn file(path: &Path) -> anyhow::Result<Place> {
        let file = real(path);
        let Some(name) = file.file_name() else {
            bail!("{}: not the name of a file", file.display());
        };
        if fs::metadata(&file).is_ok_and(|now| !now.is_file()) {
            bail!("{}: exists, and is not a regular file", file.display());
        }
        let mut name = name.to_owned();
        name.push(format!(".{}.part", std::process::id()));
        let part = file.with_file_name(name);
        Ok(Place::File { file, part })
    }

    /// Returns the place of an image in an archive.
    pub(super) fn archive(archive: &str, name: &OsStr) -> anyhow::Result<Place> {
        let name = name.to_str();
        let name = name
            .context("the name of an image in an archive must be UTF-8")?
            .to_owned();
        let archive = archive.to_owned();
        Ok(Place::Archive { archive, name })
    }

    /// Returns the name of the place for messages.
    pub(super) fn shown(&self) -> String {
        match self {
            Place::File { file, .. } => file.display().to_string(),
            Place::New(text) | Place::Over(text) => text.display().to_string(),
            Place::Archive { archive, name } => format!("{archive}: {name}"),
        }
    }

    /// Returns the file or location to write to; for an archive, the name of the image.
    pub(super) fn target(&self) -> &OsStr {
        match self {
            Place::File { part, .. } => part.as_os_str(),
            Place::New(text) | Place::Over(text) => text,
            Place::Archive { name, .. } => OsStr::new(name),
        }
    }

    /// Whether the target exists and is overwritten.
    pub(super) fn is_there(&self) -> bool {
        matches!(self, Place::Over(_))
    }

    /// Fails if the file to be replaced exists and is in use as a disk.
    pub(super) fn refuse_in_use(&self) -> anyhow::Result<()> {
        let Place::File { file, .. } = self else {
            return Ok(());
        };
        let Ok(now) = File::open(file) else {
            return Ok(());
        };
        let how = lock::Use {
            writes: true,
            share: false,
        };
        lock::check(file, &now, how).map_err(|error| anyhow!("{}: {error}", file.display()))
    }

    /// Creates the target if it must be new.
    ///
    /// Afterwards the caller must [discard](Place::discard) the place unless the backup succeeds.
    pub(super) fn begin(&self) -> anyhow::Result<()> {
        match self {
            Place::New(_) => match self.location()?.create()? {
                true => Ok(()),
                false => bail!(
                    "{}: exists already; choose another name",
                    self.target().display()
                ),
            },
            Place::File { .. } | Place::Over(_) | Place::Archive { .. } => Ok(()),
        }
    }

    fn location(&self) -> anyhow::Result<Location> {
        Location::parse(self.target()).map_err(anyhow::Error::msg)
    }

    /// Gives the complete backup its final name, durably.
    pub(super) fn put(&self, may_replace: bool) -> anyhow::Result<()> {
        let Place::File { file, part } = self else {
            return Ok(());
        };
        let failed = || format!("{}: cannot be put there", file.display());
        let flags = match may_replace {
            true => RenameFlags::empty(),
            false => RenameFlags::NOREPLACE,
        };
        renameat_with(CWD, part, CWD, file, flags).with_context(failed)?;
        let dir = or_here(file.parent().unwrap_or(Path::new("")));
        let dir = File::open(dir).and_then(|dir| dir.sync_all());
        dir.with_context(failed)
    }

    /// Removes an incomplete backup. A disk of an NBD server keeps the partial copy.
    pub(super) fn discard(&self) {
        match self {
            Place::File { part, .. } => drop(fs::remove_file(part)),
            Place::New(_) => {
                let removed = self.location().and_then(|there| Ok(there.remove()?));
                if let Err(error) = removed {
                    eprintln!("fathom: {}", img::shown(&format!("{error:#}")));
                }
            }
            Place::Over(_) | Place::Archive { .. } => {}
        }
    }
}

/// Resolves symbolic links; the file itself need not exist.
pub(super) fn real(file: &Path) -> PathBuf {
    let named = || {
        let dir = fs::canonicalize(or_here(file.parent()?)).ok()?;
        Some(dir.join(file.file_name()?))
    };
    let found = fs::canonicalize(file).ok().or_else(named);
    found.unwrap_or_else(|| file.to_owned())
}

pub(super) fn or_here(dir: &Path) -> &Path {
    match dir.as_os_str().is_empty() {
        true => Path::new("."),
        false => dir,
    }
}
