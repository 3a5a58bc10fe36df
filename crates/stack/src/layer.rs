//! A new image on top of one that there is.

use crate::keys::KeyRing;
use fathom_files::explain_create;
use fathom_formats::Format;
use fathom_formats::offline::create::{Backing, Options, create};
use fathom_units::cause;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// Makes a qcow2 image that reads as the disk of `size` bytes in `below`, durable. `path` must not be there. The error is
/// for the user: nothing is left of it then. With keys it is encrypted, by the first of them.
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

/// As it is written in the image: they can be moved together if they are in one directory.
pub fn name_from(path: &Path, below: &Path) -> Result<String, String> {
    let name = match (path.parent() == below.parent(), below.file_name()) {
        (true, Some(name)) => Path::new(name),
        _ => below,
    };
    let name = name.to_str().map(|name| match name.contains(':') {
        // What is before it would be a protocol.
        true if !name.starts_with('/') => format!("./{name}"),
        _ => name.to_owned(),
    });
    name.ok_or_else(|| format!("{}: not UTF-8, so an image cannot name it", below.display()))
}

/// Whoever may use the one below may use this.
fn seal(path: &Path, file: &File, below: &Path) -> io::Result<()> {
    let found = fs::metadata(below)?;
    file.set_permissions(Permissions::from_mode(found.mode() & 0o777))?;
    // (Only root may give a file away.)
    let _ = std::os::unix::fs::fchown(file, Some(found.uid()), Some(found.gid()));
    file.sync_all()?;
    File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
}
