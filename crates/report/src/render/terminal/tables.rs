//! The other tables: the wiki's, rounds, the cost of tracing, QEMU's steps, system calls, locks.

use super::page::Page;
use crate::analysis::{
    CallRow, Distribution, LockRow, Overhead, QemuStep, RoundRow, ThreadCalls, Wiki,
};
use crate::render::facts;
use crate::render::text::{Table, duration, micros, percent, plural, seconds};

/// Maximum number of rows of a thread's calls, and of locks; the JSON report has the rest.
const MOST_ROWS: usize = 12;

pub(super) fn wiki(page: &mut Page, wiki: &Wiki) {
    page.heading("The wiki's way: means of each layer, subtracted");
    let mut table = Table::new(
        1,
        &[
            "Layer",
            "Cumulative latency (ns)",
            "Guest benchmark control (ns)",
        ],
    );
    for (layer, ns, control) in &wiki.cumulative {
        let control = control.map_or(String::new(), |ns| format!("{ns:.0}"));
        table.row([layer.clone(), format!("{ns:.0}"), control]);
    }
    if !table.is_empty() {
        page.table(&table);
    }
    let mut table = Table::new(1, &["Layer", "Delta (ns)", "Delta (%)"]);
    for (layer, ns, percent) in &wiki.delta {
        table.row([layer.clone(), format!("{ns:.0}"), format!("{percent:.2}%")]);
    }
    if !table.is_empty() {
        page.gap();
        page.table(&table);
    }
    for note in &wiki.notes {
        page.note(note);
    }
}

pub(super) fn rounds(page: &mut Page, rounds: &[RoundRow]) {
    let with: Vec<_> = rounds
        .iter()
        .filter_map(|r| Some((r, r.benchmark.as_ref()?)))
        .collect();
    if with.is_empty() {
        return;
    }
    page.heading("Rounds, by the benchmark's own figures");
    let header = [
        "Round",
        "where",
        "traced",
        "call",
        "operations",
        "errors",
        "mean (us)",
    ];
    let mut table = Table::new(4, &header);
    let means: Vec<_> = with
        .iter()
        .map(|(_, figures)| Some(figures.mean_ns))
        .collect();
    for ((round, figures), mean) in with.iter().zip(micros(&means)) {
        table.row([
            round.name.clone(),
            if round.on_host { "host" } else { "guest" }.to_owned(),
            facts::collectors(&round.traced),
            figures.call.clone(),
            figures.operations.to_string(),
            figures.errors.to_string(),
            mean,
        ]);
    }
    page.table(&table);
}

pub(super) fn overhead(page: &mut Page, overhead: &[Overhead]) {
    if overhead.is_empty() {
        return;
    }
    page.heading("Cost of tracing per request");
    for row in overhead {
        page.fact(
            if row.pairs > 1 { "traced" } else { "one pair" },
            &cost(row),
        );
    }
}

fn cost(row: &Overhead) -> String {
    let base = if row.untraced_ns == 0.0 {
        1.0
    } else {
        row.untraced_ns
    };
    let sign = if row.difference_ns < 0.0 { "" } else { "+" };
    let certainty = if row.pairs > 1 {
        format!(
            "95% interval {} to {} from {} pairs of rounds",
            duration(row.low_ns),
            duration(row.high_ns),
            row.pairs
        )
    } else {
        "no interval from one pair of rounds".to_owned()
    };
    format!(
        "{}: {sign}{} ({sign}{}), from {} untraced to {}; {certainty}",
        facts::collectors(&row.traced),
        duration(row.difference_ns),
        percent(row.difference_ns / base),
        duration(row.untraced_ns),
        duration(row.traced_ns),
    )
}

pub(super) fn qemu(page: &mut Page, steps: &[QemuStep]) {
    if steps.is_empty() {
        return;
    }
    page.heading("Steps within QEMU: each event's time since the one before (us)");
    let mut table = Table::new(
        2,
        &[
            "Event on the wiki",
            "today",
            "N",
            "mean",
            "p50",
            "p99",
            "max",
        ],
    );
    let times: Vec<&Distribution> = steps.iter().map(|step| &step.time).collect();
    table.columns(&[
        steps.iter().map(|step| step.wiki.clone()).collect(),
        steps.iter().map(|step| step.today.clone()).collect(),
        times.iter().map(|time| time.count.to_string()).collect(),
        column(&times, |time| Some(time.mean)),
        column(&times, |time| time.p50.map(|ns| ns as f64)),
        column(&times, |time| time.p99.map(|ns| ns as f64)),
        column(&times, |time| Some(time.max as f64)),
    ]);
    page.table(&table);
}

/// Returns a column of times in us; `-` for a distribution without values.
fn column(times: &[&Distribution], of: fn(&Distribution) -> Option<f64>) -> Vec<String> {
    let values = times
        .iter()
        .map(|time| if time.count > 0 { of(time) } else { None });
    micros(&values.collect::<Vec<_>>())
}

/// Shows the wiki's table of system calls, for each thread.
pub(super) fn calls(page: &mut Page, threads: &[ThreadCalls]) {
    let busy: Vec<_> = threads
        .iter()
        .filter(|thread| !thread.calls.is_empty())
        .collect();
    if busy.is_empty() {
        return;
    }
    page.heading("System calls by thread; NAME_post is the time in user space after the call");
    for (i, calls) in busy.iter().enumerate() {
        if i > 0 {
            page.gap();
        }
        page.note(&facts::thread(&calls.thread));
        page.table(&calls_of(&calls.calls));
        if calls.calls.len() > MOST_ROWS {
            let more = (calls.calls.len() - MOST_ROWS) as u64;
            page.note(&format!("and {} with less time", plural(more, "more call")));
        }
    }
}

fn calls_of(calls: &[CallRow]) -> Table {
    let header = [
        "Event",
        "Count",
        "Mean (s)",
        "Std deviation (s)",
        "Minimum (s)",
        "Maximum (s)",
    ];
    let mut table = Table::new(1, &header);
    table.add_column("Total (s)");
    let mut sorted: Vec<&CallRow> = calls.iter().collect();
    sorted.sort_by_key(|row| std::cmp::Reverse(row.total.saturating_add(row.post_total)));
    for row in sorted.into_iter().take(MOST_ROWS) {
        let mut add = |name: String, time: &Distribution, total: i64| {
            table.row([
                name,
                time.count.to_string(),
                seconds(time.mean),
                seconds(time.deviation),
                seconds(time.min as f64),
                seconds(time.max as f64),
                seconds(total as f64),
            ]);
        };
        add(facts::call(&row.name), &row.time, row.total);
        if row.post.count > 0 {
            add(facts::post(&row.name), &row.post, row.post_total);
        }
    }
    table
}

pub(super) fn locks(page: &mut Page, locks: &[LockRow]) {
    if locks.is_empty() {
        return;
    }
    page.heading("Waits for locks");
    let header = [
        "Lock",
        "thread",
        "seen by",
        "waits",
        "mean (us)",
        "max (us)",
        "total (s)",
    ];
    let mut table = Table::new(3, &header);
    let mut sorted: Vec<&LockRow> = locks.iter().collect();
    sorted.sort_by_key(|row| std::cmp::Reverse(row.total));
    sorted.truncate(MOST_ROWS);
    let times: Vec<&Distribution> = sorted.iter().map(|row| &row.time).collect();
    let name = |row: &&LockRow| match &row.name {
        Some(name) => name.clone(),
        None => format!("{:#x}", row.address),
    };
    table.columns(&[
        sorted.iter().map(name).collect(),
        sorted
            .iter()
            .map(|row| format!("{} {}", row.thread.name, row.thread.tid))
            .collect(),
        sorted.iter().map(|row| row.source.to_owned()).collect(),
        times.iter().map(|time| time.count.to_string()).collect(),
        column(&times, |time| Some(time.mean)),
        column(&times, |time| Some(time.max as f64)),
        sorted.iter().map(|row| seconds(row.total as f64)).collect(),
    ]);
    page.table(&table);
    if locks.len() > MOST_ROWS {
        let more = (locks.len() - MOST_ROWS) as u64;
        page.note(&format!("and {} with less time", plural(more, "more row")));
    }
}

pub(super) fn problems(page: &mut Page, problems: &[String]) {
    if problems.is_empty() {
        return;
    }
    page.heading("Problems");
    for problem in problems {
        page.warning(problem);
    }
}
