//! Errors in arguments, as one line for the user.

mod command_names;

use clap::error::{ContextKind, ContextValue, Error, ErrorKind};
use std::error::Error as _;
use std::process::ExitCode;

/// The exit status for wrong arguments.
pub const EXIT: u8 = 2;

/// Prints help as it is, and an error as one line. `command` is the command with these arguments.
pub fn report(error: &Error, command: &str) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // The write fails if standard output is closed. The help then has no reader, so the
            // error is ignored.
            let _ = error.print();
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            ExitCode::from(EXIT)
        }
        _ => {
            eprintln!("fathom: {}", line(error, command));
            ExitCode::from(EXIT)
        }
    }
}

/// Returns the error, the remedy, and the command that prints help.
fn line(error: &Error, command: &str) -> String {
    let text = match error.kind() {
        ErrorKind::UnknownArgument => unknown_argument(error),
        ErrorKind::InvalidSubcommand => unknown_command(error, command),
        ErrorKind::InvalidValue => invalid_value(error),
        ErrorKind::ValueValidation => refused_value(error),
        ErrorKind::MissingRequiredArgument => missing_arguments(error),
        _ => None,
    };
    let text = text.unwrap_or_else(|| paragraphs(&error.to_string()));
    let text = without_key(error, text);
    one_line(&format!("{text} (see `{command} --help`)"))
}

fn get(error: &Error, kind: ContextKind) -> Option<String> {
    error.get(kind).map(ToString::to_string)
}

fn strings(error: &Error, kind: ContextKind) -> Vec<String> {
    match error.get(kind) {
        Some(ContextValue::Strings(all)) => all.clone(),
        Some(ContextValue::String(one)) => vec![one.clone()],
        _ => Vec::new(),
    }
}

/// Returns a suggestion such as `; did you mean 'serve'?`, or an empty string.
fn suggestion(error: &Error, kind: ContextKind) -> String {
    // clap sorts suggestions by similarity; the last one is the most similar.
    match strings(error, kind).last() {
        Some(name) => format!("; did you mean '{name}'?"),
        None => String::new(),
    }
}

fn unknown_argument(error: &Error) -> Option<String> {
    let argument = get(error, ContextKind::InvalidArg)?;
    if matches!(argument.as_str(), "-v" | "-vv" | "--verbose") {
        return Some(format!(
            "unknown option '{argument}'; use --log debug for details, or -V for the version"
        ));
    }
    if !argument.starts_with('-') {
        return Some(format!("unexpected argument '{argument}'"));
    }
    let suggestion = match suggestion(error, ContextKind::SuggestedArg) {
        // clap suggests `--` for every argument. This suggestion is useful only if a file with such
        // a name exists.
        none if none.is_empty() && std::path::Path::new(&argument).exists() => {
            format!("; for the file of this name use './{argument}'")
        }
        other => other,
    };
    Some(format!("unknown option '{argument}'{suggestion}"))
}

fn unknown_command(error: &Error, command: &str) -> Option<String> {
    let name = get(error, ContextKind::InvalidSubcommand)?;
    let suggestion = match command_names::instead_of(command, &name) {
        found if found.is_empty() => suggestion(error, ContextKind::SuggestedSubcommand),
        found => {
            let quoted: Vec<_> = found.iter().map(|name| format!("`{name}`")).collect();
            format!("; use {}", quoted.join(" or "))
        }
    };
    Some(format!("unknown command '{name}'{suggestion}"))
}

/// Describes a value that is not one of the possible values.
fn invalid_value(error: &Error) -> Option<String> {
    let value = get(error, ContextKind::InvalidValue).filter(|value| !value.is_empty())?;
    let option = option_of(error)?;
    let advice = match suggestion(error, ContextKind::SuggestedValue) {
        none if none.is_empty() => one_of(&strings(error, ContextKind::ValidValue)),
        suggestion => suggestion,
    };
    Some(format!("{option}: invalid value '{value}'{advice}"))
}

/// Returns a list such as `; use a, b or c`, or an empty string.
fn one_of(words: &[String]) -> String {
    match words.split_last() {
        Some((last, [])) => format!("; use {last}"),
        Some((last, others)) => format!("; use {} or {last}", others.join(", ")),
        None => String::new(),
    }
}

/// Describes a value that the option's parser rejects.
fn refused_value(error: &Error) -> Option<String> {
    let value = get(error, ContextKind::InvalidValue)?;
    let option = option_of(error)?;
    let cause = plain_cause(&error.source()?.to_string());
    let is_named = cause.contains(&format!("'{value}'"));
    Some(match is_named {
        true => format!("{option}: {cause}"),
        false => format!("{option}: invalid value '{value}': {cause}"),
    })
}

fn missing_arguments(error: &Error) -> Option<String> {
    let missing = strings(error, ContextKind::InvalidArg);
    match &missing[..] {
        [] => None,
        [one] => Some(format!("required argument missing: {one}")),
        several => Some(format!(
            "required arguments missing: {}",
            several.join(", ")
        )),
    }
}

/// Returns the name of the option, such as `--queues` for `--queues <N>`.
fn option_of(error: &Error) -> Option<String> {
    let argument = get(error, ContextKind::InvalidArg)?;
    argument.split_whitespace().next().map(str::to_owned)
}

/// Rewords causes of the standard library's and clap's parsers of numbers.
fn plain_cause(cause: &str) -> String {
    match cause {
        "invalid digit found in string" | "cannot parse integer from empty string" => {
            return "must be a whole number".to_owned();
        }
        "number too large to fit in target type" => return "the number is too large".to_owned(),
        "number too small to fit in target type" => return "the number is too small".to_owned(),
        "invalid float literal" => return "must be a number".to_owned(),
        _ => {}
    }
    let bounds = cause.split_once(" is not in ").and_then(|(_, range)| {
        let (least, most) = range.split_once("..")?;
        let least: i128 = least.parse().ok()?;
        let most: i128 = match most.strip_prefix('=') {
            Some(most) => most.parse().ok()?,
            None => most.parse::<i128>().ok()? - 1,
        };
        Some((least, most))
    });
    match bounds {
        // The upper bound is only that of the integer type.
        Some((least, most)) if most >= i128::from(i64::MAX) - 1 => {
            format!("must be {least} or more")
        }
        Some((least, most)) => format!("must be {least} to {most}"),
        None => cause.to_owned(),
    }
}

/// Hides the value of an option whose name contains `key`, because it may be a secret.
fn without_key(error: &Error, text: String) -> String {
    let is_key = get(error, ContextKind::InvalidArg).is_some_and(|arg| arg.contains("key"));
    match get(error, ContextKind::InvalidValue).filter(|value| is_key && !value.is_empty()) {
        Some(value) => text.replace(&value, "..."),
        None => text,
    }
}

/// Removes usage and tips from clap's message, and keeps the other paragraphs.
fn paragraphs(text: &str) -> String {
    let text = text.split("\n\nUsage:").next().unwrap_or(text);
    let text = text
        .split("\n\nFor more information")
        .next()
        .unwrap_or(text);
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let paragraphs = text.split("\n\n").map(one_line);
    let helpful = paragraphs.filter(|paragraph| !paragraph.starts_with("tip: to pass"));
    helpful.collect::<Vec<_>>().join("; ")
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn line_of(args: &[&str]) -> String {
        let args: Vec<_> = ["fathom"].iter().chain(args).map(OsString::from).collect();
        let command = crate::help::command();
        let path = crate::help::path_of(&command, &args);
        line(&command.try_get_matches_from(args).unwrap_err(), &path)
    }

    #[test]
    fn unknown_command_suggests_the_right_one() {
        for (args, words) in [
            (&["stop"][..], "unknown command 'stop'; use `fathom quit`"),
            (&["remove", "vm1"], "use `fathom disk remove`"),
            (&["add"], "use `fathom disk add`"),
            (&["status"], "use `fathom list` or `fathom show`"),
            (&["create", "x"], "use `fathom img create`"),
            (&["freeze"], "use `fathom disk freeze`"),
            (&["sevre"], "did you mean 'serve'?"),
            (
                &["disk", "delete"],
                "use `fathom disk remove` (see `fathom disk --help`)",
            ),
            (&["xyzzy"], "unknown command 'xyzzy' (see `fathom --help`)"),
        ] {
            let line = line_of(args);
            assert!(line.contains(words), "{args:?}: {line}");
        }
    }

    #[test]
    fn unknown_option_suggests_the_nearest_one() {
        let line = line_of(&["serve", "a", "--vhost", "s"]);
        assert_eq!(
            line,
            "unknown option '--vhost'; did you mean '--vhost-user'? (see `fathom serve --help`)"
        );
        let line = line_of(&["serve", "a", "--qqq"]);
        assert_eq!(line, "unknown option '--qqq' (see `fathom serve --help`)");
        let line = line_of(&["list", "a"]);
        assert_eq!(line, "unexpected argument 'a' (see `fathom list --help`)");
    }

    #[test]
    fn invalid_value_suggests_the_nearest_one() {
        let line = line_of(&["serve", "null:1M", "--cache", "writebak"]);
        assert_eq!(
            line,
            "--cache: invalid value 'writebak'; did you mean 'writeback'? (see `fathom serve --help`)"
        );
        let line = line_of(&["serve", "null:1M", "--aio", "posix"]);
        assert!(
            line.contains("'posix'; use io_uring, native or threads"),
            "{line}"
        );
    }

    #[test]
    fn number_out_of_range_names_the_range() {
        for (args, words) in [
            (
                &["serve", "null:1M", "--queues", "0"][..],
                "must be 1 to 256",
            ),
            (
                &["serve", "null:1M", "--queues", "x"],
                "must be a whole number",
            ),
            (&["top", "-n", "0"], "must be 1 or more"),
        ] {
            let line = line_of(args);
            assert!(line.contains(words), "{args:?}: {line}");
        }
    }

    #[test]
    fn value_of_a_key_option_is_not_printed() {
        let line = line_of(&["serve", "null:1M", "--key", "secret"]);
        assert!(line.contains("--key") && !line.contains("secret"), "{line}");
    }
}
