//! Reports of experiments: tables of cells.

use std::path::Path;

use anyhow::{anyhow, bail};
use fathom_report::cells::{self, Comparison, Table};

use super::{ReportArgs, Source, is_csv_file, print, style, write, write_files};

/// Reports the run of one experiment, or compares two.
pub(super) fn run(args: &ReportArgs, sources: &[Source]) -> anyhow::Result<()> {
    for (name, given) in [
        ("--perfetto", args.perfetto.is_some()),
        ("--slowest", args.slowest.is_some()),
    ] {
        if given {
            bail!(
                "{name}: only for runs that follow requests; the run of an experiment is a table of cells"
            );
        }
    }
    match sources {
        [source] => one(args, &Table::load(&source.dir)?),
        [a, b] => {
            let load = |source: &Source| -> anyhow::Result<_> {
                Ok((source.name.clone(), Table::load(&source.dir)?))
            };
            let comparison = Comparison::of(load(a)?, load(b)?);
            two(args, &comparison.map_err(|problem| anyhow!(problem))?)
        }
        _ => bail!("runs of experiments are compared two at a time"),
    }
}

/// Fails unless the directory holds a run of `experiment`, which a new run can be compared with.
pub fn check(dir: &Path, experiment: &str) -> anyhow::Result<()> {
    let table = Table::load(dir)?;
    match table.experiment == experiment {
        true => Ok(()),
        false => bail!(
            "--against {}: it is a run of {}, not of {experiment}",
            dir.display(),
            table.experiment
        ),
    }
}

/// Prints the table of a run, for commands that have just completed it.
pub fn print_run(dir: &Path) -> anyhow::Result<()> {
    print(&cells::terminal::report(&Table::load(dir)?, style()))
}

fn one(args: &ReportArgs, table: &Table) -> anyhow::Result<()> {
    if let Some(path) = &args.html {
        write(path, cells::html::render(table).as_bytes())?;
    }
    if let Some(path) = &args.csv {
        let files = cells::csv::render(table);
        match (files.first(), is_csv_file(path)) {
            (Some(points), true) => write(path, points.text.as_bytes())?,
            _ => write_files(path, &files)?,
        }
    }
    if args.json {
        print(&cells::json(table))
    } else if args.csv.is_none() && args.html.is_none() {
        print(&cells::terminal::report(table, style()))
    } else {
        Ok(())
    }
}

fn two(args: &ReportArgs, comparison: &Comparison) -> anyhow::Result<()> {
    if let Some(path) = &args.html {
        write(path, cells::html::compare(comparison).as_bytes())?;
    }
    if args.json {
        print(&cells::json(comparison))
    } else if args.html.is_none() {
        print(&cells::terminal::compare(comparison, style()))
    } else {
        Ok(())
    }
}
