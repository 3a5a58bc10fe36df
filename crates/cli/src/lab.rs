//! `fathom lab`: runs experiments in real guests.

mod order;
mod until;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use clap::{Args, Subcommand};
use fathom_lab::experiment::runner::{Runner, Until, rough};
use fathom_lab::experiment::{self, Context, Experiment, Settings, nested};
use fathom_lab::{restore_all_settings, scratch, tracers};
use serde_json::{Value, json};

use crate::report::ReportArgs;
use until::Goal;

pub use order::wrapped;

/// Run experiments in guests
///
/// An experiment boots virtual machines on this host, measures in them, and writes a run directory
/// for `fathom report`.
#[derive(Debug, Args)]
pub struct LabArgs {
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(Debug, Subcommand)]
enum LabCommand {
    /// List the experiments
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Describe an experiment: its question, its parameters and its results
    Describe {
        /// Name of the experiment, such as seqread
        experiment: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Run an experiment, or continue an interrupted run
    #[command(args_conflicts_with_subcommands = true)]
    Run(RunArgs),
    /// Run one cell; `fathom lab run --kvm-host` starts this command in its KVM host
    #[command(hide = true)]
    Cell(CellArgs),
}

#[derive(Debug, Args)]
struct RunArgs {
    /// Run directory of an interrupted run to continue, or of a run that gets more rounds
    #[arg(long = "continue", value_name = "RUN")]
    unfinished: Option<PathBuf>,
    /// Total number of rounds to which --continue raises the run
    #[arg(long, value_name = "N", requires = "unfinished",
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    #[command(flatten)]
    show: Show,
    #[command(flatten)]
    how: How,
    #[command(subcommand)]
    order: Option<order::Ordered>,
}

// Options of the output. (A doc comment would become the commands' description.)
#[derive(Debug, Clone, Args)]
struct Show {
    /// Print the cells of the experiment and their expected time, without running them
    #[arg(long, help_heading = "Run")]
    dry_run: bool,
    /// Compare the result with this earlier run of the same experiment
    #[arg(long, value_name = "RUN", help_heading = "Run")]
    against: Option<PathBuf>,
    /// Print JSON
    #[arg(long, help_heading = "Run")]
    json: bool,
}

// Options of how cells run. (A doc comment would become the commands' description.)
#[derive(Debug, Clone, Copy, Args)]
struct How {
    /// Verify each suspected limit by another run of the cell
    ///
    /// The other run has more of the limited resource, such as one more thread or twice the queue
    /// depth.
    #[arg(long, help_heading = "Run")]
    confirm: bool,
    /// Run the experiment in an emulated machine with KVM, for hosts without KVM
    ///
    /// All layers are real there, but times are longer than on hardware.
    #[arg(long, help_heading = "Run")]
    kvm_host: bool,
    #[command(flatten)]
    goal: Goal,
}

#[derive(Debug, Args)]
struct CellArgs {
    experiment: String,
    /// Values of all parameters, as a JSON object
    #[arg(long, value_name = "JSON")]
    settings: String,
    /// Folder of the cell to create
    folder: PathBuf,
}

/// Runs the command. Progress goes to standard error, the result to standard output.
///
/// Consoles and logs that explain an error are written to standard error before it.
pub fn run(args: LabArgs) -> anyhow::Result<()> {
    match args.command {
        LabCommand::List { json } => list(json),
        LabCommand::Describe { experiment, json } => describe(find(&experiment)?, json),
        LabCommand::Run(args) => {
            let (mut runner, output, show, how) = match (args.unfinished, args.order) {
                (Some(dir), _) => {
                    let mut runner = Runner::resume(&dir)?;
                    if let Some(rounds) = args.rounds {
                        runner.raise_rounds(rounds)?;
                    }
                    (runner, Output { dir, ours: false }, args.show, args.how)
                }
                (None, Some(ordered)) => {
                    let dir = ordered.output();
                    let runner = Runner::new(&ordered.order, &dir)?;
                    (
                        runner,
                        Output { dir, ours: true },
                        ordered.show,
                        ordered.how,
                    )
                }
                (None, None) => bail!("name an experiment (`fathom lab list`), or --continue RUN"),
            };
            if how.confirm {
                runner.confirm();
            }
            if how.kvm_host {
                runner.use_kvm_host()?;
            }
            if show.dry_run {
                return dry_run(&runner, how);
            }
            if let Some(before) = &show.against {
                crate::report::experiment::check(before, runner.name())?;
            }
            under_way(Some(output.clone()), || {
                measure(runner, &output, &show, how.goal)
            })
        }
        LabCommand::Cell(args) => under_way(None, || cell(&args)),
    }
}

fn find(name: &str) -> anyhow::Result<&'static dyn Experiment> {
    experiment::find(name).with_context(|| {
        let names: Vec<&str> = experiment::ALL.iter().map(|one| one.name()).collect();
        fathom_units::unknown_name("experiment", name, &names, "'fathom lab list' lists all")
    })
}

fn list(json: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        let all = experiment::ALL.iter();
        let all = all.map(|one| json!({ "name": one.name(), "about": one.about() }));
        writeln!(out, "{}", Value::from_iter(all))?;
        return Ok(());
    }
    let width = experiment::ALL.iter().map(|one| one.name().len()).max();
    let width = width.unwrap_or_default();
    for one in experiment::ALL {
        writeln!(out, "{:<width$}  {}", one.name(), one.about())?;
    }
    Ok(())
}

fn describe(one: &dyn Experiment, json: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", described(one))?;
        return Ok(());
    }
    writeln!(out, "{}: {}\n", one.name(), one.about())?;
    for paragraph in one
        .description()
        .split('\n')
        .filter(|text| !text.is_empty())
    {
        writeln!(out, "{}\n", wrapped(paragraph))?;
    }
    writeln!(out, "Parameters:")?;
    for parameter in one.parameters() {
        writeln!(out, "  --{}: {}", parameter.name, parameter.about)?;
        let default = match parameter.default {
            "" => "none, or depends on the machine".to_owned(),
            _ => parameter.defaults().join(", "),
        };
        let values = format!("{} [default: {default}]", parameter.kind.range());
        for line in wrapped(&values).lines() {
            writeln!(out, "      {line}")?;
        }
    }
    Ok(())
}

fn described(one: &dyn Experiment) -> Value {
    let parameters = one.parameters().iter().map(|parameter| {
        let default: &[_] = &match parameter.default {
            "" => Vec::new(),
            _ => parameter.defaults(),
        };
        json!({
            "name": parameter.name,
            "about": parameter.about,
            "values": parameter.kind.range(),
            "default": default,
        })
    });
    json!({
        "name": one.name(),
        "about": one.about(),
        "description": one.description(),
        "parameters": Value::from_iter(parameters),
    })
}

fn dry_run(runner: &Runner, how: How) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let mut total = std::time::Duration::ZERO;
    for (planned, label, time) in runner.left() {
        writeln!(out, "{}  round {}  {label}", planned.id, planned.round)?;
        total += time;
    }
    let trials = match how.confirm {
        true => ", and up to as long again for the trials of suspected limiters",
        false => "",
    };
    let more = how.goal.more();
    writeln!(out, "about {} in all{trials}{more}", rough(total))?;
    Ok(runner.check_needs()?)
}

/// Returns the context in which all cells run.
fn context() -> anyhow::Result<Context> {
    let fathom = std::env::current_exe().context("cannot find this program's own file")?;
    Ok(Context { fathom })
}

/// A run directory.
#[derive(Clone, Debug)]
struct Output {
    dir: PathBuf,
    /// Whether this run creates the directory. Otherwise the run continues an earlier one, whose
    /// directory may contain other files.
    ours: bool,
}

impl Output {
    /// Removes the directory of a run without a complete cell, if this run has created it.
    fn discard(&self) {
        if self.ours {
            let _ = fs::remove_dir_all(&self.dir); // the directory may not exist yet
        }
    }
}

fn measure(runner: Runner, output: &Output, show: &Show, goal: Goal) -> anyhow::Result<()> {
    let dir = &output.dir;
    let shown = dir.display();
    let mut watch = goal.watch();
    let mut decide = { watch.as_mut() }.map(|watch| move |dir: &Path| watch.decide(dir));
    let until = decide.as_mut().map(|decide| decide as &mut Until);
    let ran = runner.run(&context()?, until, &mut |step| eprintln!("lab: {step}"));
    if let Err(error) = ran {
        let text = error.to_string();
        let (line, tail) = text.split_once('\n').unwrap_or((&text, ""));
        match what_is_there(dir) {
            There::Nothing => {
                output.discard();
                bail!("{text}");
            }
            There::Part(part) => {
                let part = part.display();
                bail!("{line}; the earlier results are in {part}: fathom report {part}\n{tail}");
            }
            There::Cells => bail!(
                "{line}; the complete cells are in {shown}: fathom lab run --continue {shown} \
                 runs the rest\n{tail}"
            ),
        }
    }
    let runs = show.against.iter().chain([dir]).cloned().collect();
    crate::report::run(ReportArgs::of(runs, show.json))?;
    if !show.json && show.against.is_none() {
        print_server(dir)?;
    }
    eprintln!("lab: the run is in {shown}; fathom report {shown} prints it again");
    Ok(())
}

/// Prints the final output of the server, which has Fathom's times by stage, if there is one cell.
fn print_server(dir: &Path) -> anyhow::Result<()> {
    let [folder] = &folders(dir)[..] else {
        return Ok(());
    };
    if let Ok(text) = fs::read_to_string(folder.join("server.txt")) {
        write!(
            std::io::stdout(),
            "\nOutput of the server at its end\n{text}"
        )?;
    }
    Ok(())
}

/// Returns the folders of the cells.
fn folders(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir.join("cells")).into_iter().flatten();
    entries.flatten().map(|entry| entry.path()).collect()
}

/// The results of an interrupted run.
enum There {
    Nothing,
    /// A part of the first cell, which `fathom report` accepts.
    Part(PathBuf),
    Cells,
}

fn what_is_there(dir: &Path) -> There {
    let folders = fs::read_dir(dir.join("cells")).into_iter().flatten();
    let folders: Vec<PathBuf> = folders.flatten().map(|entry| entry.path()).collect();
    if folders
        .iter()
        .any(|folder| folder.join("cell.json").is_file())
    {
        return There::Cells;
    }
    let part = folders
        .into_iter()
        .find(|folder| folder.join("run.json").is_file());
    part.map_or(There::Nothing, There::Part)
}

fn cell(args: &CellArgs) -> anyhow::Result<()> {
    let one = find(&args.experiment)?;
    let settings = serde_json::from_str(&args.settings).context("--settings")?;
    scratch::sweep();
    nested::run_here(
        one,
        &Settings(settings),
        &context()?,
        &args.folder,
        &mut |step| eprintln!("lab: {step}"),
    )?;
    Ok(())
}

/// Runs `work`, which may take long.
///
/// A signal ends the process and removes its temporary files. A run directory with results stays.
fn under_way(
    output: Option<Output>,
    work: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    clean_up_on_signal(output)?;
    let result = work();
    while scratch::is_ending() {
        std::thread::park(); // the signal caused the error, and will end the process
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

/// Makes SIGINT, SIGTERM and SIGHUP clean up and then end the process, from now on.
///
/// The clean-up removes everything incomplete, and restores the host's settings. Guests and servers
/// of the run end with the process.
fn clean_up_on_signal(output: Option<Output>) -> anyhow::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    use signal_hook::low_level::{emulate_default_handler, signal_name};
    // nohup(1) and shells ignore some signals on purpose.
    let ignored = ignored_signals();
    let caught = [SIGINT, SIGTERM, SIGHUP].into_iter();
    let caught = caught.filter(|signal| ignored >> (signal - 1) & 1 == 0);
    let signals = signal_hook::iterator::Signals::new(caught);
    let mut signals = signals.context("cannot catch signals")?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            scratch::remove_all();
            tracers::remove_all();
            restore_all_settings();
            let name = signal_name(signal).unwrap_or("a signal");
            let there = output.as_ref().map(|output| what_is_there(&output.dir));
            let said = match (&output, there) {
                (Some(Output { dir, .. }), Some(There::Cells)) => format!(
                    "; the cells that had ended are in {0}: fathom lab run --continue {0} runs the \
                     rest",
                    dir.display()
                ),
                (_, Some(There::Part(part))) => format!(
                    "; complete rounds are in {0}: fathom report {0}",
                    part.display()
                ),
                (Some(output), _) => {
                    output.discard();
                    String::new()
                }
                (None, _) => String::new(),
            };
            // The reader of stderr may be gone; the process must end nevertheless.
            let _ = writeln!(std::io::stderr(), "lab: ended by {name}{said}");
            let _ = emulate_default_handler(signal);
        }
    });
    Ok(())
}

/// Returns the signals that this process ignored at its start, as a bit mask (proc(5)).
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}
