//! The image that a job creates or overwrites. A new file gets its name only when it is complete.
//! Therefore a killed job leaves nothing behind, and no other process can use an incomplete image.

use crate::error::{Error, io_error};
use crate::open::{OpenOptions, clear_mark};
use fathom_files::explain_create;
use fathom_stack::StoredImage;
use fathom_storage::Location;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, open};
use rustix::io::Errno;
use std::borrow::Cow;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

/// A target that is not complete yet.
pub(crate) struct Target {
    // Fields are dropped in order: an image on Ceph must be closed before it can be removed.
    image: Arc<StoredImage>,
    made: Made,
}

/// The file or image. A new one is removed on drop, unless it is complete.
struct Made {
    location: Location,
    state: State,
}

enum State {
    /// The target existed before, and its contents are lost.
    Overwritten,
    /// A file without a name.
    Nameless(File),
    /// A new target that already has a name, because it is not a file or its file system does not
    /// support unnamed files, or because the caller needs the name.
    Named,
    Complete,
}

impl Target {
    /// Opens the target at `location`, or creates a new one. `named`: other code must find the
    /// target by its name before it is complete.
    pub(crate) fn open(
        location: &Location,
        named: bool,
        options: &OpenOptions,
    ) -> Result<Target, Error> {
        let Some(path) = location.path() else {
            let state = match location.create()? {
                true => State::Named,
                false => State::Overwritten,
            };
            return Target::of(location.clone(), state, options);
        };
        let path = &*destination(path);
        let location = Location::file(path);
        if path.exists() {
            return Target::of(location, State::Overwritten, options);
        }
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o666);
        let failed = |error: Errno| {
            let error = explain_create(path, error.into());
            io_error(path, "cannot create the file")(error)
        };
        match open(parent(path), flags, mode) {
            Ok(file) if !named => {
                let file = File::from(file);
                let again = file
                    .try_clone()
                    .map_err(io_error(path, "cannot duplicate its file descriptor"))?;
                let image = StoredImage::from_file(path, again, (&options.storage()).into())?;
                Ok(Target {
                    image: Arc::new(image),
                    made: Made {
                        location,
                        state: State::Nameless(file),
                    },
                })
            }
            Ok(_) | Err(Errno::OPNOTSUPP | Errno::ISDIR) => {
                let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
                drop(open(path, flags, mode).map_err(failed)?);
                Target::of(location, State::Named, options)
            }
            Err(error) => Err(failed(error)),
        }
    }

    fn of(location: Location, state: State, options: &OpenOptions) -> Result<Target, Error> {
        let made = Made { location, state };
        let image = Arc::new(StoredImage::open(&made.location, &options.storage())?);
        Ok(Target { image, made })
    }

    pub(crate) fn image(&self) -> &Arc<StoredImage> {
        &self.image
    }

    /// Gives the target its name. The caller has made its data durable.
    pub(crate) fn complete(self) -> Result<(), Error> {
        self.made.complete(&self.image)
    }

    /// Returns whether the target existed before.
    pub(crate) fn overwrites(&self) -> bool {
        matches!(self.made.state, State::Overwritten)
    }
}

impl Made {
    fn complete(mut self, image: &StoredImage) -> Result<(), Error> {
        let state = std::mem::replace(&mut self.state, State::Complete);
        let Some(path) = self.location.path() else {
            return Ok(());
        };
        let failed =
            |error: Errno| io_error(path, "cannot give the new file its name")(error.into());
        if let State::Nameless(file) = &state {
            let file = format!("/proc/self/fd/{}", file.as_raw_fd());
            linkat(CWD, file, CWD, path, AtFlags::SYMLINK_FOLLOW).map_err(failed)?;
        }
        if matches!(state, State::Overwritten) {
            // The contents that a newer image had superseded are overwritten.
            clear_mark(image)?;
        }
        if !matches!(state, State::Overwritten) {
            let directory = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let directory = open(parent(path), directory, Mode::empty());
            directory.and_then(rustix::fs::fsync).map_err(failed)?;
        }
        Ok(())
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        if matches!(self.state, State::Named) {
            // A failure to remove the target cannot be handled here.
            let _ = match self.location.path() {
                Some(path) => std::fs::remove_file(path).map_err(drop),
                None => self.location.remove().map_err(drop),
            };
        }
    }
}

/// Returns the final target of dangling symbolic links. Returns any other path unchanged.
fn destination(path: &Path) -> Cow<'_, Path> {
    let mut path = Cow::Borrowed(path);
    // The kernel also follows at most 40 links.
    for _ in 0..40 {
        let to = path.read_link().ok().filter(|_| !path.exists());
        let Some(to) = to else { break };
        path = parent(&path).join(to).into();
    }
    path
}

/// Returns the directory of a file.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}
