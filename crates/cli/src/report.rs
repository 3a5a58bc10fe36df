//! `fathom report`: what runs have to say.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use fathom_report::analysis::Analysis;
use fathom_report::render::perfetto::Limits;
use fathom_report::render::terminal::{self, Style};
use fathom_report::{Options, analyse, render};

use crate::bench::parse_duration;

/// Print a run, or compare several
///
/// A report is made from the run directory alone: an old run can be reported
/// again, and runs of different machines can be compared anywhere.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Run directories, of `fathom lab run`, `breakdown` or `guest record`
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,

    /// Write a page with pictures, which needs no network, to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Print JSON (docs/report.md)
    #[arg(long)]
    json: bool,

    /// Write the tables as CSV files into this directory, or the layers alone into FILE.csv
    #[arg(long, value_name = "DIR|FILE.csv")]
    csv: Option<PathBuf>,

    /// Write a trace for Perfetto (https://ui.perfetto.dev) to this file
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,

    /// How many requests the trace for Perfetto shows, the earliest
    #[arg(long, value_name = "N", default_value_t = Limits::default().requests, requires = "perfetto")]
    perfetto_requests: usize,

    /// Of each round, show only requests that began this long after its first
    #[arg(long, value_name = "TIME", value_parser = parse_duration, requires = "perfetto")]
    perfetto_window: Option<Duration>,

    /// How many of the slowest requests are kept one by one
    #[arg(long, value_name = "N", default_value_t = Options::default().slowest)]
    slowest: usize,
}

/// Runs the command. What is written to files is told on standard error.
pub fn run(args: ReportArgs) -> anyhow::Result<()> {
    for (name, given) in [("--csv", &args.csv), ("--perfetto", &args.perfetto)] {
        if args.runs.len() > 1 && given.is_some() {
            bail!("{name} is for one run");
        }
    }
    write_perfetto(&args)?;
    let only_perfetto = args.perfetto.is_some() && !args.json;
    if only_perfetto && args.csv.is_none() && args.html.is_none() {
        return Ok(()); // which needs no analysis
    }
    let options = Options {
        slowest: args.slowest,
    };
    let runs = args
        .runs
        .iter()
        .map(|dir| Ok((name_of(dir), analyse(dir, &options)?)))
        .collect::<anyhow::Result<Vec<(String, Analysis)>>>()?;
    if let Some(path) = &args.html {
        write(path, render::html::render(&runs).as_bytes())?;
    }
    if let (Some(path), [(_, run)]) = (&args.csv, runs.as_slice()) {
        write_csv(path, run)?;
    }
    if args.json {
        print(&render::json::render(&analyses(&runs)))
    } else if args.csv.is_none() && args.html.is_none() {
        print_text(&runs)
    } else {
        Ok(())
    }
}

fn write_perfetto(args: &ReportArgs) -> anyhow::Result<()> {
    let (Some(file), [dir]) = (&args.perfetto, args.runs.as_slice()) else {
        return Ok(());
    };
    let window = args.perfetto_window;
    let limits = Limits {
        requests: args.perfetto_requests,
        window_ns: window.and_then(|time| i64::try_from(time.as_nanos()).ok()),
    };
    write(file, &render::perfetto::render(dir, &limits)?)
}

/// Prints a run's tables, for the commands that have just made it.
pub fn print_run(dir: &Path) -> anyhow::Result<()> {
    let analysis = analyse(dir, &Options::default())?;
    print_text(&[(name_of(dir), analysis)])
}

/// What a run is called in a comparison.
fn name_of(dir: &Path) -> String {
    let name = dir.file_name().unwrap_or(dir.as_os_str());
    name.to_string_lossy().into_owned()
}

fn analyses(runs: &[(String, Analysis)]) -> Vec<&Analysis> {
    runs.iter().map(|(_, analysis)| analysis).collect()
}

fn print_text(runs: &[(String, Analysis)]) -> anyhow::Result<()> {
    let style = Style {
        colour: crate::wants_colour(&std::io::stdout()),
    };
    match runs {
        [(_, one)] => print(&terminal::report(one, style)),
        several => print(&terminal::compare(several, style)),
    }
}

/// All tables as files of a directory, or the layers as the one file that is named.
fn write_csv(path: &Path, run: &Analysis) -> anyhow::Result<()> {
    let files = render::csv::render(run);
    if path.extension().is_some_and(|extension| extension == "csv") {
        let layers = files.iter().find(|file| file.name == "layers.csv");
        let layers = layers.context("the run has no exact breakdown: no layers to write")?;
        return write(path, layers.text.as_bytes());
    }
    fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
    files
        .iter()
        .try_for_each(|file| write(&path.join(file.name), file.text.as_bytes()))
}

fn print(text: &str) -> anyhow::Result<()> {
    std::io::stdout().lock().write_all(text.as_bytes())?;
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("report: {} written", path.display());
    Ok(())
}
