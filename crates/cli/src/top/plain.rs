//! Output without a screen: text or JSON, interval by interval.

use super::columns::Column;
use super::feed::{Feed, News};
use super::model::Totals;
use super::state::State;
use super::words::{megabytes, rate, time_or_dash};
use crate::servers::Failed;
use anyhow::bail;
use fathom_metrics::Sample;
use fathom_trace::Stage;
use serde::Serialize;
use std::collections::BTreeSet;
use std::io::Write;
use std::time::{Duration, Instant};

/// Maximum number of failed servers to name.
const NAMED: usize = 10;

/// A line of the JSON output.
#[derive(Serialize)]
struct Told<'a> {
    servers: Vec<ToldServer<'a>>,
    total: Totals,
    failed: Vec<Failed>,
}

#[derive(Serialize)]
struct ToldServer<'a> {
    /// Host of the server, or its socket.
    host: &'a str,
    #[serde(flatten)]
    sample: Sample,
}

pub fn run(mut state: State, feed: &Feed, count: Option<u64>, json: bool) -> anyhow::Result<()> {
    let mut left = count.unwrap_or(u64::MAX);
    while left > 0 {
        round(&mut state, feed);
        if feed.is_fleet() && state.model.samples().next().is_none() {
            bail!("{}", nobody(&state));
        }
        tell(&state);
        let mut out = std::io::stdout().lock();
        match json {
            true => {
                let told = Told {
                    servers: filtered(&state),
                    total: state.model.totals(&state.rows()),
                    failed: failed(&state),
                };
                writeln!(out, "{}", serde_json::to_string(&told)?)?;
            }
            false => {
                write!(out, "{}", text(&state))?;
                if left > 1 {
                    writeln!(out)?;
                }
            }
        }
        out.flush()?;
        left -= 1;
    }
    Ok(())
}

/// Waits until every server has sent a sample or failed, or until the timeout.
fn round(state: &mut State, feed: &Feed) {
    let until = Instant::now() + state.interval + feed.patience();
    let mut heard = BTreeSet::new();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        for news in feed.take(left.min(Duration::from_millis(200))) {
            if let News::Sample(server, _) | News::Gone(server, _) = &news {
                heard.insert(server.clone());
            }
            state.take(news, Instant::now());
        }
        let now = feed.servers();
        if !heard.is_empty()
            && now
                .iter()
                .all(|server| heard.contains(server) || state.model.has_problem(server))
        {
            break;
        }
    }
    state.model.expire(Instant::now());
}

fn tell(state: &State) {
    let failed = failed(state);
    for one in failed.iter().take(NAMED) {
        eprintln!("fathom: {}", state.look.clean(&one.problem));
    }
    if failed.len() > NAMED {
        eprintln!("fathom: {} servers have not responded", failed.len());
    }
}

/// Returns the servers that do not respond, with the reason.
fn failed(state: &State) -> Vec<Failed> {
    let failed = state.model.problems().map(|(host, problem)| Failed {
        host: host.to_owned(),
        problem: problem.to_owned(),
    });
    failed.collect()
}

fn nobody(state: &State) -> String {
    let problem = state.model.problems().next();
    let problem = problem.map_or("no reply yet", |(_, problem)| problem);
    format!("no host has responded: {problem}")
}

/// Returns the latest samples with the selected disks, in the order of the table.
fn filtered(state: &State) -> Vec<ToldServer<'_>> {
    let rows = state.rows();
    let samples = state.model.samples().map(|(host, sample)| {
        let wanted = rows.iter().filter(|row| row.server == host && !row.is_gone);
        let sample = Sample {
            disks: wanted.map(|row| row.disk.clone()).collect(),
            version: sample.version.clone(),
            ..*sample
        };
        ToldServer { host, sample }
    });
    samples.collect()
}

/// Returns a line of totals and the table, as wide as necessary.
fn text(state: &State) -> String {
    let rows = state.rows();
    let totals = state.model.totals(&rows);
    let mut text = format!(
        "servers {}, disks {}, IOPS read {} write {} other {}, MB/s read {} write {}, CPU {:.0}%, p50 {} p99 {}\n",
        totals.servers,
        totals.disks,
        rate(totals.read_iops),
        rate(totals.write_iops),
        rate(totals.other_iops),
        megabytes(totals.read_bytes_per_second),
        megabytes(totals.write_bytes_per_second),
        totals.cpu_percent,
        time_or_dash(totals.p50_us),
        time_or_dash(totals.p99_us)
    );
    let head: Vec<_> = { state.columns.iter() }
        .map(|column| column.head().to_owned())
        .collect();
    let mut table = vec![head];
    table.extend(rows.iter().map(|row| {
        let cell = |column: &Column| match column {
            Column::Stages => stages(row.stages()),
            other => other.cell(row),
        };
        let cells = state.columns.iter().map(cell);
        // An empty cell becomes a dash, so that programs can count columns.
        let cells = cells.map(|cell| if cell.is_empty() { "-".into() } else { cell });
        cells.map(|cell| state.look.clean(&cell)).collect()
    }));
    let width = |index: usize| table.iter().map(|row| row[index].chars().count()).max();
    let widths: Vec<_> = (0..state.columns.len())
        .map(|index| width(index).unwrap_or(0))
        .collect();
    for row in &table {
        let cells = row.iter().zip(&widths).zip(&state.columns);
        let cells = cells.map(|((cell, width), column)| match column.is_text() {
            true => format!("{cell:<width$}"),
            false => format!("{cell:>width$}"),
        });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// Returns the stages with at least 5% of the time, largest first: `device 80%, queue 15%`.
fn stages(stages: Option<[f64; Stage::COUNT]>) -> String {
    let stages = stages.unwrap_or_default();
    let total: f64 = stages.iter().sum();
    let mut shares: Vec<_> = { Stage::ALL.into_iter().zip(stages) }
        .map(|(stage, us)| (stage.name(), 100.0 * us / total.max(1e-9)))
        .filter(|(_, percent)| *percent >= 5.0)
        .collect();
    shares.sort_by(|a, b| b.1.total_cmp(&a.1));
    let shares = shares
        .iter()
        .map(|(stage, percent)| format!("{stage} {percent:.0}%"));
    shares.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::samples::{disk, look, sample};

    #[test]
    fn text_has_a_line_a_disk_under_its_columns() {
        let mut state = State::new(look(), Duration::from_secs(1));
        let disks = vec![disk("web\x1b[2J", 1500.0), disk("db", 0.0)];
        state.model.take("s".into(), sample(77, disks), None);
        let text = text(&state);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(
            lines[0].starts_with("servers 1, disks 2, IOPS read 1500 write 0"),
            "{text}"
        );
        assert!(lines[1].starts_with("DISK"), "{text}");
        assert!(
            lines[2].starts_with("web?[2J") && lines[2].contains("device 75%, queue 25%"),
            "{text}"
        );
        assert!(!text.contains('\x1b'));
        let column = lines[1].find("STAGES").unwrap();
        assert!(lines[2][column..].starts_with("device"), "{text}");
        state.filter = "DB".into();
        assert_eq!(filtered(&state)[0].sample.disks.len(), 1);
    }
}
