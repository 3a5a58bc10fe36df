//! Places for disks: directories, block devices, NBD exports.

use crate::mount_table::unescaped;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use fathom_units::short_size;

use crate::error::{Context, Error, Result};

const SCHEMES: [&str; 3] = ["nbd://", "nbd+unix://", "nbd+vsock://"];

/// A place as a user names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    Path(PathBuf),
    /// URI of an NBD export.
    Nbd(String),
}

/// The object that exists at a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    Directory {
        path: PathBuf,
        /// The directory's file system, such as `ext4` or `NFS`.
        kind: String,
    },
    Device(PathBuf),
    /// URI of an NBD export.
    Export(String),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Place, String> {
        match text {
            "" => Err("a place has no name".into()),
            _ if SCHEMES.iter().any(|scheme| text.starts_with(scheme)) => {
                Ok(Place::Nbd(text.to_owned()))
            }
            _ if text.contains("://") => {
                let schemes = SCHEMES.join(", ");
                Err(format!("'{text}' begins with none of {schemes}"))
            }
            _ => Ok(Place::Path(text.into())),
        }
    }
}

impl Place {
    /// Determines what exists at the place. Does not connect to NBD servers.
    ///
    /// # Errors
    /// If nothing exists at the place, or something that cannot hold a disk.
    pub fn find(&self) -> Result<Found> {
        let path = match self {
            Place::Nbd(uri) => return Ok(Found::Export(uri.clone())),
            Place::Path(path) => path,
        };
        let not = |reason: String| Error::Unusable {
            path: path.clone(),
            reason,
        };
        let real = fs::canonicalize(path)
            .map_err(|error| not(format!("{error} (a comma within a name is written as \\,)")))?;
        let kind = fs::metadata(&real).context(|| format!("cannot look at {}", real.display()))?;
        if kind.is_dir() {
            let kind = file_system(&real);
            return Ok(Found::Directory { path: real, kind });
        }
        match kind.file_type().is_block_device() {
            true => Ok(Found::Device(real)),
            false => Err(not("neither a directory nor a block device".into())),
        }
    }
}

impl Found {
    /// Fails if the job would overwrite existing data and `overwrite` is false.
    ///
    /// # Errors
    /// One line that says how to allow it.
    pub fn refuse_data(&self, overwrite: bool) -> Result<()> {
        let what = match self {
            Found::Directory { .. } => return Ok(()), // the job creates new files there
            Found::Device(path) => format!("{} is a device, and", path.display()),
            Found::Export(uri) => format!("{uri} may have data, and"),
        };
        match overwrite {
            true => Ok(()),
            false => Err(Error::Protocol(format!(
                "{what} the job would overwrite its data: if it may, pass --overwrite"
            ))),
        }
    }

    /// Checks that `bytes` fit. The size of an NBD export is not known here and not checked.
    ///
    /// # Errors
    /// If the bytes do not fit, or another user holds the device.
    pub fn check_room(&self, bytes: u64) -> Result<()> {
        let (path, room, holds) = match self {
            Found::Export(_) => return Ok(()),
            Found::Directory { path, .. } => {
                let room = rustix::fs::statvfs(path);
                let room = room.context(|| format!("cannot look at {}", path.display()))?;
                let free = room.f_bavail.saturating_mul(room.f_frsize);
                (path, free, "has room for")
            }
            Found::Device(path) => (path, size_of(path)?, "has"),
        };
        match room >= bytes {
            true => Ok(()),
            false => Err(Error::Unusable {
                path: path.clone(),
                reason: format!(
                    "{holds} {} MiB, and the job needs {}; choose a smaller --size",
                    room >> 20,
                    short_size(bytes)
                ),
            }),
        }
    }
}

/// The place's name in a sentence.
impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Found::Directory { path, kind } => write!(f, "{kind} ({})", path.display()),
            Found::Device(path) => write!(f, "the device {}", path.display()),
            Found::Export(uri) => write!(f, "NBD ({uri})"),
        }
    }
}

/// Returns a device's size. Fails if the device is in use: `O_EXCL` fails if it is mounted.
fn size_of(path: &Path) -> Result<u64> {
    let mut options = OpenOptions::new();
    let opened = options.read(true).custom_flags(libc::O_EXCL).open(path);
    let mut file: File = opened.map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => Error::Unusable {
            path: path.to_owned(),
            reason: "mounted, or used by the kernel otherwise".into(),
        },
        _ => Error::Io {
            what: format!("cannot open {}", path.display()),
            source: error,
        },
    })?;
    let what = || format!("cannot look at {}", path.display());
    file.seek(SeekFrom::End(0)).context(what)
}

/// Returns the type of the file system that contains a path.
fn file_system(path: &Path) -> String {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts = mounts.lines().filter_map(mount);
    let around = mounts.filter(|(point, _)| path.starts_with(point));
    // The last of several mounts at one point covers the others.
    let nearest = around.max_by_key(|(point, _)| point.components().count());
    match nearest.map(|(_, kind)| kind).as_deref() {
        None => "a directory".into(),
        Some("nfs" | "nfs4") => "NFS".into(),
        Some("cifs" | "smb3") => "SMB".into(),
        Some(kind) => kind.to_owned(),
    }
}

/// Parses the mount point and type of a line such as
/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw` (proc_pid_mountinfo(5)).
fn mount(line: &str) -> Option<(PathBuf, String)> {
    let (mount, kind) = line.split_once(" - ")?;
    let point = mount.split(' ').nth(4)?;
    Some((unescaped(point).into(), kind.split(' ').next()?.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(text: &str) -> Place {
        text.parse().unwrap()
    }

    #[test]
    fn places_are_paths_or_exports() {
        assert_eq!(place("/srv"), Place::Path("/srv".into()));
        let uri = "nbd+unix:///?socket=/s";
        assert_eq!(place(uri), Place::Nbd(uri.into()));
        let error = "http://x".parse::<Place>().unwrap_err();
        assert!(
            error.contains("'http://x'") && error.contains("nbd+unix://"),
            "{error}"
        );
        assert!("".parse::<Place>().is_err());
    }

    #[test]
    fn what_is_no_place_for_a_disk_is_told() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let said = |path: &Path| Place::Path(path.to_owned()).find().unwrap_err().to_string();
        assert!(said(file.path()).contains("neither a directory nor a block device"));
        let missing = said(&file.path().with_extension("b"));
        assert!(missing.contains("written as \\,"), "{missing}");
    }

    #[test]
    fn a_directory_is_called_by_its_file_system() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let found = Place::Path(dir.path().to_owned()).find().unwrap();
        // `stat` is the independent reference.
        let kind = crate::host::run("stat", &["-f", "-c", "%T", &dir.path().to_string_lossy()]);
        let kind = kind.unwrap();
        let said = found.to_string();
        let first = said.split(' ').next().unwrap();
        assert!(
            kind.trim().starts_with(first) || kind.contains(&first[..3]),
            "{said}: {kind}"
        );
        assert!(found.check_room(4096).is_ok());
        let error = found.check_room(1 << 60).unwrap_err().to_string();
        assert!(error.contains("smaller --size"), "{error}");
        assert!(found.refuse_data(false).is_ok());
    }

    #[test]
    fn mounts_have_points_and_types() {
        let line = "36 35 98:0 / /a\\040b rw,noatime master:1 - nfs4 host:/x rw";
        assert_eq!(mount(line), Some(("/a b".into(), "nfs4".into())));
        for garbage in ["", " - ", "1 2 3 - x", "1 2 3 4 5 6"] {
            let found = mount(garbage);
            assert!(found.is_none(), "{garbage}: {found:?}");
        }
    }

    #[test]
    fn data_is_overwritten_only_if_somebody_says_so() {
        for (found, words) in [
            (Found::Device("/dev/x".into()), "/dev/x is a device"),
            (Found::Export("nbd://h".into()), "nbd://h may have data"),
        ] {
            let error = found.refuse_data(false).unwrap_err().to_string();
            assert!(
                error.contains(words) && error.ends_with("pass --overwrite"),
                "{error}"
            );
            assert!(found.refuse_data(true).is_ok());
        }
    }
}
