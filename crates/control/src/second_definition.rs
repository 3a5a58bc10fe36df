//! Disks with two definitions: in the configuration and in a file.

use crate::definition::Found;
use fathom_spec::DiskSpec;
use std::path::Path;

/// The relation of a disk's file to the disk's entry in the configuration.
pub enum SecondDefinition {
    /// No such file exists.
    None,
    /// The file names the same data and is ignored, with a warning.
    SameData(String),
    /// The file names other data or cannot be read, which is an error, since either definition may
    /// be newer.
    OtherData(String),
}

/// Returns the path of a persistent disk's file, for messages.
pub fn file_of(disks_dir: Option<&Path>, name: &str) -> String {
    let dir = disks_dir.unwrap_or(Path::new(""));
    dir.join(format!("{name}.toml")).display().to_string()
}

impl SecondDefinition {
    pub fn of(spec: &DiskSpec, found: &Found, disks_dir: Option<&Path>) -> SecondDefinition {
        let file = file_of(disks_dir, &spec.name);
        if found.problem(&spec.name).is_some() {
            return SecondDefinition::OtherData(format!(
                "defined by the configuration and by {file}, which cannot be read; the disk is \
                 not served, because the file may name a newer image; remove one of the two"
            ));
        }
        let Some(other) = found.disk(&spec.name) else {
            return SecondDefinition::None;
        };
        let keys = spec.other_data(&other.clone().without_defaults());
        match keys.is_empty() {
            true => SecondDefinition::SameData(format!(
                "defined by the configuration and by {file}; the file is ignored; remove one of \
                 the two"
            )),
            false => SecondDefinition::OtherData(format!(
                "defined by the configuration and by {file}, which differ in {}; the disk is not \
                 served, because either may name the older image; remove one of the two",
                keys.join(", ")
            )),
        }
    }
}

/// Omits the disks whose data a file in `disks_dir` defines differently.
///
/// The server cannot know which definition is newer, and writing to the older image may destroy the
/// newer image.
pub fn without_conflicts<'a>(
    declared: impl IntoIterator<Item = &'a DiskSpec>,
    found: &Found,
    disks_dir: Option<&Path>,
) -> Vec<&'a DiskSpec> {
    let is_known = |spec: &&DiskSpec| {
        !matches!(
            SecondDefinition::of(spec, found, disks_dir),
            SecondDefinition::OtherData(_)
        )
    };
    declared.into_iter().filter(is_known).collect()
}
