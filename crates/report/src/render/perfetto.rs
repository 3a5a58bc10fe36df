//! A trace for [Perfetto](https://ui.perfetto.dev): each request's layers on tracks of the guest
//! and of the host, with arrows from its kick to its interrupt, and the activity of vCPUs and
//! threads.
//!
//! Times are in ns of the host's CLOCK_MONOTONIC. Requests that overlap have different lanes; a
//! request has the same lane on all tracks. A large run shows only its first requests: the track
//! `about this trace` says how many of how many.

mod lanes;
mod proto;
mod requests;
mod source;
mod threads;
mod trace;

use std::path::Path;

use fathom_run::{Result, Run};

use crate::render::text::plural;
use lanes::Lanes;
use source::{Followed, rounds};
use threads::Threads;
use trace::{Trace, Track};

/// How much of a run is shown.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of requests; the earliest are shown.
    pub requests: usize,
    /// Only requests that started within this many ns of the first request of their round.
    pub window_ns: Option<i64>,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            requests: 10_000,
            window_ns: None,
        }
    }
}

/// Maximum number of events of vCPUs and threads per request of the limit; bounds runs without
/// requests too.
const EVENTS_PER_REQUEST: usize = 100;

/// Renders the trace of a run directory; the same directory and limits give the same bytes.
///
/// # Errors
/// Fails when `run.json` cannot be read. A damaged event file is used up to the damage, which the
/// trace reports.
pub fn render(dir: &Path, limits: &Limits) -> Result<Vec<u8>> {
    let run = Run::load(dir)?;
    let mut trace = Trace::new();
    let mut lanes = Lanes::new(&mut trace);
    let mut threads = Threads::new(&run, limits.requests.saturating_mul(EVENTS_PER_REQUEST));
    let mut notes = Vec::new();
    let (mut shown, mut all) = (0u64, 0u64);
    for round in rounds(dir, &run) {
        let left = limits.requests - (shown as usize).min(limits.requests);
        let followed = round.follow(&run, left, limits.window_ns);
        for way in &followed.ways {
            shown += 1;
            lanes.request(&mut trace, way, shown, round.name);
        }
        all += followed.all;
        if let Some(window) = window(&round, &followed, limits) {
            let full = threads.round(&mut trace, &round, window);
            if full {
                notes.push(format!("{}: the events of threads end early", round.name));
            }
        }
        notes.extend(followed.problems);
    }
    notes.insert(0, bounds(shown, all, limits));
    about(&mut trace, &run, &notes);
    Ok(trace.finish())
}

/// Returns the period for which events of threads are shown: while the shown requests are in
/// flight. A round without requests is shown from its start, for the length of the limit.
fn window(round: &source::Watched, followed: &Followed, limits: &Limits) -> Option<(i64, i64)> {
    match followed.extent {
        Some(extent) => Some(extent),
        None if followed.all == 0 => {
            let begin = round.begin()?;
            let end = limits
                .window_ns
                .map_or(i64::MAX, |ns| begin.saturating_add(ns));
            Some((begin, end))
        }
        None => None,
    }
}

fn bounds(shown: u64, all: u64, limits: &Limits) -> String {
    if shown == all {
        return format!("all of {}", plural(all, "request"));
    }
    let window = match limits.window_ns {
        Some(ns) => format!(
            ", none from later than {} s into its round",
            ns as f64 / 1e9
        ),
        None => String::new(),
    };
    format!("the first {shown} of {}{window}", plural(all, "request"))
}

/// Adds a track at the top with notes that the reader must know.
fn about(trace: &mut Trace, run: &Run, notes: &[String]) {
    let at = trace.begin();
    let track = trace.track(Track::Top("about this trace"));
    let mut lines: Vec<(&'static str, String)> = vec![("run", run.title.clone())];
    lines.extend(notes.iter().map(|note| ("shown", note.clone())));
    if run.environment.stretched {
        let text = "times are stretched: the host is itself emulated";
        lines.push(("times", text.to_owned()));
    }
    let clock = "ns of the host's CLOCK_MONOTONIC";
    lines.push(("clock", clock.to_owned()));
    lines.extend(run.problems.iter().map(|line| ("problem", line.clone())));
    let text: Vec<(&'static str, &str)> = lines.iter().map(|(k, v)| (*k, v.as_str())).collect();
    let title = lines[1].1.clone();
    trace.instant_about(track, at, &title, &text);
}
