//! Wrong arguments, told in one line.

use clap::error::{ContextKind, Error, ErrorKind};
use std::process::ExitCode;

/// The exit status for wrong arguments.
pub const EXIT: u8 = 2;

/// Print what clap has to say: help as it is, an error as one line.
pub fn report(error: &Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // Nobody is left to tell when standard output is closed.
            let _ = error.print();
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            ExitCode::from(EXIT)
        }
        _ if is_verbose(error) => {
            eprintln!("fathom: there is no -v: --log debug says more, -V which version it is");
            ExitCode::from(EXIT)
        }
        _ => {
            eprintln!("fathom: {}", one_line(&without_keys(error)));
            ExitCode::from(EXIT)
        }
    }
}

/// Whether it was asked to say more, as others are.
fn is_verbose(error: &Error) -> bool {
    let argument = error.get(ContextKind::InvalidArg);
    let argument = argument.map(ToString::to_string).unwrap_or_default();
    error.kind() == ErrorKind::UnknownArgument
        && matches!(argument.as_str(), "-v" | "-vv" | "--verbose")
}

/// What it says, but for what was given in place of where a key is: that may be the key.
fn without_keys(error: &Error) -> String {
    let text = error.to_string();
    let get = |kind| error.get(kind).map(ToString::to_string);
    let of_key = get(ContextKind::InvalidArg).is_some_and(|argument| argument.contains("key"));
    match get(ContextKind::InvalidValue).filter(|value| of_key && !value.is_empty()) {
        Some(value) => text.replace(&value, "..."),
        None => text,
    }
}

/// clap's paragraphs without its usage, which `--help` shows.
fn one_line(text: &str) -> String {
    let text = text.split("\n\nUsage:").next().unwrap_or(text);
    let text = text
        .split("\n\nFor more information")
        .next()
        .unwrap_or(text);
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let words = |paragraph: &str| paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
    let paragraphs: Vec<_> = text.split("\n\n").map(words).collect();
    format!("{} (see --help)", paragraphs.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_become_one_line() {
        let text = "error: the following required arguments were not provided:\n  \
                    <DISK>\n\nUsage: fathom serve <DISK>\n\nFor more information, try '--help'.\n";
        assert_eq!(
            one_line(text),
            "the following required arguments were not provided: <DISK> (see --help)"
        );
        let text = "error: unexpected argument\n\n  tip: another\n\nUsage: fathom\n";
        assert_eq!(
            one_line(text),
            "unexpected argument; tip: another (see --help)"
        );
    }
}
