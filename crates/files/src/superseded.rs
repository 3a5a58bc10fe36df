//! Marks of images that a newer image has superseded, so that nobody writes to them by mistake.
//!
//! When a disk goes on in another image (a snapshot's overlay, a mirror's target, the base of a commit), the image
//! that it had is out of date from the first write on. A server whose configuration still names the old image would
//! serve it after a restart: writes of the guest would be lost, and an overlay on the old image would be destroyed.
//!
//! A file is marked by an extended attribute. Whatever cannot have one (block devices, images on Ceph, disks of NBD
//! servers, files of some file systems) gets a record in the directory of the server's definitions, if there is one,
//! where only servers with that directory see the mark.
//!
//! # Order of durable steps of a switch
//! All users of the disk wait, and both images are the same.
//! 1. The old image is marked. If the disk has a definition in the server's directory, the mark says in which file.
//! 2. A mark of the new image is removed: the image that a disk is committed to was superseded by the overlay above.
//! 3. The definition names the new image, if there is one.
//! 4. The mark of the old image loses the name of the definition.
//! 5. Users go on with the new image.
//!
//! If the server dies before step 3, the definition still names the old image. When the next server reads it, the mark
//! names this same definition, which proves that step 5 was not reached: [`forget_unfinished`] removes it. Without a
//! definition the old image is refused after step 1 by an error that names the new one: both have all of the data, and
//! the user decides. After step 3 the old image is named by nobody.

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

/// Name of the extended attribute.
pub const ATTRIBUTE: &str = "user.fathom.superseded";

/// An image that can be marked: an open file, or what is known by its location alone.
#[derive(Clone, Copy)]
pub struct Image<'a> {
    /// As users name it.
    pub location: &'a str,
    pub file: Option<&'a File>,
    /// What identifies an image that is in no file.
    pub id: Option<&'a str>,
}

impl Image<'_> {
    /// The image's mark, if it has one. A mark that cannot be understood counts.
    pub fn mark(&self) -> Option<Superseded> {
        let own = self.file.and_then(|file| read(file).ok().flatten());
        own.or_else(|| records::find(self.location, self.lasting_id().as_deref()))
    }

    /// Marks the image, durably. The error says why the image cannot be marked.
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

    /// Removes the image's mark, durably.
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

/// Removes the mark of the image at `location`, which is in the file at `path` if it is in one, if a switch has left
/// the mark that the server did not live to finish: `definition` still names the image. True: there was one.
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

/// The extended attribute of an open file. None: there is none, or there can be none.
fn read(file: impl AsFd) -> io::Result<Option<Superseded>> {
    let mut bytes = vec![0; MAX_MARK];
    match rustix::fs::fgetxattr(file, ATTRIBUTE, bytes.as_mut_slice()) {
        Ok(len) => Ok(Some(Superseded::parse(&bytes[..len.min(MAX_MARK)]))),
        Err(rustix::io::Errno::RANGE) => Ok(Some(Superseded::unreadable())),
        Err(rustix::io::Errno::NODATA) => Ok(None),
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
