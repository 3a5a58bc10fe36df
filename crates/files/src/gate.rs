//! How a process comes by what is outside of it: it opens files and connects by itself, or has
//! somebody with more rights do it, who looks at what is wanted first ([`install`]).

use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions, metadata, read_link};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Something outside of the process, of which it gets a descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wanted {
    /// The regular file or block device of that name.
    Image { path: PathBuf, write: bool },
    /// What is found by that name, whatever it is: to look at (O_PATH).
    Place { path: PathBuf },
    /// A file that is open already, opened once more.
    Again { write: bool },
    /// A file to append to, new if need be.
    Append { path: PathBuf },
    /// A file of this program's own, read and written, new if need be.
    Record { path: PathBuf },
    /// A new file without a name.
    Unnamed { dir: PathBuf },
    /// The file that one of the layers of `image` calls `name`, to be read. It may be below the
    /// directory of `image`, and below `more`.
    Named {
        image: PathBuf,
        more: Vec<PathBuf>,
        layer: PathBuf,
        name: Vec<u8>,
    },
    /// A connection to an NBD server.
    Server { uri: String, patience_ms: u64 },
    /// A file that a client of this NBD server needs for TLS.
    Certificates { uri: String, path: PathBuf },
    /// A connection to the keeper of a base image.
    Base { remote: String },
    /// A new trace of so many rings.
    Trace {
        path: PathBuf,
        disk: String,
        rings: usize,
    },
    /// The socket at which a disk's front-ends connect.
    FrontEnds { disk: String },
}

/// What was wanted.
#[derive(Debug)]
pub struct Got {
    pub file: OwnedFd,
    /// Where it is, of what was found by searching. Of a [`Wanted::Place`] its lasting identity, as text.
    pub path: Option<PathBuf>,
}

/// Why there is nothing to be had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// The system's reason, if it was that.
    pub errno: Option<i32>,
    /// One line for the user.
    pub text: String,
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Refused {
        Refused {
            errno: error.raw_os_error(),
            text: error.to_string(),
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

/// Somebody with more rights.
pub trait Gate: Send + Sync {
    /// `with`: the file of [`Wanted::Again`].
    fn get(&self, wanted: &Wanted, with: Option<BorrowedFd<'_>>) -> Result<Got, Refused>;
}

static GATE: OnceLock<Arc<dyn Gate>> = OnceLock::new();

/// Have all be got there from now on. Only the first one counts.
pub fn install(gate: Arc<dyn Gate>) {
    let _ = GATE.set(gate);
}

/// None: this process has all rights that there are.
pub fn other() -> Option<&'static dyn Gate> {
    GATE.get().map(|gate| &**gate)
}

/// Comes by one of those that [`Wanted::fulfil`] knows.
fn get(wanted: &Wanted, with: Option<BorrowedFd<'_>>) -> io::Result<OwnedFd> {
    match other() {
        Some(gate) => Ok(gate.get(wanted, with)?.file),
        None => wanted.fulfil(with),
    }
}

/// Opens the file of an image. An error without a number says what is wrong with the file.
pub fn open_image(path: &Path, write: bool) -> io::Result<File> {
    let path = path.to_owned();
    get(&Wanted::Image { path, write }, None).map(File::from)
}

/// Opens it once more, with the modes of access that are said.
pub fn open_again(file: &File, write: bool) -> io::Result<File> {
    get(&Wanted::Again { write }, Some(file.as_fd())).map(File::from)
}

/// Opens what is there, to be looked at only.
pub fn place(path: &Path) -> io::Result<File> {
    let path = path.to_owned();
    get(&Wanted::Place { path }, None).map(File::from)
}

/// The path to it without links.
pub fn real_path(path: &Path) -> io::Result<PathBuf> {
    read_link(own_path(&place(path)?))
}

pub fn append(path: &Path) -> io::Result<File> {
    let path = path.to_owned();
    get(&Wanted::Append { path }, None).map(File::from)
}

/// A file of this program's own, in a directory that is there: read and written, and made durably if it is
/// not there.
pub fn record(path: &Path) -> io::Result<File> {
    let path = path.to_owned();
    get(&Wanted::Record { path }, None).map(File::from)
}

/// What a client of this NBD server needs for TLS.
pub fn certificates(uri: &str, path: &Path) -> io::Result<File> {
    let (uri, path) = (uri.to_owned(), path.to_owned());
    get(&Wanted::Certificates { uri, path }, None).map(File::from)
}

/// A new file in `dir`, which is gone when it is closed.
pub fn unnamed(dir: &Path) -> io::Result<File> {
    let dir = dir.to_owned();
    get(&Wanted::Unnamed { dir }, None).map(File::from)
}

impl Wanted {
    /// Get it with this process's rights. Not here: `Named`, `Server`, `Base`, `Trace` and `FrontEnds`.
    pub fn fulfil(&self, with: Option<BorrowedFd<'_>>) -> io::Result<OwnedFd> {
        let read = |write| {
            let mut options = OpenOptions::new();
            options.read(true).write(write).custom_flags(libc::O_NOCTTY);
            options
        };
        let file = match self {
            Wanted::Image { path, write } => {
                refuse_strange(path)?;
                read(*write).open(path)
            }
            Wanted::Place { path } => {
                let mut options = OpenOptions::new();
                options.read(true).custom_flags(libc::O_PATH).open(path)
            }
            Wanted::Again { write } => {
                let file = with.ok_or(io::ErrorKind::InvalidInput)?;
                refuse_more(file, *write)?;
                let path = own_path(&file);
                refuse_strange(&path)?;
                read(*write).open(path)
            }
            Wanted::Certificates { path, .. } => {
                let mut options = OpenOptions::new();
                let flags = libc::O_NOCTTY | libc::O_NONBLOCK;
                options.read(true).custom_flags(flags).open(path)
            }
            Wanted::Append { path } => OpenOptions::new().append(true).create(true).open(path),
            Wanted::Record { path } => open_record(path),
            Wanted::Unnamed { dir } => tempfile::tempfile_in(dir),
            _ => Err(io::ErrorKind::Unsupported.into()),
        };
        file.map(OwnedFd::from)
    }
}

/// By no link: it may be in a directory of somebody with fewer rights.
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
        return Err(io::Error::other("is not a file"));
    }
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    File::open(dir.unwrap_or(Path::new(".")))?.sync_all()?;
    Ok(file)
}

/// Refuses what a disk cannot be in, before it is opened: that might block, or do something.
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

/// Refuses to make more of an open file than it is.
fn refuse_more(file: BorrowedFd<'_>, write: bool) -> io::Result<()> {
    // SAFETY: it reads the flags of a file that is open.
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

    #[test]
    fn strange_files_are_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let problem = |path: &Path| open_image(path, false).unwrap_err().to_string();
        assert!(problem(dir.path()).contains("is a directory"));
        assert!(problem(Path::new("/dev/null")).contains("a character device"));
        let gone = open_image(&dir.path().join("gone"), false).unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::ENOENT));
    }
}
