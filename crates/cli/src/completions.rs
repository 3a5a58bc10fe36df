//! `fathom completions`: completion of commands, options and their values in shells.
//!
//! The shell's script runs `fathom` with `FATHOM_COMPLETE` set, which prints the candidates. The
//! shell can therefore offer the disks that are served at that moment.

use crate::servers::{disks, running};
use clap::{Arg, Args, Command, ValueHint};
use clap_complete::Shell;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use clap_complete::env::{CompleteEnv, Shells};
use fathom_filters::FILTERS;
use std::ffi::OsStr;
use std::io::{self, Write};

/// Environment variable with which a shell's script requests candidates.
const VARIABLE: &str = "FATHOM_COMPLETE";

/// Print a completion script for a shell
///
/// The package installs the scripts. Without the package, add a line such as
/// `source <(fathom completions bash)` to ~/.bashrc.
#[derive(Args, Debug)]
pub struct CompletionsArgs {
    /// Shell that the script is for
    #[arg(value_name = "SHELL", value_enum)]
    shell: Shell,
}

pub fn completions(args: &CompletionsArgs) -> anyhow::Result<()> {
    let name = args.shell.to_string();
    let shells = Shells::builtins();
    let shell = shells.completer(&name).expect("all shells are built in");
    let mut text = Vec::new();
    shell.write_registration(VARIABLE, "fathom", "fathom", "fathom", &mut text)?;
    // A pipe that is closed early must not cause a panic.
    io::stdout().lock().write_all(&text)?;
    Ok(())
}

/// Prints candidates and exits if a shell's script requests them.
pub fn complete() {
    CompleteEnv::with_factory(command).var(VARIABLE).complete();
}

fn command() -> Command {
    with_candidates(crate::help::command())
}

fn with_candidates(command: Command) -> Command {
    command
        .mut_args(with_candidates_of_arg)
        .mut_subcommands(with_candidates)
}

/// Words in the value name of an option whose value is a path.
const PATHS: [&str; 8] = [
    "FILE", "PATH", "DIR", "DISK", "IMAGE", "SOCKET", "RUN", "TRACE",
];

fn with_candidates_of_arg(arg: Arg) -> Arg {
    let names = arg.get_value_names().unwrap_or_default();
    let is_path = names
        .iter()
        .any(|name| PATHS.iter().any(|path| name.contains(path)));
    match arg.get_id().as_str() {
        "disk_or_server" => arg.add(ArgValueCompleter::new(disk_names)),
        "server" | "named" => arg.add(ArgValueCompleter::new(servers)),
        "filters" | "filter" => arg.add(ArgValueCompleter::new(filters)),
        _ if is_path
            && arg.get_action().takes_values()
            && arg.get_value_hint() == ValueHint::Unknown =>
        {
            arg.value_hint(ValueHint::AnyPath)
        }
        _ => arg,
    }
}

/// Returns the disk names that begin with `text`, of all servers.
fn disk_names(text: &OsStr) -> Vec<CompletionCandidate> {
    let all = running().filter_map(|(_, server)| disks(&server).ok());
    let names = all.flatten().map(|disk| {
        let about = format!("{}, {}", disk.disk, fathom_units::Size(disk.size));
        CompletionCandidate::new(disk.name).help(Some(about.into()))
    });
    beginning(text, names)
}

/// Returns the servers' process ids that begin with `text`.
fn servers(text: &OsStr) -> Vec<CompletionCandidate> {
    let pids = running().map(|(pid, _)| CompletionCandidate::new(pid.to_string()));
    beginning(text, pids)
}

/// Returns the filters whose names begin with `text`.
fn filters(text: &OsStr) -> Vec<CompletionCandidate> {
    let known = FILTERS.iter().map(|filter| {
        CompletionCandidate::new(filter.about.name).help(Some(filter.about.what.into()))
    });
    beginning(text, known)
}

fn beginning(
    text: &OsStr,
    candidates: impl Iterator<Item = CompletionCandidate>,
) -> Vec<CompletionCandidate> {
    let Some(text) = text.to_str() else {
        return Vec::new();
    };
    let fits = |one: &CompletionCandidate| {
        let value = one.get_value().to_str();
        value.is_some_and(|value| value.starts_with(text))
    };
    candidates.filter(fits).collect()
}
