//! The view of one disk: figures, a heat map of latencies, stages, queues, workers and slow
//! requests.

use super::heat::HeatMap;
use super::model::{Key, Row};
use super::slow::Slow;
use super::state::State;
use super::table::bar;
use super::words::{megabytes, p99, percent, rate, time, time_or_dash};
use fathom_metrics::Figures;
use fathom_trace::Stage;
use fathom_units::Size;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};

/// Minimum height of the heat map with its axis, in lines.
const LEAST: usize = 7;
/// Width of the labels left of the heat map, in characters.
const MARGIN: usize = 8;

pub fn draw(frame: &mut Frame<'_>, area: Rect, state: &State, key: &Key) {
    let Some(row) = state.model.row(key) else {
        let text = format!("disk {} does not exist any more (Esc: back)", key.disk);
        frame.render_widget(Line::raw(state.look.clean(&text)), area);
        return;
    };
    let (width, height) = (usize::from(area.width), usize::from(area.height));
    let above = above(state, &row);
    let mut below = stages(state, &row, width);
    below.extend(queues_and_workers(state, &row));
    below.extend(slow(state));
    // The map gets the remaining lines. If these are too few, it takes lines from the part below.
    let left = height.saturating_sub(above.len() + below.len());
    let map = heat_map(state, key, width, left.max(LEAST.min(height / 2)));
    let lines = above.into_iter().chain(map).chain(below);
    for (line, at) in lines.zip(area.rows()) {
        frame.render_widget(line, at);
    }
}

/// Returns the lines above the map: the image, limits and hints, and the figures.
fn above(state: &State, row: &Row<'_>) -> Vec<Line<'static>> {
    let look = &state.look;
    let disk = row.disk;
    let clean = |text: &str| look.clean(text);
    let access = if disk.read_only { ", read-only" } else { "" };
    let what = format!(
        "  {} ({}, {}, {}{access})  server {}",
        disk.image,
        Size(disk.size),
        disk.format,
        disk.engine,
        row.pid
    );
    let users = match &*row.guest() {
        "" => "not in use".to_owned(),
        guest => format!("used by {guest}"),
    };
    let filters = match &disk.filters[..] {
        [] => String::new(),
        filters => format!("  filters {}", filters.join(", ")),
    };
    let flight = format!(
        "  in flight {} (mean {:.1})  CPU {}%",
        disk.in_flight,
        disk.mean_in_flight,
        percent(disk.cpu_percent.or(disk.pool_cpu_percent))
    );
    let mut lines = vec![
        Line::from(vec![
            Span::styled(clean(&disk.name), look.title()),
            Span::raw(clean(&what)),
        ]),
        Line::raw(clean(&format!("{users}{flight}{filters}"))),
        Line::styled(
            clean(&format!("limited by: {}", disk.limiter.text)),
            look.hint(),
        ),
        Line::styled(
            format!(
                "{:<13}{:>8}{:>8}{:>8}{:>9}{:>9}{:>9}{:>9}",
                "OPERATION", "IOPS", "MB/s", "ERR/s", "mean", "p50", "p99", "max"
            ),
            look.head(),
        ),
    ];
    let ops = disk.operations.iter();
    lines.extend(ops.map(|op| Line::raw(figures(&op.op, &op.figures))));
    if disk.operations.is_empty() {
        lines.push(Line::styled("no request was completed", look.quiet()));
    }
    lines
}

fn figures(op: &str, of: &Figures) -> String {
    format!(
        "{op:<13}{:>8}{:>8}{:>8}{:>9}{:>9}{:>9}{:>9}",
        rate(of.iops),
        megabytes(of.bytes_per_second),
        rate(of.errors_per_second),
        time_or_dash(of.mean_us),
        time_or_dash(of.p50_us),
        p99(of.p99_us, of.max_us),
        time_or_dash(of.max_us),
    )
}

fn heat_map(state: &State, key: &Key, width: usize, height: usize) -> Vec<Line<'static>> {
    let look = &state.look;
    let columns = width.saturating_sub(MARGIN + 1);
    let rows = height.saturating_sub(1).max(1);
    let history = state.model.history(key);
    let Some(map) = history.and_then(|ticks| HeatMap::of(ticks.iter(), columns, rows)) else {
        let mut lines = vec![Line::raw(""); rows];
        if let Some(first) = lines.first_mut() {
            *first = Line::styled("no requests yet; their heat map appears here", look.quiet());
        }
        return lines;
    };
    let each = (rows / 6).max(1);
    let mut lines = Vec::with_capacity(height);
    for (index, (cells, from)) in map.rows.iter().zip(&map.from_us).enumerate() {
        // A label is the lower bound of its row.
        let is_labelled = (rows - 1 - index).is_multiple_of(each);
        let label = if is_labelled {
            time(*from)
        } else {
            String::new()
        };
        let mut spans = vec![
            Span::styled(format!("{label:>MARGIN$}"), look.quiet()),
            Span::styled(look.vertical().to_string(), look.quiet()),
        ];
        spans.extend(cells.chunk_by(|a, b| a == b).map(|alike| {
            let (letter, style) = look.heat(alike[0]);
            let text: String = alike.iter().map(|_| letter).collect();
            Span::styled(text, style)
        }));
        lines.push(Line::from(spans));
    }
    lines.push(time_axis(state, columns, map.column_seconds));
    lines
}

/// Returns the time axis below the heat map, which shows the age of the columns.
fn time_axis(state: &State, columns: usize, column_seconds: f64) -> Line<'static> {
    let mut axis: Vec<char> = vec![state.look.horizontal(); columns];
    let span = columns as f64 * column_seconds;
    let step = [
        5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0,
    ]
    .into_iter()
    .find(|step| span / step <= columns as f64 / 12.0)
    .unwrap_or(7200.0);
    let mut ago = step;
    while ago < span {
        let label = format!("-{}s", ago as u64);
        let at = columns - ((ago / column_seconds) as usize).min(columns);
        if at + label.len() + 4 <= columns {
            for (place, letter) in axis[at..].iter_mut().zip(label.chars()) {
                *place = letter;
            }
        }
        ago += step;
    }
    if columns >= 4 {
        let end = axis.len() - 3;
        axis[end..].copy_from_slice(&['n', 'o', 'w']);
    }
    let axis: String = axis.into_iter().collect();
    let text = format!("{:>MARGIN$} {axis}", "latency");
    Line::styled(text, state.look.quiet())
}

fn stages(state: &State, row: &Row<'_>, width: usize) -> Vec<Line<'static>> {
    let Some(stages) = row.stages() else {
        return Vec::new();
    };
    let title = Span::styled("stages  ", state.look.quiet());
    let mut spans = vec![title];
    spans.extend(bar(&state.look, row, width.saturating_sub(9).min(120)));
    let total = stages.iter().sum::<f64>().max(1e-9);
    let parts = Stage::ALL.into_iter().zip(stages);
    let parts = parts.filter(|(_, us)| *us > 0.0);
    let parts = parts
        .map(|(stage, us)| format!("{} {} {:.0}%", stage.name(), time(us), 100.0 * us / total));
    let text = format!("        {}", parts.collect::<Vec<_>>().join("  "));
    vec![spans.into(), Line::raw(text)]
}

fn queues_and_workers(state: &State, row: &Row<'_>) -> Vec<Line<'static>> {
    let disk = row.disk;
    let workers = disk.workers.iter().enumerate().take(4).map(|(index, worker)| {
        let text = format!(
            "worker {index}  {}/s  CPU {}%  polling {:.0}%  kicks {}/s  sleeps {}/s  interrupts {}/s",
            rate(worker.requests_per_second),
            percent(worker.cpu_percent),
            worker.polling_percent,
            rate(worker.kicks_per_second),
            rate(worker.sleeps_per_second),
            rate(worker.interrupts_per_second),
        );
        Line::raw(text)
    });
    let queues = disk.queues.iter().take(8).map(|queue| {
        format!(
            "queue {} {}/s {} of {}",
            queue.queue,
            rate(queue.requests_per_second),
            queue.in_flight,
            queue.size
        )
    });
    let queues: Vec<_> = queues.collect();
    let mut lines: Vec<_> = workers.collect();
    lines.extend(more(state, disk.workers.len(), 4, "workers"));
    if !queues.is_empty() {
        lines.push(Line::raw(queues.join("  ")));
        lines.extend(more(state, disk.queues.len(), 8, "queues"));
    }
    lines
}

fn more(state: &State, all: usize, shown: usize, what: &str) -> Option<Line<'static>> {
    let more = all.checked_sub(shown).filter(|more| *more > 0)?;
    Some(Line::styled(
        format!("and {more} more {what}"),
        state.look.quiet(),
    ))
}

/// Returns the slowest requests: a sixth of the screen's lines, but at least two.
fn slow(state: &State) -> Vec<Line<'static>> {
    let Slow::Some(requests) = &state.slow else {
        return Vec::new();
    };
    let room = usize::from(state.size.1 / 6).max(2);
    let title = match requests.is_empty() {
        true => "slowest requests: none yet",
        false => "slowest requests",
    };
    let title = Line::styled(title, state.look.quiet());
    let lines = requests.iter().take(room);
    let lines = lines.map(|line| Line::raw(state.look.clean(&format!("  {line}"))));
    [title].into_iter().chain(lines).collect()
}
