//! The argument that names a disk's data.

use clap::builder::{OsStringValueParser, TypedValueParser};
use fathom_storage::{KINDS, Location};
use std::ffi::OsString;

/// Parses the location of a disk.
pub fn location_parser() -> impl TypedValueParser<Value = Location> {
    OsStringValueParser::new().try_map(|text: OsString| Location::parse(&text))
}

/// Help of the location argument for `-h`.
pub const LOCATION_HELP: &str =
    "Image file, block device, or URI such as nbd://HOST/EXPORT (see --help)";

/// Returns the help of the location argument for `--help`, with all kinds of locations.
pub fn location_help() -> String {
    let forms: Vec<_> = KINDS.iter().map(|kind| kind.form).collect();
    format!("Location of the disk's data: {}", forms.join(", "))
}
