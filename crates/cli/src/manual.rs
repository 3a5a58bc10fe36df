//! `fathom man` and `fathom completions`: what a package installs beside the program, made from the
//! same words as `--help`.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::Cli;

/// Write a manual page for every command
#[derive(Args, Debug)]
pub struct ManArgs {
    /// Where to: a directory that is there
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Print what makes a shell complete commands and options
#[derive(Args, Debug)]
pub struct CompletionsArgs {
    #[arg(value_name = "SHELL", value_enum)]
    shell: Shell,
}

pub fn man(args: &ManArgs) -> anyhow::Result<()> {
    // Not by its own `generate_to`: that has pages of hidden commands, too.
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    page(&command, &args.directory)
}

/// The page of a command, and those of the commands below it.
fn page(command: &clap::Command, directory: &Path) -> anyhow::Result<()> {
    let name = command.get_display_name().unwrap_or(command.get_name());
    let path = directory.join(format!("{name}.1"));
    let mut text = Vec::new();
    clap_mangen::Man::new(command.clone())
        .title(name.to_uppercase())
        .source(concat!("fathom ", env!("CARGO_PKG_VERSION")))
        .manual("Fathom")
        .render(&mut text)?;
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    let below = command.get_subcommands();
    { below.filter(|below| !below.is_hide_set()) }.try_for_each(|below| page(below, directory))
}

pub fn completions(args: &CompletionsArgs) -> anyhow::Result<()> {
    let mut command = Cli::command();
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "fathom", &mut text);
    // A pipe that is closed early is no panic.
    io::stdout().lock().write_all(&text)?;
    Ok(())
}
