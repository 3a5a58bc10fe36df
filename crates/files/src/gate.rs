//! Opens files and connections, directly or through a gate.
//!
//! A process without the necessary permissions [installs](install) a gate: a more privileged
//! process, which checks each request.

use crate::trusted;
use fathom_units::cause;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::{File, OpenOptions, metadata, read_link};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// A resource outside of the process, for which the process gets a file descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wanted {
    /// The regular file or block device at `path`.
    Image {
        /// Path of the file or block device.
        path: PathBuf,
        /// Whether to open the file for writing, too.
        write: bool,
    },
    /// A file of any type at `path`, opened with O_PATH for inspection only.
    Place {
        /// Path of the file.
        path: PathBuf,
    },
    /// A new open file description of a file that is already open.
    Again {
        /// Whether to open the file for writing, too.
        write: bool,
    },
    /// A file to append to, created if it does not exist.
    Append {
        /// Path of the file.
        path: PathBuf,
    },
    /// A file that only this program uses, opened for reading and writing, created if it does not
    /// exist.
    Record {
        /// Path of the file.
        path: PathBuf,
    },
    /// A new file without a name, in `dir`.
    Unnamed {
        /// Directory whose file system holds the new file.
        dir: PathBuf,
    },
    /// A file that a layer of `image` refers to as `name`, opened for reading.
    ///
    /// The file must be below the directory of `image`, or below one of the directories in `more`.
    Named {
        /// Path of the disk's own image.
        image: PathBuf,
        /// Permitted directories in addition to the directory of `image`.
        more: Vec<PathBuf>,
        /// Path of the image in the backing chain that contains `name`.
        layer: PathBuf,
        /// Name as it is written in `layer`, which need not be UTF-8.
        name: Vec<u8>,
    },
    /// A connection to an NBD server.
    Server {
        /// URI of the server's export.
        uri: String,
        /// Timeout for connecting, in milliseconds. The gate may use a shorter one.
        patience_ms: u64,
    },
    /// A file that a client of this NBD server needs for TLS.
    Certificates {
        /// URI of the server's export, which determines the files that the client may read.
        uri: String,
        /// Path of the certificate or key.
        path: PathBuf,
    },
    /// A connection to the process that caches a base image.
    Base {
        /// Location from which the image is fetched, as users write it.
        remote: String,
    },
    /// A new trace file with this number of rings.
    Trace {
        /// Path of the trace file.
        path: PathBuf,
        /// Name of the traced disk.
        disk: String,
        /// Number of rings: one for each worker of the disk.
        rings: usize,
    },
    /// The socket to which a disk's front-ends connect.
    FrontEnds {
        /// Name of the disk.
        disk: String,
    },
}

/// Describes the resource for messages.
impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wanted::Image { path, write: true } => write!(f, "image {}, to write", path.display()),
            Wanted::Image { path, .. } => write!(f, "image {}", path.display()),
            Wanted::Place { path } | Wanted::Append { path } | Wanted::Record { path } => {
                write!(f, "file {}", path.display())
            }
            Wanted::Again { .. } => f.write_str("an open file"),
            Wanted::Unnamed { dir } => write!(f, "a file in {}", dir.display()),
            Wanted::Named { layer, name, .. } => {
                let name = String::from_utf8_lossy(name);
                write!(f, "file '{name}', which {} names", layer.display())
            }
            Wanted::Server { uri, .. } => write!(f, "NBD server {uri}"),
            Wanted::Certificates { path, .. } => write!(f, "certificates {}", path.display()),
            Wanted::Base { remote } => write!(f, "base image {remote}"),
            Wanted::Trace { path, .. } => write!(f, "trace {}", path.display()),
            Wanted::FrontEnds { disk } => write!(f, "the socket of disk '{disk}'"),
        }
    }
}

/// An opened resource.
#[derive(Debug)]
pub struct Got {
    /// Descriptor of the opened file or socket.
    pub file: OwnedFd,
    /// The path of a file that was found by searching. For a [`Wanted::Place`], its lasting
    /// identity as text.
    pub path: Option<PathBuf>,
}

/// Why a resource was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// The system's error number, if the system refused.
    pub errno: Option<i32>,
    /// One-line message for the user.
    pub text: String,
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Refused {
        Refused {
            errno: error.raw_os_error(),
            text: cause(error),
        }
    }
}

impl From<Refused> for io::Error {
    fn from(refused: Refused) -> io::Error {
        match refused.errno {
            Some(errno) => io::Error::from_raw_os_error(errno),
            None => io::Error::other(refused.text),
        }
    }
}

/// A more privileged process that opens resources for this one.
pub trait Gate: Send + Sync {
    /// Opens a resource. `with` is the file of a [`Wanted::Again`].
    fn get(&self, wanted: &Wanted, with: Option<BorrowedFd<'_>>) -> Result<Got, Refused>;
}

static GATE: OnceLock<Arc<dyn Gate>> = OnceLock::new();

/// Routes all requests through `gate` from now on. Only the first call has an effect.
pub fn install(gate: Arc<dyn Gate>) {
    let _ = GATE.set(gate);
}

/// Returns the gate. `None` means that this process opens everything itself.
pub fn other() -> Option<&'static dyn Gate> {
    GATE.get().map(|gate| &**gate)
}

/// Opens a resource that [`Wanted::fulfil`] supports, through the gate if there is one.
fn get(wanted: &Wanted, with: Option<BorrowedFd<'_>>) -> io::Result<OwnedFd> {
    match other() {
        Some(gate) => Ok(gate.get(wanted, with)?.file),
        None => wanted.fulfil(with),
    }
}

/// Opens an image file. An error without an error number says what is wrong with the file.
pub fn open_image(path: &Path, write: bool) -> io::Result<File> {
    let path = path.to_owned();
    get(&Wanted::Image { path, write }, None).map(File::from)
}

/// Opens an open file once more, for reading and, with `write`, for writing.
pub fn open_again(file: &File, write: bool) -> io::Result<File> {
    get(&Wanted::Again { write }, Some(file.as_fd())).map(File::from)
}

/// Opens `path` with O_PATH, for inspection only.
pub fn place(path: &Path) -> io::Result<File> {
    let path = path.to_owned();
    get(&Wanted::Place { path }, None).map(File::from)
}

/// Returns the path without symbolic links.
pub fn real_path(path: &Path) -> io::Result<PathBuf> {
    read_link(own_path(&place(path)?))
}

/// Opens a file to append to, and creates the file if it does not exist.
pub fn append(path: &Path) -> io::Result<File> {
    let path = path.to_owned();
    get(&Wanted::Append { path }, None).map(File::from)
}

/// Opens a file that only this program uses, for reading and writing.
///
/// Creates the file durably if it does not exist; its directory must exist.
pub fn record(path: &Path) -> io::Result<File> {
    let path = path.to_owned();
    get(&Wanted::Record { path }, None).map(File::from)
}

/// Opens a file that a client of this NBD server needs for TLS.
pub fn certificates(uri: &str, path: &Path) -> io::Result<File> {
    let (uri, path) = (uri.to_owned(), path.to_owned());
    get(&Wanted::Certificates { uri, path }, None).map(File::from)
}

/// Creates a file without a name in `dir`, which disappears when it is closed.
pub fn unnamed(dir: &Path) -> io::Result<File> {
    let dir = dir.to_owned();
    get(&Wanted::Unnamed { dir }, None).map(File::from)
}

impl Wanted {
    /// Opens the resource with this process's permissions.
    ///
    /// Does not support `Named`, `Server`, `Base`, `Trace` and `FrontEnds`.
    pub fn fulfil(&self, with: Option<BorrowedFd<'_>>) -> io::Result<OwnedFd> {
        let file = match self {
            Wanted::Image { path, write } => {
                let found = read_options(false).custom_flags(libc::O_PATH).open(path)?;
                open_disk(&found, *write)
            }
            Wanted::Place { path } => read_options(false).custom_flags(libc::O_PATH).open(path),
            Wanted::Again { write } => {
                let file = with.ok_or(io::ErrorKind::InvalidInput)?;
                refuse_more(file, *write)?;
                open_disk(&file, *write)
            }
            Wanted::Certificates { path, .. } => read_options(false).open(path),
            Wanted::Append { path } => OpenOptions::new().append(true).create(true).open(path),
            Wanted::Record { path } => open_record(path),
            Wanted::Unnamed { dir } => tempfile::tempfile_in(dir),
            _ => Err(io::ErrorKind::Unsupported.into()),
        };
        file.map(OwnedFd::from)
    }

    /// Opens the resource like [`Wanted::fulfil`], for a less privileged process.
    ///
    /// Follows no link that such a process could have placed (see [`trusted`]), and opens no file
    /// whose opening could block or have side effects.
    pub fn fulfil_for_other(&self, with: Option<BorrowedFd<'_>>) -> io::Result<OwnedFd> {
        let file = match self {
            Wanted::Image { path, write } => open_disk(&trusted::open_path(path)?, *write),
            Wanted::Place { path } => return trusted::open_path(path),
            Wanted::Certificates { path, .. } => open_regular(path),
            Wanted::Append { path } => append_to_regular(path),
            Wanted::Record { path } => {
                let (_dir, path) = below_trusted_dir(path)?;
                open_record(&path)
            }
            Wanted::Unnamed { dir } => {
                let dir = trusted::open_path(dir)?;
                tempfile::tempfile_in(own_path(&dir))
            }
            wanted => return wanted.fulfil(with),
        };
        file.map(OwnedFd::from)
    }
}

fn read_options(write: bool) -> OpenOptions {
    let mut options = OpenOptions::new();
    let flags = libc::O_NOCTTY | libc::O_NONBLOCK;
    options.read(true).write(write).custom_flags(flags);
    options
}

/// Opens a file if it can hold a disk. Opening a file of another type could block or have side
/// effects.
fn open_disk(found: &impl AsFd, write: bool) -> io::Result<File> {
    let path = own_path(&found.as_fd());
    refuse_strange(&path)?;
    let mut options = read_options(write);
    options.custom_flags(libc::O_NOCTTY).open(path)
}

/// Opens a regular file for reading.
fn open_regular(path: &Path) -> io::Result<File> {
    let found = trusted::open_path(path)?;
    let path = own_path(&found);
    match metadata(&path)?.is_file() {
        true => read_options(false).open(path),
        false => Err(io::Error::other("not a regular file")),
    }
}

/// Opens a regular file for appending, and creates it if it does not exist.
fn append_to_regular(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOCTTY | libc::O_NONBLOCK;
    let mut options = OpenOptions::new();
    options.append(true).custom_flags(flags);
    match trusted::open_path(path) {
        Ok(found) => {
            let path = own_path(&found);
            if !metadata(&path)?.is_file() {
                return Err(io::Error::other("not a regular file"));
            }
            options.open(path)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let (_dir, path) = below_trusted_dir(path)?;
            options.create_new(true).open(path)
        }
        Err(error) => Err(error),
    }
}

/// Opens the directory of `path`, and returns it with a path to the same file through it.
///
/// The path is valid while the directory stays open.
pub fn below_trusted_dir(path: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let dir = trusted::open_path(dir.unwrap_or(Path::new(".")))?;
    let path = own_path(&dir).join(name);
    Ok((dir, path))
}

/// Opens or creates a record, without following a link at `path`: the directory may belong to a
/// less privileged user.
fn open_record(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let flags = libc::O_NOCTTY | libc::O_NONBLOCK | libc::O_NOFOLLOW;
    options.read(true).write(true).custom_flags(flags);
    let file = match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            options.create_new(true).open(path)?
        }
        found => found?,
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a file"));
    }
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    File::open(dir.unwrap_or(Path::new(".")))?.sync_all()?;
    Ok(file)
}

/// Rejects a file that cannot hold a disk.
///
/// Call this before opening the file, because opening could block or have side effects.
fn refuse_strange(path: &Path) -> io::Result<()> {
    let kind = metadata(path)?.file_type();
    if kind.is_file() || kind.is_block_device() {
        return Ok(());
    }
    let what = match (kind.is_dir(), kind.is_char_device()) {
        (true, _) => "a directory",
        (_, true) => "a character device",
        _ => "not a file",
    };
    Err(io::Error::other(format!(
        "is {what}; a disk needs a regular file or a block device"
    )))
}

/// Rejects a request for more access than the open file has.
fn refuse_more(file: BorrowedFd<'_>, write: bool) -> io::Result<()> {
    // SAFETY: F_GETFL reads the flags of an open file, and uses no memory.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    let may = match flags & libc::O_ACCMODE {
        _ if flags < 0 || flags & libc::O_PATH != 0 => false,
        libc::O_RDWR => true,
        libc::O_RDONLY => !write,
        _ => false,
    };
    match may {
        true => Ok(()),
        false => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

fn own_path(file: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_file_gives_no_more_than_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        std::fs::write(&path, b"disk").unwrap();
        let reader = File::open(&path).unwrap();
        assert!(open_again(&reader, false).is_ok());
        assert!(open_again(&reader, true).is_err());
        assert!(open_again(&place(&path).unwrap(), false).is_err());
        let writer = open_image(&path, true).unwrap();
        assert!(open_again(&writer, true).is_ok());
        let appender = append(&path).unwrap();
        assert!(open_again(&appender, true).is_err());
    }

    #[test]
    fn a_record_is_a_file_and_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        record(&path("record")).unwrap();
        assert!(record(&path("record")).is_ok());
        std::os::unix::fs::symlink(path("record"), path("link")).unwrap();
        std::os::unix::fs::symlink(path("new"), path("dangling")).unwrap();
        for name in ["link", "dangling"] {
            assert!(record(&path(name)).is_err(), "{name}");
        }
        assert!(record(dir.path()).is_err() && record(Path::new("/dev/null")).is_err());
        assert!(!path("new").exists());
    }

    /// Opens a resource as the supervisor does for a tenant.
    fn for_other(wanted: &Wanted) -> io::Result<OwnedFd> {
        wanted.fulfil_for_other(None)
    }

    #[test]
    fn log_of_another_is_a_regular_file_and_no_link_of_theirs() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let append = |name: &str| for_other(&Wanted::Append { path: path(name) });
        append("log").unwrap();
        assert!(append("log").is_ok() && path("log").is_file());
        let made = std::process::Command::new("mkfifo")
            .arg(path("fifo"))
            .status();
        assert!(made.unwrap().success());
        std::fs::create_dir(path("dir")).unwrap();
        // Opening a FIFO would wait for a reader.
        for name in ["fifo", "dir"] {
            let error = append(name).unwrap_err().to_string();
            assert_eq!(error, "not a regular file", "{name}");
        }
        let device = Wanted::Append {
            path: "/dev/null".into(),
        };
        assert!(for_other(&device).is_err());
        std::os::unix::fs::symlink("victim", path("dangling")).unwrap();
        assert!(append("dangling").is_err() && !path("victim").exists());
    }

    #[test]
    fn files_for_another_are_not_found_by_links_of_theirs() {
        if !rustix::process::geteuid().is_root() {
            // Only root can give a link away; the tests of `trusted` cover other users.
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::create_dir(path("secret")).unwrap();
        std::fs::write(path("secret/file"), [0; 512]).unwrap();
        for (target, name) in [("secret/file", "link"), ("secret", "dir")] {
            std::os::unix::fs::symlink(target, path(name)).unwrap();
            std::os::unix::fs::lchown(path(name), Some(4_000_000), None).unwrap();
        }
        for path in [path("link"), path("dir/file")] {
            let uri = "nbds://host".to_owned();
            for wanted in [
                Wanted::Image {
                    path: path.clone(),
                    write: false,
                },
                Wanted::Place { path: path.clone() },
                Wanted::Append { path: path.clone() },
                Wanted::Record { path: path.clone() },
                Wanted::Certificates {
                    uri,
                    path: path.clone(),
                },
            ] {
                assert!(for_other(&wanted).is_err(), "{wanted:?}");
            }
        }
        assert!(for_other(&Wanted::Unnamed { dir: path("dir") }).is_err());
        let image = Wanted::Image {
            path: path("secret/file"),
            write: true,
        };
        assert!(for_other(&image).is_ok());
    }

    #[test]
    fn strange_files_are_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let problem = |path: &Path| open_image(path, false).unwrap_err().to_string();
        assert!(problem(dir.path()).contains("a directory"));
        assert!(problem(Path::new("/dev/null")).contains("a character device"));
        let gone = open_image(&dir.path().join("gone"), false).unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::ENOENT));
    }
}
