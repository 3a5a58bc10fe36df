//! Files that define disks.

use crate::{DiskSpec, check_name};
use fathom_units::{cause, serde_text};
use serde::de::DeserializeOwned;
use std::ops::Range;
use std::path::Path;
use std::{fs, io};

/// Reads the definition of a disk from its file. The error follows the file's name.
pub fn read_definition(path: &Path) -> Result<DiskSpec, String> {
    let text = fs::read_to_string(path).map_err(|error| format!(": {}", unreadable(&error)))?;
    let mut disk: DiskSpec = parse_toml(&text)?;
    let stem = stem(path);
    if disk.name.is_empty() {
        stem.clone_into(&mut disk.name);
    }
    if disk.name != stem {
        return Err(format!(
            ": defines disk '{0}'; rename the file to {0}.toml",
            disk.name
        ));
    }
    check_name(&disk.name).map_err(|problem| format!(": {problem}"))?;
    Ok(disk)
}

/// Describes why a file cannot be read. The text follows the file's name.
pub fn unreadable(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file".into(),
        _ => format!("cannot read the file: {}", cause(error)),
    }
}

/// Parses a file. The error follows the file's name, and begins with the line.
pub fn parse_toml<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| {
        let line = error.span().map(|span| line_of(text, span));
        let message = error.message().lines().collect::<Vec<_>>().join(", ");
        let message = serde_text(&message, "docs/configuration.md lists all");
        format!("{}: {message}", line.unwrap_or_default())
    })
}

/// Returns the line of a part of the text, as it follows a file's name.
pub fn line_of(text: &str, span: Range<usize>) -> String {
    let before = text.get(..span.start).unwrap_or(text);
    format!(":{}", before.matches('\n').count() + 1)
}

/// Returns the name of the file without its extension; empty if the name is not UTF-8.
pub fn stem(path: &Path) -> &str {
    let stem = path.file_stem().and_then(|stem| stem.to_str());
    stem.unwrap_or_default()
}
