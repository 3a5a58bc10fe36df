//! Tries a change on a disk in use: rounds without and with the change, in turns.
//!
//! The disk has its original options again after each trial, whether the trial ends, is interrupted
//! or fails. A change of a trial lasts until the server restarts at most.

use super::apply::changed;
use super::interrupt::Interrupt;
use super::live_disk::{Lasting, LiveDisk};
use anyhow::{Context, anyhow};
use fathom_advise::{Change, Effect, Judgement, Measure, Pair, Round, effects, judge, worse};
use fathom_metrics::WorkerInfo;
use fathom_spec::DiskSpec;
use fathom_trace::{Bucket, Summary, quantile};
use std::thread;
use std::time::Duration;

/// Time after a change that is not measured: requests wait while the disk changes.
const SETTLE: Duration = Duration::from_millis(500);
/// Interval at which a round with the change is examined for requests that fail.
const LOOK: Duration = Duration::from_millis(500);
/// Number of attempts to give the disk its original options, and the pause between two of them.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_secs(1);

/// Number and length of the rounds of each change.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Number of pairs: a round without the change, and one with it.
    pub pairs: usize,
    /// Length of a round.
    pub round: Duration,
}

impl Plan {
    /// Returns the time that the trial of a change takes at most, without the changes themselves.
    pub fn longest(self) -> Duration {
        let rounds = u32::try_from(2 * self.pairs).unwrap_or(u32::MAX);
        (self.round + SETTLE).saturating_mul(rounds)
    }
}

/// A change that was tried.
pub struct Tried {
    /// The complete pairs.
    pub pairs: Vec<Pair>,
    /// Why the trial ended early. `None`: all rounds are complete.
    pub stopped: Option<String>,
}

impl Tried {
    pub fn effects(&self) -> Vec<(Measure, Effect)> {
        effects(&self.pairs)
    }

    /// Returns the judgement, or `None` if the trial ended early.
    pub fn judgement(&self) -> Option<Judgement> {
        { self.stopped.is_none() }.then(|| judge(&self.effects()))
    }
}

/// Which options the disk has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Without,
    With,
}

/// Whether the trial has made its change yet.
enum Made {
    Not,
    /// The reply to the change has not arrived.
    Requested,
    /// The options with the change, as the server shows them.
    Shown(Box<DiskSpec>),
}

struct Trial<'a> {
    disk: &'a LiveDisk,
    plan: Plan,
    stop: &'a Interrupt,
    change: &'a Change,
    /// The options before the trial, as the server shows them.
    original: &'a DiskSpec,
    changed: DiskSpec,
    made: Made,
    /// Rounds without the change, complete pairs or not.
    without: Vec<Round>,
}

/// Tries a change of a disk, whose options are `original`.
///
/// # Errors
/// Fails if the disk could not be given its original options.
pub fn try_change(
    disk: &LiveDisk,
    change: &Change,
    original: &DiskSpec,
    plan: Plan,
    stop: &Interrupt,
) -> anyhow::Result<Tried> {
    let mut pairs = Vec::new();
    let stopped = match changed(original, change) {
        Err(error) => Some(error),
        Ok(changed) => {
            let mut trial = Trial {
                disk,
                plan,
                stop,
                change,
                original,
                changed,
                made: Made::Not,
                without: Vec::new(),
            };
            let stopped = trial.pairs(&mut pairs).err();
            trial.go_back()?;
            stopped.map(|error| format!("{error:#}"))
        }
    };
    Ok(Tried { pairs, stopped })
}

impl Trial<'_> {
    /// Runs all rounds. The error says why the trial ended early.
    fn pairs(&mut self, pairs: &mut Vec<Pair>) -> anyhow::Result<()> {
        for _ in 0..self.plan.pairs {
            let without = self.round(Side::Without)?;
            self.without.push(without);
            let with = self.round(Side::With)?;
            if let Some(problem) = worse(&self.without, &with) {
                return Err(anyhow!("with the change, {problem}"));
            }
            pairs.push(Pair { without, with });
        }
        Ok(())
    }

    fn round(&mut self, side: Side) -> anyhow::Result<Round> {
        self.switch(side)?;
        self.stop.sleep(SETTLE);
        let begin = self.moment()?;
        let mut left = self.plan.round;
        while left > Duration::ZERO {
            let step = left.min(LOOK);
            self.stop.sleep(step);
            self.stop.check()?;
            left -= step;
            if side == Side::With && left > Duration::ZERO {
                self.check_requests(&begin)?;
            }
        }
        measured(&begin, &self.moment()?)
    }

    /// Ends a round with the change early if more requests fail than in a round without it.
    fn check_requests(&self, begin: &Moment) -> anyhow::Result<()> {
        let since = self.disk.summary()?.since(&begin.summary);
        let failed: u64 = since.operations.iter().map(|op| op.errors).sum();
        let known = self.without.iter().map(|round| round.errors).max();
        match failed > known.unwrap_or(0) {
            true => Err(anyhow!("with the change, {failed} requests failed")),
            false => Ok(()),
        }
    }

    /// Gives the disk the options of this side, if it has others.
    fn switch(&mut self, side: Side) -> anyhow::Result<()> {
        self.stop.check()?;
        let seen = self.disk.seen()?;
        let mut foreign = seen.options.differences(self.original);
        let key = self.change.option();
        let present = self.side_of(&seen.options);
        foreign.retain(|other| other != key || present.is_none());
        if !foreign.is_empty() {
            return Err(anyhow!("another client has changed {}", foreign.join(", ")));
        }
        if present == Some(side) {
            return Ok(());
        }
        let wanted = match side {
            Side::Without => self.original,
            Side::With => &self.changed,
        };
        if side == Side::With {
            self.made = Made::Requested;
        }
        let changed = self.disk.change(wanted, key, Lasting::Transient)?;
        if side == Side::With {
            self.made = Made::Shown(Box::new(changed.options));
        }
        Ok(())
    }

    /// Returns the side whose value the option of the trial has. `None`: another client has changed
    /// the option.
    fn side_of(&self, options: &DiskSpec) -> Option<Side> {
        let key = self.change.option();
        let has = |other: &DiskSpec| options.differences(other).iter().all(|one| one != key);
        match &self.made {
            _ if has(self.original) => Some(Side::Without),
            Made::Shown(shown) if has(shown) => Some(Side::With),
            Made::Requested => Some(Side::With),
            Made::Shown(_) | Made::Not => None,
        }
    }

    /// Gives the disk the original value of the option of the trial. Other options stay as they
    /// are: another client may have changed them.
    fn go_back(&self) -> anyhow::Result<()> {
        let mut attempt = 1;
        loop {
            match self.put_back() {
                Ok(()) => return Ok(()),
                Err(_) if attempt < ATTEMPTS => thread::sleep(PAUSE),
                Err(error) => return Err(error).with_context(|| self.advice_to_go_back()),
            }
            attempt += 1;
        }
    }

    fn put_back(&self) -> anyhow::Result<()> {
        let seen = self.disk.seen()?;
        if self.side_of(&seen.options) != Some(Side::With) {
            return Ok(());
        }
        let key = self.change.option();
        let named = [key.to_owned()].into();
        let back = self.original.over(&named, &seen.options);
        let back = back.map_err(anyhow::Error::msg)?;
        self.disk.change(&back, key, Lasting::Transient)?;
        Ok(())
    }

    fn advice_to_go_back(&self) -> String {
        let (name, key) = (self.disk.name(), self.change.option());
        format!(
            "disk '{name}': cannot go back to the original option '{key}', which lasts until the \
             server restarts; see `fathom show {name}`, and use `fathom disk change`"
        )
    }

    fn moment(&self) -> anyhow::Result<Moment> {
        let workers = self.disk.seen()?.state.workers;
        Ok(Moment {
            workers,
            summary: self.disk.summary()?,
        })
    }
}

/// The counters of a disk at the begin or the end of a round.
struct Moment {
    workers: Vec<WorkerInfo>,
    summary: Summary,
}

/// Returns what the disk did between two moments.
///
/// # Errors
/// Fails if no request completed.
fn measured(begin: &Moment, end: &Moment) -> anyhow::Result<Round> {
    let since = end.summary.since(&begin.summary);
    let seconds = since.seconds.filter(|seconds| *seconds > 0.0);
    let seconds = seconds.context("the server does not report the time of its counters")?;
    let totals = since.operations.iter().filter_map(|op| op.stages.last());
    let mut buckets: Vec<Bucket> = totals.flat_map(|total| total.histogram.clone()).collect();
    buckets.sort_by(|one, other| one.0.total_cmp(&other.0));
    let ranges = buckets.iter().map(|Bucket(from, to, n)| (*from, *to, *n));
    let requests: u64 = ranges.clone().map(|(_, _, n)| n).sum();
    let longest = buckets.last().map_or(0.0, |Bucket(_, to, _)| *to);
    let at = |q| quantile(ranges.clone(), longest, q).map(|ns| ns / 1e3);
    if requests == 0 {
        return Err(anyhow!("no request completed in a round of {seconds:.1} s"));
    }
    Ok(Round {
        iops: requests as f64 / seconds,
        p50_us: at(0.5),
        p90_us: at(0.9),
        p99_us: at(0.99),
        cpu_us: cpu_ns(&begin.workers, &end.workers).map(|ns| ns as f64 / 1e3 / requests as f64),
        errors: since.operations.iter().map(|op| op.errors).sum(),
    })
}

/// Returns the CPU time of the disk's threads between two moments. `None`: the threads belong to a
/// pool.
fn cpu_ns(begin: &[WorkerInfo], end: &[WorkerInfo]) -> Option<u64> {
    let sum = |workers: &[WorkerInfo]| -> Option<u64> {
        workers.iter().map(|worker| worker.cpu_ns).sum()
    };
    sum(end)?.checked_sub(sum(begin)?)
}
