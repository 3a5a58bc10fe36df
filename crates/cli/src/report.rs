//! `fathom report`: reports the results of runs.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use fathom_report::analysis::Analysis;
use fathom_report::render::csv::CsvFile;
use fathom_report::render::perfetto::Limits;
use fathom_report::render::terminal::{self, Style};
use fathom_report::{Options, analyse, cells, render};
use fathom_run::{Run, RunKind};

use fathom_units::parse_seconds;

pub mod experiment;

/// Print the result of a run, or compare runs
///
/// A report only needs the run directories, so it can be made later and on another machine.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Run directories of `fathom lab run`, `breakdown`, `bench` or `guest record`
    ///
    /// Two runs of an experiment are compared point by point.
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,

    /// Write an HTML page with pictures to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Write the tables as CSV to this directory, or the first table to FILE.csv
    ///
    /// The first table has the layers of a run or the points of an experiment. `--csv -` writes it
    /// to standard output.
    #[arg(long, value_name = "DIR|FILE.csv")]
    csv: Option<PathBuf>,

    /// Write a trace for Perfetto (https://ui.perfetto.dev) to this file
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,

    /// Maximum number of requests in the trace for Perfetto, starting with the earliest
    #[arg(long, value_name = "N", default_value_t = Limits::default().requests, requires = "perfetto")]
    perfetto_requests: usize,

    /// Limit the trace for Perfetto to the start of each round, such as 100ms [default: all]
    #[arg(long, value_name = "TIME", value_parser = parse_seconds, requires = "perfetto")]
    perfetto_window: Option<Duration>,

    /// Number of slowest requests to list [default: 50]
    #[arg(long, value_name = "N")]
    slowest: Option<usize>,
}

/// A run to report, with its name in the report and the directory of its files.
struct Source {
    name: String,
    dir: PathBuf,
    is_experiment: bool,
    /// Directory of the experiment, if `dir` is its only cell.
    experiment: Option<PathBuf>,
}

impl ReportArgs {
    /// Returns the default arguments for these runs; `json` selects the output format.
    pub fn of(runs: Vec<PathBuf>, json: bool) -> ReportArgs {
        ReportArgs {
            runs,
            html: None,
            json,
            csv: None,
            perfetto: None,
            perfetto_requests: Limits::default().requests,
            perfetto_window: None,
            slowest: None,
        }
    }
}

/// Runs the command. The names of written files go to standard error.
pub fn run(args: ReportArgs) -> anyhow::Result<()> {
    for (name, given) in [("--csv", &args.csv), ("--perfetto", &args.perfetto)] {
        if args.runs.len() > 1 && given.is_some() {
            bail!("{name} is for one run");
        }
    }
    let sources = args.runs.iter().map(|dir| source(dir));
    let sources = sources.collect::<anyhow::Result<Vec<Source>>>()?;
    let experiment = sources.iter().find(|source| source.is_experiment);
    let other = sources.iter().find(|source| !source.is_experiment);
    match (experiment, other) {
        (Some(experiment), Some(other)) => bail!(
            "{} is an experiment's run and {} is not: they cannot be compared",
            experiment.name,
            other.name
        ),
        (Some(_), None) => experiment::run(&args, &sources),
        (None, _) => requests(&args, &sources),
    }
}

/// Loads a run. An experiment with a breakdown as its only cell is reported as that breakdown.
fn source(dir: &Path) -> anyhow::Result<Source> {
    let run = Run::load(dir)?;
    let mut source = Source {
        name: name_of(dir),
        dir: dir.to_owned(),
        is_experiment: run.kind == RunKind::Experiment,
        experiment: None,
    };
    if let Some(cell) = cells::only_breakdown(dir, &run)
        && Run::load(&cell)?.kind != RunKind::Experiment
    {
        source.dir = cell;
        source.is_experiment = false;
        source.experiment = Some(dir.to_owned());
    }
    Ok(source)
}

/// Reports runs that trace requests through the layers.
fn requests(args: &ReportArgs, sources: &[Source]) -> anyhow::Result<()> {
    write_perfetto(args, sources)?;
    let only_perfetto = args.perfetto.is_some() && !args.json;
    if only_perfetto && args.csv.is_none() && args.html.is_none() {
        return Ok(()); // the Perfetto trace needs no analysis
    }
    let options = Options {
        slowest: args.slowest.unwrap_or(Options::default().slowest),
    };
    let runs = sources
        .iter()
        .map(|source| Ok((source.name.clone(), analyse(&source.dir, &options)?)))
        .collect::<anyhow::Result<Vec<(String, Analysis)>>>()?;
    let judged = judged(sources)?;
    if let Some(path) = &args.html {
        let page = match &judged {
            Some(table) => cells::html::breakdown(&runs, table),
            None => render::html::render(&runs),
        };
        write(path, page.as_bytes())?;
    }
    if let (Some(path), [(_, run)]) = (&args.csv, runs.as_slice()) {
        write_csv(path, run)?;
    }
    if args.json {
        print(&render::json::render(&analyses(&runs)))
    } else if args.csv.is_none() && args.html.is_none() {
        print_text(&runs, judged.as_ref())
    } else {
        Ok(())
    }
}

/// Loads the experiment of the only source, whose table says more than where requests spend their
/// time.
fn judged(sources: &[Source]) -> anyhow::Result<Option<cells::Table>> {
    let [one] = sources else { return Ok(None) };
    let table = one.experiment.as_deref().map(cells::Table::load);
    Ok(table.transpose()?)
}

fn write_perfetto(args: &ReportArgs, sources: &[Source]) -> anyhow::Result<()> {
    let (Some(file), [source]) = (&args.perfetto, sources) else {
        return Ok(());
    };
    let window = args.perfetto_window;
    let limits = Limits {
        requests: args.perfetto_requests,
        window_ns: window.and_then(|time| i64::try_from(time.as_nanos()).ok()),
    };
    write(file, &render::perfetto::render(&source.dir, &limits)?)
}

/// Prints the tables of a run, for commands that have just completed it.
pub fn print_run(dir: &Path) -> anyhow::Result<()> {
    let source = source(dir)?;
    if source.is_experiment {
        return experiment::print_run(dir);
    }
    let analysis = analyse(&source.dir, &Options::default())?;
    let judged = judged(std::slice::from_ref(&source))?;
    print_text(&[(source.name, analysis)], judged.as_ref())
}

/// Returns the name of a run in a comparison.
fn name_of(dir: &Path) -> String {
    let name = dir.file_name().unwrap_or(dir.as_os_str());
    name.to_string_lossy().into_owned()
}

fn analyses(runs: &[(String, Analysis)]) -> Vec<&Analysis> {
    runs.iter().map(|(_, analysis)| analysis).collect()
}

/// Prints runs; the table of a single run's experiment has its suspected limiter.
fn print_text(runs: &[(String, Analysis)], judged: Option<&cells::Table>) -> anyhow::Result<()> {
    let text = match (runs, judged) {
        ([(_, one)], Some(table)) => cells::terminal::breakdown(one, table, style()),
        ([(_, one)], None) => terminal::report(one, style()),
        (several, _) => terminal::compare(several, style()),
    };
    print(&text)
}

fn style() -> Style {
    Style {
        colour: crate::wants_colour(&std::io::stdout()),
    }
}

/// Writes all tables as files into a directory, or the layers into the named .csv file.
fn write_csv(path: &Path, run: &Analysis) -> anyhow::Result<()> {
    let files = render::csv::render(run);
    if is_csv_file(path) {
        let layers = files.iter().find(|file| file.name == "layers.csv");
        let layers = layers.context("the run has no exact breakdown: no layers to write")?;
        return write(path, layers.text.as_bytes());
    }
    write_files(path, &files)
}

fn is_csv_file(path: &Path) -> bool {
    is_stdout(path) || path.extension().is_some_and(|extension| extension == "csv")
}

fn write_files(path: &Path, files: &[CsvFile]) -> anyhow::Result<()> {
    fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
    files
        .iter()
        .try_for_each(|file| write(&path.join(file.name), file.text.as_bytes()))
}

fn print(text: &str) -> anyhow::Result<()> {
    Ok(std::io::stdout().lock().write_all(text.as_bytes())?)
}

fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    if is_stdout(path) {
        return Ok(std::io::stdout().lock().write_all(bytes)?);
    }
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("report: {} written", path.display());
    Ok(())
}
