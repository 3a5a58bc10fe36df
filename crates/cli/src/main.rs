//! The `fathom` command: parses the arguments, starts logging, and runs the subcommand.

// `print!` panics when the reader of a pipe has closed it (`fathom lab list | head`).
#![deny(clippy::print_stdout)]

mod advise;
mod aio;
mod backend;
mod backup;
mod base;
mod bench;
mod bitmap;
#[cfg(test)]
mod book_tests;
mod breakdown;
mod commit;
mod completions;
mod disk;
mod filters;
mod fleet;
mod group;
mod guest;
mod guest_run;
mod help;
mod img;
mod jobs;
mod lab;
mod libvirt_hook;
mod location_arg;
mod manual;
mod mirror;
mod redact;
mod report;
mod run_command;
mod sandbox_arg;
mod serve;
mod servers;
mod show;
mod slow;
mod snapshot;
mod stats;
mod stream;
mod target;
mod temporary_sockets;
mod top;
mod trace;
mod upgrade;
mod usage;

use anyhow::{Context, bail};
use backend::Meant;
use clap::{FromArgMatches as _, Parser, Subcommand};
use fathom_daemon::{begin_tenant, serve_tenant, start_successors, survive_size_limit};
use fathom_host::stderr::Stderr;
use fathom_metrics::{Events, Repeats};
use fathom_storage::cached::finder;
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Serve disks to virtual machines and show where their requests spend time
#[derive(Debug, Parser)]
#[command(name = "fathom", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(Box<serve::ServeArgs>),
    Disk(disk::DiskCommand),
    List(disk::ListArgs),
    #[command(visible_alias = "info")]
    Show(show::ShowArgs),
    Stats(stats::StatsArgs),
    Slow(slow::SlowArgs),
    Top(top::TopArgs),
    Advise(advise::AdviseArgs),
    Set(filters::SetArgs),
    Group(group::GroupCommand),
    Backup(backup::BackupCommand),
    Bitmap(bitmap::BitmapCommand),
    Mirror(mirror::MirrorCommand),
    Snapshot(snapshot::SnapshotArgs),
    Commit(commit::CommitArgs),
    Stream(stream::StreamCommand),
    Jobs(jobs::JobsArgs),
    Resize(stats::ResizeArgs),
    Quit(stats::QuitArgs),
    Upgrade(upgrade::UpgradeArgs),
    Trace(trace::TraceArgs),
    Filters(filters::FiltersArgs),
    Bench(Box<bench::BenchArgs>),
    Breakdown(breakdown::BreakdownArgs),
    Img(img::ImgArgs),
    Base(base::BaseCommand),
    Fleet(fleet::FleetCommand),
    Lab(lab::LabArgs),
    Report(report::ReportArgs),
    Guest(guest::GuestArgs),
    Man(manual::ManArgs),
    Completions(completions::CompletionsArgs),
    #[command(hide = true)]
    LibvirtHook(libvirt_hook::LibvirtHookArgs),
    /// Serve the disks of one tenant; `fathom serve` starts this process
    #[command(hide = true)]
    Tenant {
        name: String,
    },
    /// Keep a base image in the cache; the first server that uses the image starts this process
    #[command(hide = true)]
    BaseKeeper {
        place: std::path::PathBuf,
    },
    /// Start the successors of a server; the server starts this process
    #[command(hide = true)]
    Starter {
        sandbox: fathom_sandbox::Mode,
        #[arg(last = true)]
        arguments: Vec<OsString>,
    },
}

fn main() -> ExitCode {
    completions::complete();
    let mut args: Vec<_> = std::env::args_os().collect();
    match backend::understand(&args) {
        Meant::AsTheyAre => {}
        Meant::Serve(meant) => args = meant,
        Meant::Done(code) => return code,
    }
    let cli = match parse(&args) {
        Ok(cli) => cli,
        Err(error) => {
            let command = help::path_of(&help::command(), &args);
            return usage::report(&error, &command);
        }
    };
    if let Command::Serve(served) = &cli.command
        && let (Some(command), None) = (&served.run, &served.run_dir)
    {
        return run_command::run(served, command, &args).unwrap_or_else(|error| {
            eprintln!("fathom: {}", one_line(&error));
            ExitCode::FAILURE
        });
    }
    survive_size_limit();
    finder::install_check(fathom_base::check_greeting);
    let repeats = Repeats::default();
    let events = Events::default();
    let tenant = match &cli.command {
        Command::Tenant { .. } => match begin_tenant(events.clone()) {
            Ok(tenant) => Some(tenant),
            Err(error) => {
                eprintln!("fathom: {error}");
                return ExitCode::FAILURE;
            }
        },
        _ => None,
    };
    let mut log = match start_logging(&cli.command, &repeats, &events) {
        Ok(log) => log,
        Err(error) => {
            eprintln!("fathom: --log: {error}");
            return ExitCode::from(usage::EXIT);
        }
    };
    let result = match cli.command {
        Command::Serve(given) => serve::run(*given, events, args),
        Command::Disk(args) => disk::run(args),
        Command::List(args) => disk::list(args),
        Command::Show(args) => show::run(args),
        Command::Stats(args) => stats::run(args),
        Command::Slow(args) => slow::run(&args),
        Command::Top(args) => top::run(args),
        Command::Advise(args) => advise::run(args),
        Command::Set(args) => filters::set(args),
        Command::Group(args) => group::run(args),
        Command::Backup(args) => backup::run(args),
        Command::Bitmap(args) => bitmap::run(args),
        Command::Mirror(args) => mirror::run(args),
        Command::Snapshot(args) => snapshot::run(&args),
        Command::Commit(args) => commit::run(args),
        Command::Stream(args) => stream::run(args),
        Command::Jobs(args) => jobs::run(&args),
        Command::Resize(args) => stats::resize(args),
        Command::Quit(args) => stats::quit(args),
        Command::Upgrade(args) => upgrade::run(args),
        Command::Trace(args) => trace::run(args),
        Command::Filters(args) => filters::list(args),
        Command::Bench(args) => bench::run(*args),
        Command::Breakdown(args) => breakdown::run(args),
        Command::Img(args) => img::run(args),
        Command::Base(args) => base::run(args),
        Command::Fleet(args) => fleet::run(args),
        Command::BaseKeeper { .. } => base::keep(),
        Command::Lab(args) => lab::run(args),
        Command::Report(args) => report::run(args),
        Command::Guest(args) => guest::run(args),
        Command::LibvirtHook(args) => libvirt_hook::run(args),
        Command::Man(args) => manual::man(&args),
        Command::Completions(args) => completions::completions(&args),
        Command::Starter { sandbox, arguments } => {
            start_successors(sandbox, &arguments).map_err(Into::into)
        }
        Command::Tenant { .. } => tenant.map_or(Ok(()), serve_tenant).map_err(Into::into),
    };
    repeats.tell();
    let error = result.err().filter(|error| !is_broken_pipe(error));
    if let Some(error) = &error {
        let line = format!("fathom: {}\n", one_line(error));
        // If stderr is not read, the exit status still reports the error.
        let _ = match &mut log {
            Some(log) => log.write_all(line.as_bytes()),
            None => std::io::stderr().write_all(line.as_bytes()),
        };
    }
    if let Some(log) = log {
        log.drain();
    }
    match error {
        None => ExitCode::SUCCESS,
        Some(_) => ExitCode::FAILURE,
    }
}

fn parse(args: &[OsString]) -> Result<Cli, clap::Error> {
    let mut command = help::command();
    let mut matches = command.try_get_matches_from_mut(args)?;
    let cli = Cli::from_arg_matches_mut(&mut matches);
    cli.map_err(|error| error.format(&mut command))
}

/// Starts logging to standard error, which may be a terminal or a journal.
///
/// Servers log through a queue with a thread of its own, so that a slow reader cannot block them.
/// The queue is returned so that it can be drained at the end.
fn start_logging(
    command: &Command,
    repeats: &Repeats,
    events: &Events,
) -> anyhow::Result<Option<Stderr>> {
    let filter = match command {
        Command::Serve(args) => args.log.clone(),
        _ => None,
    };
    let filter = filter.or_else(|| std::env::var("FATHOM_LOG").ok());
    let usual = match command {
        // The command reports its errors itself.
        Command::Img(_) => "warn,fathom_storage=off,object_store=off,rustls_platform_verifier=off",
        // The servers that use the image report these errors.
        Command::BaseKeeper { .. } => "off,fathom_base=warn",
        // The user of `--run` needs to see problems only.
        Command::Serve(args) if args.run_dir.is_some() => "warn,fuser=off",
        // The crate reports unknown requests of the kernel, and each end of a session.
        _ => "info,fuser=off",
    };
    let filter = filter.as_deref().unwrap_or(usual);
    check_levels(filter)?;
    let filter: EnvFilter = filter.parse()?;
    let queue = match command {
        Command::Serve(_) | Command::Tenant { .. } => {
            Some(Stderr::start().context("cannot start its thread")?)
        }
        _ => None,
    };
    let writer = match &queue {
        Some(queue) => BoxMakeWriter::new(redact::Redacting(queue.clone())),
        None => BoxMakeWriter::new(redact::Redacting(std::io::stderr)),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(wants_colour(&std::io::stderr()))
        .with_target(false)
        // With a broken stderr, tracing-subscriber would report the error by eprintln!, which
        // panics on the thread that logs.
        .log_internal_errors(false)
        .finish()
        .with(repeats.clone())
        .with(events.clone())
        .init();
    Ok(queue)
}

/// Rejects unknown levels, which would be taken for a module name and turn off all other logs.
fn check_levels(filter: &str) -> anyhow::Result<()> {
    let mut words = filter
        .split(',')
        .map(str::trim)
        .filter(|word| !word.is_empty());
    match words.find(|word| !word.contains('=') && word.parse::<LevelFilter>().is_err()) {
        None => Ok(()),
        Some(word) => bail!(
            "'{word}' is not a level: write error, warn, info, debug, trace or off, \
             or MODULE=LEVEL"
        ),
    }
}

/// Whether the stream is a terminal and colours are not disabled (<https://no-color.org>).
pub fn wants_colour(stream: &impl IsTerminal) -> bool {
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    stream.is_terminal() && !no_colour
}

/// Whether the reader of standard output has closed it (`fathom trace FILE | head`).
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Formats an error and its causes as one line for the user.
///
/// Most errors contain their cause already, so causes are not repeated.
fn one_line(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(fathom_units::cause) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    // Another user may have chosen a name in it: escape control characters.
    fathom_img::shown(&fathom_units::redacted(&line))
}
