//! The files that define disks: which image each disk has.

use fathom_files::superseded;
use fathom_host::options::DiskOptions;
use fathom_spec::read_definition;
use std::path::{Path, PathBuf};

/// Returns the path of the disk's definition in this directory, if the disk has one.
pub fn definition_of(name: &str, directory: Option<&Path>) -> Option<PathBuf> {
    let path = directory?.join(format!("{name}.toml"));
    path.is_file().then_some(path)
}

/// Removes the mark of an image that the disk's definition still names. The server ended before a
/// switch to a newer image was complete, and no user has written to the newer image.
pub fn forget_unfinished(options: &DiskOptions, directory: Option<&Path>) {
    let (location, is_first) = (&options.disk.location, !options.disk.succeeds);
    let definition = definition_of(&options.name, directory).filter(|_| is_first);
    let Some(definition) = definition else {
        return;
    };
    let is_named = read_definition(&definition).is_ok_and(|table| table.image == *location);
    if options.disk.read_only || !is_named {
        return;
    }
    match superseded::forget_unfinished(&location.to_string(), location.path(), &definition) {
        Ok(false) => {}
        Ok(true) => tracing::info!(
            "disk '{}': the server ended during a switch to another image; {location} is still \
             the disk's image",
            options.name
        ),
        // (Opening the image then fails with the reason.)
        Err(problem) => tracing::warn!("{location}: {problem}"),
    }
}
