//! A window in which collectors record, and its result.

use fathom_units::cause;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use fathom_run::{Clock, Clocks, Round};

use crate::error::{Context, Error, Result};
use crate::tracers::{self, Collector};

const LOOK: Duration = Duration::from_millis(20);

/// A round without a name, and the problems of its collectors.
pub(super) struct Taken {
    pub(super) round: Round,
    pub(super) problems: Vec<String>,
}

/// Lets collectors record into a folder for the duration of the window, or until `is_over`.
pub(super) fn take(
    mut collectors: Vec<Box<dyn Collector>>,
    folder: &Path,
    window: Duration,
    is_over: impl Fn() -> bool,
) -> Result<Taken> {
    fs::create_dir_all(folder).context(|| format!("cannot create {}", folder.display()))?;
    let mut problems = Vec::new();
    let since = tracers::pair();
    wait(window, is_over);
    let until = tracers::pair();
    for collector in &mut collectors {
        if let Err(error) = collector.halt() {
            problems.push(format!("{}: {}", collector.name(), cause(error)));
        }
    }
    for collector in &mut collectors {
        collector.keep(since, until);
    }
    let traced = collectors.iter().map(|one| one.name().to_owned()).collect();
    let collected = tracers::stop_all(collectors, folder);
    problems.extend(collected.problems);
    let round = Round {
        traced,
        clocks: Clocks {
            host: vec![since, until],
            realtime_minus_monotonic_ns: tracers::realtime_minus_monotonic_ns(),
            ..Clocks::default()
        },
        streams: collected.streams,
        ..Round::default()
    };
    Ok(Taken { round, problems })
}

fn wait(window: Duration, is_over: impl Fn() -> bool) {
    let end = Instant::now() + window;
    while !is_over() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(LOOK));
    }
}

/// Fails if the directory already contains a run.
pub(super) fn refuse_to_overwrite(dir: &Path) -> Result<()> {
    if dir.join("run.json").exists() {
        return Err(Error::Unusable {
            path: dir.to_owned(),
            reason: "already contains a run; choose a new directory with --output".into(),
        });
    }
    Ok(())
}

/// Returns the name of the clock of the rounds' events.
pub(super) fn trace_clock(rounds: &[Round]) -> &'static str {
    let mut streams = rounds.iter().flat_map(|round| &round.streams);
    match streams.any(|stream| stream.clock == Clock::HostTsc) {
        true => "x86-tsc",
        false => "mono",
    }
}
