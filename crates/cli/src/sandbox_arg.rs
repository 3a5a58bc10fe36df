//! The value of `--sandbox`.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use fathom_sandbox::Mode as SandboxMode;
use fathom_spec::values::{Words, possible};

const SANDBOX_MODES: Words = &[
    ("off", "No restrictions"),
    (
        "log",
        "Log forbidden system calls in the kernel log, and allow them",
    ),
    ("on", "End the server at a forbidden system call"),
];

/// Parses `--sandbox`.
pub fn sandbox() -> impl TypedValueParser<Value = SandboxMode> {
    let words = PossibleValuesParser::new(possible(SANDBOX_MODES));
    words.try_map(|word| word.parse::<SandboxMode>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_modes_are_described() {
        let words: Vec<_> = SANDBOX_MODES.iter().map(|(word, _)| *word).collect();
        assert_eq!(words, SandboxMode::ALL.map(SandboxMode::name));
    }
}
