//! Option values that are one of a few words, with a description of each for help and completions.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, Command, Error};
use fathom_formats::Format;
use fathom_stack::parse_format;
use fathom_storage::{Cache, EngineKind};
use std::ffi::OsStr;

/// Words with their descriptions.
pub type Words = &'static [(&'static str, &'static str)];

const CACHES: Words = &[
    (
        "none",
        "Bypass the host's page cache (O_DIRECT); needed for live migration",
    ),
    (
        "writeback",
        "Use the page cache; a flush of the guest makes data durable",
    ),
    (
        "writethrough",
        "Use the page cache; each write is durable when it completes",
    ),
];

const ENGINES: Words = &[
    (
        "io_uring",
        "io_uring, or threads where the system forbids it",
    ),
    ("native", "Linux AIO"),
    ("threads", "A pool of threads that make blocking calls"),
];

const FORMATS: Words = &[
    ("raw", "The bytes of the file are the disk"),
    ("qcow2", "QEMU's image format"),
    ("qed", "QEMU's older image format"),
    ("luks", "An encrypted raw image"),
    ("vmdk", "VMware; only with --readonly"),
    ("vhdx", "Hyper-V; only with --readonly"),
    ("vdi", "VirtualBox; only with --readonly"),
    ("vpc", "VHD, as of Virtual PC; only with --readonly"),
];

/// Returns words as possible values of an option.
pub fn possible(words: Words) -> impl Iterator<Item = PossibleValue> {
    let described =
        |(word, help): &(&'static str, &'static str)| PossibleValue::new(*word).help(*help);
    words.iter().map(described)
}

/// Parses `--cache`.
pub fn cache() -> impl TypedValueParser<Value = Cache> {
    PossibleValuesParser::new(possible(CACHES)).try_map(|word| word.parse::<Cache>())
}

/// Parses `--aio`.
pub fn engine() -> impl TypedValueParser<Value = EngineKind> {
    PossibleValuesParser::new(possible(ENGINES)).try_map(|word| word.parse::<EngineKind>())
}

/// Parses `--format`. The error for a format that Fathom cannot serve says how to convert the
/// image.
#[derive(Clone)]
pub struct FormatParser;

impl TypedValueParser for FormatParser {
    type Value = Format;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<Format, Error> {
        parse_format.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(possible(FORMATS)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: Words) -> Vec<&'static str> {
        words.iter().map(|(word, _)| *word).collect()
    }

    #[test]
    fn all_values_are_described() {
        assert_eq!(words(CACHES), Cache::ALL.map(Cache::name));
        assert_eq!(words(ENGINES), EngineKind::ALL.map(EngineKind::name));
        assert_eq!(words(FORMATS), Format::ALL.map(Format::name));
    }
}
