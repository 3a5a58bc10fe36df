//! Marks images that a newer image has superseded, so that no program writes to them by mistake.
//!
//! When a disk switches to another image, its old image is out of date from the next write on. The
//! new image is a snapshot's overlay, a mirror's target, or the base image of a commit. A server
//! whose configuration still names the old image would serve it after a restart. Writes of the
//! guest would be lost, and an overlay on the old image would be corrupted.
//!
//! A file is marked with an extended attribute. Images that cannot have one get a record in the
//! server's definition directory, if the server has one. Examples are block devices, images on
//! Ceph, disks of NBD servers, and files of some file systems. Only servers with that directory see
//! such a mark.
//!
//! # Order of durable steps of a switch
//! All users of the disk are paused, and both images have the same content.
//! 1. The old image is marked. If the disk has a definition in the server's directory, the mark
//!    names the definition file.
//! 2. A mark on the new image is removed. For example, the base image of a commit was superseded by
//!    the overlay above it.
//! 3. The disk definition, if there is one, is changed to name the new image.
//! 4. The name of the definition file is removed from the mark of the old image.
//! 5. The users of the disk resume on the new image.
//!
//! If the server dies before step 3, the definition still names the old image. The next server
//! reads the definition and finds a mark that names this same definition. This proves that step 5
//! was not reached, so [`forget_unfinished`] removes the mark.
//!
//! Without a definition, a server rejects the old image after step 1, with an error that names the
//! new image. Both images have all data, and the user decides. After step 3 no definition names the
//! old image.

mod mark;
mod records;

use crate::lasting::lasting_id;
use fathom_units::cause;
use mark::MAX_MARK;
pub use mark::Superseded;
pub use records::set_directory;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

/// Name of the extended attribute that marks a superseded image.
pub const ATTRIBUTE: &str = "user.fathom.superseded";

/// An image that can be marked: an open file, or an image that is known only by its location.
#[derive(Clone, Copy)]
pub struct Image<'a> {
    /// The image's name as the user knows it.
    pub location: &'a str,
    /// The open file. `None`: the image is known only by its location.
    pub file: Option<&'a File>,
    /// Identifier of an image that is not a file.
    pub id: Option<&'a str>,
}

impl Image<'_> {
    /// Returns the image's mark, if it has one. An unreadable mark counts as a mark.
    pub fn mark(&self) -> Option<Superseded> {
        let own = self.file.and_then(|file| read(file).ok().flatten());
        own.or_else(|| records::find(self.location, self.lasting_id().as_deref()))
    }

    /// Marks the image durably. The error says why the image cannot be marked.
    pub fn set_mark(&self, mark: &Superseded) -> Result<(), String> {
        let written = match self.file {
            Some(file) => write(file, mark),
            None => Err(io::ErrorKind::Unsupported.into()),
        };
        let Err(error) = written else {
            return Ok(());
        };
        let id = self.lasting_id();
        records::keep(self.location, id.as_deref(), mark).map_err(|problem| match self.file {
            Some(_) => format!(
                "cannot set an extended attribute ({}), and {problem}",
                cause(error)
            ),
            None => problem,
        })
    }

    /// Removes the image's mark durably.
    pub fn clear_mark(&self) -> Result<(), String> {
        if let Some(file) = self.file {
            remove(file).map_err(|error| format!("cannot remove its mark: {}", cause(error)))?;
        }
        records::forget(self.location, self.lasting_id().as_deref())
    }

    fn lasting_id(&self) -> Option<String> {
        let own = self.file.and_then(|file| lasting_id(file).ok().flatten());
        own.or_else(|| self.id.map(str::to_owned))
    }
}

/// Removes the mark that an unfinished switch has left on the image at `location`.
///
/// A mark is left by an unfinished switch if it names `definition`, which still names the image.
/// `path` is the image's file, if it has one. Returns whether a mark was removed.
pub fn forget_unfinished(
    location: &str,
    path: Option<&Path>,
    definition: &Path,
) -> Result<bool, String> {
    let file = path.and_then(|path| crate::gate::open_image(path, false).ok());
    let image = Image {
        location,
        file: file.as_ref(),
        id: None,
    };
    match image.mark() {
        Some(mark) if mark.definition.as_deref() == Some(definition) => {
            image.clear_mark().map(|()| true)
        }
        _ => Ok(false),
    }
}

/// Reads the mark from the extended attribute of an open file.
///
/// Returns `None` if the file has no such attribute. An attribute that is too long is an unreadable
/// mark.
fn read(file: impl AsFd) -> io::Result<Option<Superseded>> {
    let mut bytes = vec![0; MAX_MARK];
    match rustix::fs::fgetxattr(file, ATTRIBUTE, bytes.as_mut_slice()) {
        Ok(len) => Ok(Some(Superseded::parse(&bytes[..len.min(MAX_MARK)]))),
        Err(rustix::io::Errno::RANGE) => Ok(Some(Superseded::unreadable())),
        // A file system without extended attributes: the mark is a record, if there is one.
        Err(rustix::io::Errno::NODATA | rustix::io::Errno::NOTSUP) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn write(file: &File, mark: &Superseded) -> io::Result<()> {
    let value = serde_json::to_vec(mark)?;
    if value.len() > MAX_MARK {
        return Err(io::Error::other("the image's name is too long"));
    }
    rustix::fs::fsetxattr(file, ATTRIBUTE, &value, rustix::fs::XattrFlags::empty())?;
    file.sync_all()
}

fn remove(file: &File) -> io::Result<()> {
    if read(file)?.is_none() {
        return Ok(());
    }
    match rustix::fs::fremovexattr(file, ATTRIBUTE) {
        Ok(()) | Err(rustix::io::Errno::NODATA) => file.sync_all(),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_without_extended_attributes_has_no_mark_to_remove() {
        // (The proc file system has no extended attributes.)
        let file = File::open("/proc/version").unwrap();
        let set = rustix::fs::fsetxattr(&file, ATTRIBUTE, b"", rustix::fs::XattrFlags::empty());
        assert!(set.is_err());
        assert!(read(&file).unwrap().is_none());
        remove(&file).unwrap();
    }
}
