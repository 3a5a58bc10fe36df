//! Creates a new image on top of an existing one.

use crate::keys::KeyRing;
use fathom_files::explain_create;
use fathom_formats::Format;
use fathom_formats::offline::create::{Backing, Options, create};
use fathom_units::cause;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// Creates a qcow2 image, durably, that reads as the disk of `size` bytes in `below`.
///
/// `path` must not exist. With keys the image is encrypted with the first of them.
///
/// # Errors
/// A message for the user; the new file is removed.
pub fn make_layer(
    path: &Path,
    below: &Path,
    format: Format,
    size: u64,
    keys: &KeyRing,
) -> Result<(), String> {
    let failed = |error: io::Error| {
        let error = explain_create(path, error);
        format!(
            "{}: cannot create the image: {}",
            path.display(),
            cause(error)
        )
    };
    let mut options = Options::new(Format::Qcow2);
    options.backing = Some(Backing {
        name: name_from(path, below)?,
        format: Some(format),
    });
    let keys = keys.keys()?;
    options.encryption.is_wanted = !keys.is_empty();
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(failed)?;
    let made = create(&file, None, &options, size, keys.first());
    let made = made.map_err(|error| error.to_string());
    let made = made.and_then(|()| seal(path, &file, below).map_err(failed));
    if made.is_err() {
        let _ = fs::remove_file(path);
    }
    made
}

/// Returns the name of `below` to write into the image at `path`.
///
/// The name is relative if both are in one directory, so that they can be moved together.
pub fn name_from(path: &Path, below: &Path) -> Result<String, String> {
    let name = match (path.parent() == below.parent(), below.file_name()) {
        (true, Some(name)) => Path::new(name),
        _ => below,
    };
    let name = name.to_str().map(|name| match name.contains(':') {
        // The text before the colon would be parsed as a protocol.
        true if !name.starts_with('/') => format!("./{name}"),
        _ => name.to_owned(),
    });
    name.ok_or_else(|| format!("{}: not UTF-8, so an image cannot name it", below.display()))
}

/// Gives the new image the owner and permissions of the one below, and makes it durable.
fn seal(path: &Path, file: &File, below: &Path) -> io::Result<()> {
    let found = fs::metadata(below)?;
    file.set_permissions(Permissions::from_mode(found.mode() & 0o777))?;
    // Only root may change the owner of a file.
    let _ = std::os::unix::fs::fchown(file, Some(found.uid()), Some(found.gid()));
    file.sync_all()?;
    File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
}
