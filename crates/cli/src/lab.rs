//! `fathom lab`: experiments in real guests.

use std::path::PathBuf;
use std::time::Duration;

mod wiki;

use anyhow::{Context, anyhow, bail};
use clap::{Args, Subcommand, ValueEnum};
use fathom_daemon::size::parse_size;
use fathom_lab::scenario::seqread::{self, Options, Peer};
use fathom_lab::{scratch, tracers};

/// Boot guests and measure in them
#[derive(Debug, Args)]
pub struct LabArgs {
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(Debug, Subcommand)]
enum LabCommand {
    /// Run a scenario: build a guest from this machine's kernel, boot it, measure
    Run(RunArgs),
}

#[derive(Debug, Args)]
struct RunArgs {
    #[command(subcommand)]
    scenario: Scenario,
}

#[derive(Debug, Subcommand)]
enum Scenario {
    /// 4k sequential reads with O_DIRECT, one at a time: the cost of every layer
    Seqread(SeqreadArgs),
    /// The KVM wiki's experiment: guest and host read, every layer between them is traced, and
    /// each request is followed through all of them
    Wiki(wiki::WikiArgs),
}

#[derive(Debug, Args)]
struct SeqreadArgs {
    /// Who serves the disk
    #[arg(long, value_enum, default_value = "fathom")]
    disk: DiskServer,
    /// Size of the image that is made for the run
    #[arg(long, default_value = "1G", value_parser = parse_size, conflicts_with = "image")]
    size: u64,
    /// Read this raw image instead of making one
    #[arg(long, value_name = "PATH")]
    image: Option<PathBuf>,
    /// Seconds to read
    #[arg(long, default_value_t = 10, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    runtime: u64,
    /// More options for `fathom serve`, such as --serve=--aio=native
    #[arg(long = "serve", value_name = "OPTION", allow_hyphen_values = true)]
    serve: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DiskServer {
    /// This program
    Fathom,
    /// qemu-storage-daemon
    Qsd,
}

/// Runs the command; progress goes to standard error, the result to standard output. Consoles and
/// logs that explain an error go to standard error before it.
pub fn run(args: LabArgs) -> anyhow::Result<()> {
    let LabCommand::Run(RunArgs { mut scenario }) = args.command;
    let output = match &mut scenario {
        Scenario::Seqread(_) => None,
        Scenario::Wiki(args) => Some(args.settle_output()),
    };
    // What is there already is not ours.
    let output = output.filter(|dir| !dir.exists());
    clean_up_on_signal(output)?;
    let result = match scenario {
        Scenario::Seqread(args) => seqread(args),
        Scenario::Wiki(args) => wiki::run(args),
    };
    while scratch::is_ending() {
        std::thread::park(); // the signal ends us; what failed meanwhile failed because of it
    }
    result.map_err(|error| {
        let text = error.to_string();
        let Some((line, tail)) = text.split_once('\n') else {
            return error;
        };
        if !tail.is_empty() {
            eprintln!("{tail}");
        }
        anyhow!(line.to_owned())
    })
}

/// From now on SIGINT, SIGTERM and SIGHUP remove what the run has made so far, but for rounds that
/// are complete, and then end the process as they would have. Its guests and servers end with it.
fn clean_up_on_signal(output: Option<PathBuf>) -> anyhow::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    use signal_hook::low_level::{emulate_default_handler, signal_name};
    // nohup(1) and shells have some ignored on purpose.
    let ignored = ignored_signals();
    let caught = [SIGINT, SIGTERM, SIGHUP].into_iter();
    let caught = caught.filter(|signal| ignored >> (signal - 1) & 1 == 0);
    let signals = signal_hook::iterator::Signals::new(caught);
    let mut signals = signals.context("cannot catch signals")?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            scratch::remove_all();
            tracers::remove_all();
            let kept = output.as_ref().filter(|dir| dir.join("run.json").is_file());
            let name = signal_name(signal).unwrap_or("a signal");
            match (kept, &output) {
                (Some(dir), _) => eprintln!(
                    "lab: ended by {name}; complete rounds are in {0}: fathom report {0}",
                    dir.display()
                ),
                (None, Some(dir)) => {
                    let _ = std::fs::remove_dir_all(dir); // it may not be there yet
                    eprintln!("lab: ended by {name}");
                }
                (None, None) => eprintln!("lab: ended by {name}"),
            }
            let _ = emulate_default_handler(signal);
        }
    });
    Ok(())
}

/// The signals that this process was started to ignore, a bit each (proc(5)).
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

fn seqread(args: SeqreadArgs) -> anyhow::Result<()> {
    let peer = match args.disk {
        DiskServer::Qsd => Peer::QemuStorageDaemon,
        DiskServer::Fathom => {
            Peer::Fathom(std::env::current_exe().context("cannot find this program's own file")?)
        }
    };
    if peer == Peer::QemuStorageDaemon && !args.serve.is_empty() {
        bail!("--serve is for `fathom serve`; it has no meaning with --disk qsd");
    }
    let mut serve_args = args.serve;
    if args.json {
        serve_args.push("--json".into());
    }
    let runtime = Duration::from_secs(args.runtime);
    let options = Options {
        peer,
        image: args.image,
        size: args.size,
        runtime,
        serve_args,
    };
    let report = seqread::run(&options, &mut |step| eprintln!("lab: {step}"))?;
    if args.json {
        println!("{:#}", report.to_json());
    } else {
        println!("{report}");
    }
    Ok(())
}
