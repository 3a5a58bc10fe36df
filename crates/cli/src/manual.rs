//! `fathom man`: generates manual pages from the definitions of the commands.

mod sections;

use std::ffi::OsString;
use std::fs;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;
use std::process::{Command as Process, Stdio};

use anyhow::{Context, bail};
use clap::{Args, Command, CommandFactory};
use sections::Page;

use crate::Cli;

/// Print a manual page, or write all pages to a directory
///
/// On a terminal the page is shown by man(1). Otherwise the command prints its source for groff.
#[derive(Args, Debug)]
pub struct ManArgs {
    /// Command of the page, such as serve or disk add, or an existing directory for all pages
    #[arg(value_name = "COMMAND|DIR", required = true)]
    words: Vec<OsString>,
}

pub fn man(args: &ManArgs) -> anyhow::Result<()> {
    let command = all_commands();
    if let Some(found) = find(&command, &args.words) {
        return show(&source(found)?);
    }
    match &args.words[..] {
        [directory] if is_directory(directory) => write_all(&command, Path::new(directory)),
        words => {
            let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
            let words = words.join(" ");
            bail!(
                "'{words}' is neither a command nor a directory; `fathom --help` lists the commands"
            )
        }
    }
}

/// Returns the command line with all commands and all their options.
fn all_commands() -> Command {
    let mut command = with_all_options(Cli::command()).disable_help_subcommand(true);
    command.build();
    command
}

/// Shows all options in `-h`, because a page does not describe options that `-h` hides.
fn with_all_options(command: Command) -> Command {
    let command = command.mut_args(|arg| arg.hide_short_help(false));
    command.mut_subcommands(with_all_options)
}

/// Finds a command by its words: `disk add`, `fathom disk add` or `fathom-disk-add`.
fn find<'a>(command: &'a Command, words: &[OsString]) -> Option<&'a Command> {
    let words: Option<Vec<&str>> = words.iter().map(|word| word.to_str()).collect();
    let words = words?;
    let words: Vec<&str> = match words[..] {
        [name] if name.starts_with("fathom-") => name.split('-').collect(),
        _ => words,
    };
    let words = words.strip_prefix(&["fathom"]).unwrap_or(&words);
    words.iter().try_fold(command, |one, word| {
        let found = one.find_subcommand(word);
        found.filter(|found| !found.is_hide_set())
    })
}

/// Whether the word is a directory or looks like a path, so that a missing one is reported.
fn is_directory(word: &OsString) -> bool {
    Path::new(word).is_dir() || word.to_string_lossy().contains('/')
}

fn source(command: &Command) -> io::Result<Vec<u8>> {
    Page::new(command).source()
}

/// Writes the page of a command and those of its subcommands.
fn write_all(command: &Command, directory: &Path) -> anyhow::Result<()> {
    let name = command.get_display_name().unwrap_or(command.get_name());
    let path = directory.join(format!("{name}.1"));
    let written = fs::write(&path, source(command)?);
    written.with_context(|| format!("cannot write {}", path.display()))?;
    let below = command.get_subcommands();
    { below.filter(|below| !below.is_hide_set()) }.try_for_each(|below| write_all(below, directory))
}

/// Shows a page with man(1) on a terminal. Otherwise, or without man(1), prints its source.
fn show(source: &[u8]) -> anyhow::Result<()> {
    if io::stdout().is_terminal() && show_by_man(source).is_ok() {
        return Ok(());
    }
    Ok(io::stdout().lock().write_all(source)?)
}

fn show_by_man(source: &[u8]) -> io::Result<()> {
    let mut man = Process::new("man");
    let mut man = man.args(["-l", "-"]).stdin(Stdio::piped()).spawn()?;
    if let Some(mut input) = man.stdin.take() {
        // The reader may close the page before its end.
        let _ = input.write_all(source);
    }
    match man.wait()?.success() {
        true => Ok(()),
        false => Err(io::Error::other("man failed")),
    }
}
