//! Sections about threads: their time lines, system calls, waits for locks, and QEMU's own steps.

use super::layers::Place;
use super::markup::{Cell, Html, Table, numbers, rows};
use super::words::{duration, grouped, thread_short};
use crate::analysis::{
    Analysis, CallRow, Distribution, LockRow, Picture, Pictured, QemuStep, ThreadCalls,
};
use crate::render::facts;
use crate::render::text::{micros, seconds, size};

pub(super) fn show(html: &mut Html, place: Place, run: &Analysis) {
    let drawn = run.time_lines.iter().any(|line| !line.spans.is_empty());
    let called = run.calls.iter().any(|thread| !thread.calls.is_empty());
    if drawn || called {
        html.heading(place.prefix, ("threads", "Threads"), "Threads");
    }
    if drawn {
        if let Some(picture) = &run.picture {
            html.note(&shown(picture));
        }
        html.chart("lines", place.run);
    }
    if called {
        calls(html, place, &run.calls);
    }
    if !run.locks.is_empty() {
        locks(html, place, &run.locks);
    }
    if !run.qemu.is_empty() {
        steps(html, place, &run.qemu);
    }
}

/// Describes the part of the round that the time lines show.
fn shown(picture: &Picture) -> String {
    let (length, round) = (duration(picture.length as f64), &picture.round);
    match (&picture.request, &picture.why_not) {
        (Some(request), _) => {
            let Pictured {
                number, operation, ..
            } = request;
            let bytes = match request.length {
                0 => String::new(),
                length => format!(" of {} at byte {}", size(length), grouped(request.offset)),
            };
            let total = duration(request.total as f64);
            format!(
                "{length} around the slowest request of round {round}: number {number}, a \
                 {operation}{bytes}, which took {total} (between the two lines)."
            )
        }
        (None, why) => {
            let why = why.as_deref().unwrap_or("unknown");
            format!(
                "{length} from the middle of round {round}, and not around its slowest \
                 request: {why}."
            )
        }
    }
}

fn calls(html: &mut Html, place: Place, threads: &[ThreadCalls]) {
    html.note(
        "System calls by thread, as in the wiki\u{2019}s table; NAME_post is the time in user \
         space after the call.",
    );
    let busy = threads.iter().filter(|thread| !thread.calls.is_empty());
    for (i, calls) in busy.enumerate() {
        // Threads are in the order of their roles; only the first two are unfolded.
        let open = if i < 2 { "<details open>" } else { "<details>" };
        html.raw(open);
        html.element("summary", &[], &facts::thread(&calls.thread));
        table_of(place, i, &calls.calls).show(html);
        html.raw("</details>\n");
    }
}

fn table_of(place: Place, number: usize, calls: &[CallRow]) -> Table {
    let headings = [
        "Event",
        "Count",
        "Mean (s)",
        "Std deviation (s)",
        "Minimum (s)",
        "Maximum (s)",
        "Total (s)",
    ];
    let mut table = Table::new(place.id(&format!("calls-{number}")), &headings);
    let mut sorted: Vec<&CallRow> = calls.iter().collect();
    sorted.sort_by_key(|row| std::cmp::Reverse(row.total.saturating_add(row.post_total)));
    for row in sorted {
        table.row(call(facts::call(&row.name), &row.time, row.total));
        if row.post.count > 0 {
            let cells = call(facts::post(&row.name), &row.post, row.post_total);
            table.classed("sub", cells);
        }
    }
    table
}

fn call(name: String, time: &Distribution, total: i64) -> Vec<Cell> {
    let times = [
        time.mean,
        time.deviation,
        time.min as f64,
        time.max as f64,
        total as f64,
    ];
    let mut cells = vec![Cell::Code(name), Cell::Number(time.count.to_string())];
    cells.extend(times.map(|ns| Cell::Number(seconds(ns))));
    cells
}

/// Returns a column of times in us; `-` for a distribution without values.
fn column(times: &[&Distribution], of: fn(&Distribution) -> Option<f64>) -> Vec<Cell> {
    let values = times
        .iter()
        .map(|time| if time.count > 0 { of(time) } else { None });
    numbers(micros(&values.collect::<Vec<_>>()))
}

fn locks(html: &mut Html, place: Place, locks: &[LockRow]) {
    html.heading(place.prefix, ("locks", "Locks"), "Waits for locks");
    let headings = [
        "Lock",
        "Thread",
        "Seen by",
        "Waits",
        "mean (\u{b5}s)",
        "p99 (\u{b5}s)",
        "max (\u{b5}s)",
        "Total (s)",
    ];
    let mut table = Table::new(place.id("locks-table"), &headings);
    let mut sorted: Vec<&LockRow> = locks.iter().collect();
    sorted.sort_by_key(|row| std::cmp::Reverse(row.total));
    let times: Vec<&Distribution> = sorted.iter().map(|row| &row.time).collect();
    let name = |row: &&LockRow| match &row.name {
        Some(name) => Cell::Text(name.clone()),
        None => Cell::Code(format!("{:#x}", row.address)),
    };
    let total = |row: &&LockRow| Cell::Number(seconds(row.total as f64));
    let text = |of: fn(&LockRow) -> String| sorted.iter().map(|row| Cell::Text(of(row))).collect();
    let columns = vec![
        sorted.iter().map(name).collect(),
        text(|row| thread_short(&row.thread)),
        text(|row| row.source.to_owned()),
        numbers(times.iter().map(|time| grouped(time.count)).collect()),
        column(&times, |time| Some(time.mean)),
        column(&times, |time| time.p99.map(|ns| ns as f64)),
        column(&times, |time| Some(time.max as f64)),
        sorted.iter().map(total).collect(),
    ];
    for cells in rows(columns) {
        table.row(cells);
    }
    table.show(html);
}

fn steps(html: &mut Html, place: Place, steps: &[QemuStep]) {
    html.heading(place.prefix, ("qemu", "QEMU"), "Steps within QEMU");
    html.note("Each event\u{2019}s time since the one before, in \u{b5}s.");
    let headings = [
        "Event on the wiki",
        "Today",
        "N",
        "mean",
        "p50",
        "p99",
        "max",
    ];
    let mut table = Table::new(place.id("qemu-table"), &headings);
    let times: Vec<&Distribution> = steps.iter().map(|step| &step.time).collect();
    let columns = vec![
        steps
            .iter()
            .map(|step| Cell::Code(step.wiki.clone()))
            .collect(),
        steps
            .iter()
            .map(|step| Cell::Code(step.today.clone()))
            .collect(),
        numbers(times.iter().map(|time| time.count.to_string()).collect()),
        column(&times, |time| Some(time.mean)),
        column(&times, |time| time.p50.map(|ns| ns as f64)),
        column(&times, |time| time.p99.map(|ns| ns as f64)),
        column(&times, |time| Some(time.max as f64)),
    ];
    for cells in rows(columns) {
        table.row(cells);
    }
    table.show(html);
}
