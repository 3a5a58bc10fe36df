//! The help of all commands: groups of commands, examples, and the options that `-h` shows.

pub mod examples;
pub mod groups;
pub mod image_examples;
mod short;

use clap::{Command, CommandFactory as _};
use std::ffi::OsString;

/// Returns the definition of the command line with everything that `-h` and `--help` print.
pub fn command() -> Command {
    groups::with_groups(decorated(crate::Cli::command(), ""))
}

/// Returns the command that arguments are for, such as `fathom disk add`.
pub fn path_of(command: &Command, args: &[OsString]) -> String {
    let mut path = command.get_name().to_owned();
    let mut command = command;
    for word in args.iter().skip(1) {
        let Some(below) = command.find_subcommand(word) else {
            break;
        };
        path = format!("{path} {}", below.get_name());
        command = below;
    }
    path
}

/// Adds examples to a command and to its subcommands, and hides rare options from `-h`.
fn decorated(command: Command, parent: &str) -> Command {
    let path = format!("{parent} {}", command.get_name());
    let path = path.trim_start();
    let command = command.mut_subcommands(|below| decorated(below, path));
    let command = short::with_rare_options_hidden(command, path);
    let examples = examples::of(&command, path);
    if examples.is_empty() {
        return command;
    }
    let header = command.get_styles().get_header();
    let mut text = format!("{header}Examples:{header:#}");
    for example in examples {
        text.push_str("\n  ");
        text.push_str(&example);
    }
    command.after_help(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn help_of(args: &[&str]) -> String {
        let args = ["fathom"].iter().chain(args);
        let error = command().try_get_matches_from(args).unwrap_err();
        error.to_string()
    }

    /// Calls `check` with the path and the definition of each visible command.
    pub fn for_each_command(check: &mut impl FnMut(&str, &Command)) {
        fn visit(command: &Command, parent: &str, check: &mut impl FnMut(&str, &Command)) {
            let path = format!("{parent} {}", command.get_name());
            check(path.trim_start(), command);
            let below = command.get_subcommands();
            for one in below.filter(|one| !one.is_hide_set()) {
                visit(one, path.trim_start(), check);
            }
        }
        visit(&command(), "", check);
    }

    #[test]
    fn short_help_of_serve_and_convert_fits_on_a_screen() {
        for command in [&["serve", "-h"][..], &["img", "convert", "-h"]] {
            let lines = help_of(command).lines().count();
            assert!((24..=40).contains(&lines), "{command:?}: {lines} lines");
        }
    }

    #[test]
    fn short_help_is_never_longer_than_two_screens() {
        for_each_command(&mut |path, _| {
            let mut args: Vec<_> = path.split(' ').skip(1).collect();
            args.push("-h");
            let lines = help_of(&args).lines().count();
            assert!(lines <= 66, "{path} -h: {lines} lines");
        });
    }

    #[test]
    fn all_options_are_in_the_long_help() {
        let help = help_of(&["serve", "--help"]);
        let serve = command();
        let serve = serve.find_subcommand("serve").unwrap();
        for arg in serve.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let Some(name) = arg.get_long() else { continue };
            assert!(help.contains(&format!("--{name}")), "{name}");
            assert!(
                arg.get_help_heading().is_some(),
                "--{name} has no heading in `fathom serve --help`"
            );
        }
    }

    #[test]
    fn every_command_and_option_is_described() {
        for_each_command(&mut |path, command| {
            assert!(command.get_about().is_some(), "{path}");
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
                let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
                assert!(!help.is_empty(), "{path}: {}", arg.get_id());
                assert!(!help.contains("daemon"), "{path}: {help}");
            }
        });
    }

    /// Returns the names and help texts of a command and of its options.
    fn texts(path: &str, command: &Command) -> Vec<(String, String)> {
        let long_or_short = |long: Option<&clap::builder::StyledStr>, short: Option<_>| {
            let text = long.or(short).map(ToString::to_string);
            text.unwrap_or_default()
        };
        let about = long_or_short(command.get_long_about(), command.get_about());
        let mut texts = vec![(path.to_owned(), about)];
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let help = long_or_short(arg.get_long_help(), arg.get_help());
            texts.push((format!("{path}, {}", arg.get_id()), help));
            for value in arg.get_possible_values() {
                let help = value
                    .get_help()
                    .map(ToString::to_string)
                    .unwrap_or_default();
                texts.push((
                    format!("{path}, {}, {}", arg.get_id(), value.get_name()),
                    help,
                ));
            }
        }
        texts
    }

    #[test]
    fn help_is_in_plain_english() {
        use std::fmt::Write as _;
        let mut lines = String::new();
        for_each_command(&mut |path, command| {
            for (name, text) in texts(path, command) {
                for paragraph in text.split("\n\n") {
                    let paragraph = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
                    writeln!(lines, "{name}\t{paragraph}").unwrap();
                }
            }
        });
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("help.tsv");
        std::fs::write(&file, lines).unwrap();
        let tool = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tools/prose.py");
        let check = std::process::Command::new("python3")
            .arg(tool)
            .arg(&file)
            .output();
        let check = check.expect("python3 is installed by `make setup`");
        let found = String::from_utf8_lossy(&check.stdout);
        assert!(check.status.success(), "{found}");
    }
}
