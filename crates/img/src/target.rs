//! The file that a job makes. One that was not there has no name before it is complete, so that a
//! job which is killed leaves nothing behind, and nobody takes a part for the whole.

use crate::error::{Error, io_error};
use crate::open::open_writable;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, open};
use rustix::io::Errno;
use std::borrow::Cow;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// What is made, until it is complete.
pub(crate) struct Target {
    path: PathBuf,
    file: File,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It was there before: what was in it is lost.
    Overwritten,
    /// It has no name yet.
    Nameless,
    /// It is new, in a file system that knows no files without a name.
    Named,
    Complete,
}

impl Target {
    /// Opens what is at `path`, or begins a new file. `named`: others must find it by its name
    /// before it is complete.
    pub(crate) fn open(path: &Path, named: bool) -> Result<Target, Error> {
        let path = &*destination(path);
        let of_state = |file, state| Target {
            path: path.to_owned(),
            file,
            state,
        };
        if path.exists() {
            return Ok(of_state(open_writable(path, false)?, State::Overwritten));
        }
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o666);
        match open(parent(path), flags, mode) {
            Ok(file) if !named => Ok(of_state(file.into(), State::Nameless)),
            Ok(_) | Err(Errno::OPNOTSUPP | Errno::ISDIR) => {
                Ok(of_state(open_writable(path, true)?, State::Named))
            }
            Err(error) => Err(io_error(path, "cannot be made")(error.into())),
        }
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// It is durable by now, and gets its name.
    pub(crate) fn complete(mut self) -> Result<(), Error> {
        let failed = |error: Errno| io_error(&self.path, "cannot get its name")(error.into());
        if self.state == State::Nameless {
            let file = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            let follow = AtFlags::SYMLINK_FOLLOW;
            linkat(CWD, file, CWD, &self.path, follow).map_err(failed)?;
        }
        if self.state != State::Overwritten {
            let directory = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let directory = open(parent(&self.path), directory, Mode::empty());
            directory.and_then(rustix::fs::fsync).map_err(failed)?;
        }
        self.state = State::Complete;
        Ok(())
    }

    /// Whether something was there before.
    pub(crate) fn overwrites(&self) -> bool {
        self.state == State::Overwritten
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if self.state == State::Named {
            // Nothing can be done about it.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// What a symbolic link leads to that is not there yet; any other path is its own.
fn destination(path: &Path) -> Cow<'_, Path> {
    let mut path = Cow::Borrowed(path);
    // The kernel follows no more, either.
    for _ in 0..40 {
        let to = path.read_link().ok().filter(|_| !path.exists());
        let Some(to) = to else { break };
        path = parent(&path).join(to).into();
    }
    path
}

/// The directory that a file is in.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}
