//! The alarms of one disk.

use crate::events::{Events, Happened};
use fathom_core::{Oldest, Op, WorkerHandle};
use fathom_spec::{Alarm, Limit, WINDOW, name_of};
use fathom_trace::{Bucket, Now, SlowRequest, Summary};
use fathom_units::short_duration;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};
use utoipa::ToSchema;

/// Maximum number of slow requests in an alarm's event.
const TOLD: usize = 5;
/// Minimum number of slow completed requests; fewer may be a coincidence.
const ENOUGH: u64 = 10;
/// Time for workers to report their waiting requests at the end of a window.
const REPLY: Duration = Duration::from_millis(250);
/// Minimum and maximum interval between checks of the oldest request.
const LOOKS: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(10));

/// State of an alarm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AlarmInfo {
    /// The alarm in the syntax of the disk's option `alarms`, such as `p99=5ms`.
    pub alarm: String,
    /// The alarm is raised: requests exceed the limit at present.
    pub raised: bool,
    /// Number of times that the alarm was raised since the server opened the disk.
    pub times: u64,
}

/// The data that alarms examine.
pub struct Seen<'a> {
    /// Workers of the disk, which report their oldest requests.
    pub workers: &'a [WorkerHandle],
    /// Number of the disk's requests in flight.
    pub in_flight: u64,
    /// Function that returns the disk's counters so far.
    pub summary: &'a dyn Fn() -> Summary,
    /// Function that returns at most this number of the slowest recent requests, the slowest first.
    pub slow: &'a dyn Fn(usize) -> Vec<SlowRequest>,
}

/// All alarms of one disk.
#[derive(Default)]
pub struct Watches {
    all: Vec<Watch>,
    /// The counters at the start of the window. `None`: no window has begun.
    before: Option<Summary>,
    window_ends: Option<Instant>,
    /// A window that has ended and is to be judged.
    ended: Option<Ended>,
}

/// A window that has ended, while workers report their waiting requests.
struct Ended {
    window: Summary,
    since: Instant,
    asked: Vec<Receiver<Option<Oldest>>>,
}

/// A request in flight.
struct Waits {
    age: Duration,
    stage: String,
    /// The request. `None`: its worker does not respond.
    request: Option<SlowRequest>,
}

struct Watch {
    alarm: Alarm,
    raised: bool,
    times: u64,
    /// When to check the oldest request again.
    look_at: Option<Instant>,
    /// The pending replies of workers.
    asked: Vec<Receiver<Option<Oldest>>>,
    /// Since when a worker has not responded.
    unheard: Option<Instant>,
}

/// Why an alarm is raised.
struct Cause {
    /// Description for display.
    text: String,
    stage: String,
    requests: Vec<SlowRequest>,
}

impl Watches {
    /// Creates the watches of these alarms, none of which is raised.
    pub fn new(alarms: &[Alarm]) -> Watches {
        let now = Instant::now();
        let watch = |alarm: &Alarm| Watch {
            look_at: (alarm.limit == Limit::Oldest).then_some(now),
            alarm: alarm.clone(),
            raised: false,
            times: 0,
            asked: Vec::new(),
            unheard: None,
        };
        let all: Vec<_> = alarms.iter().map(watch).collect();
        let has_window = all.iter().any(|one| one.look_at.is_none());
        Watches {
            all,
            before: None,
            window_ends: has_window.then_some(now),
            ended: None,
        }
    }

    /// Restarts the window, because present counters come from another process.
    pub fn restart(&mut self) {
        (self.before, self.ended) = (None, None);
        self.window_ends = self.window_ends.map(|_| Instant::now());
    }

    /// Returns the state of all alarms, in the order in which they were configured.
    pub fn info(&self) -> Vec<AlarmInfo> {
        let info = |one: &Watch| AlarmInfo {
            alarm: one.alarm.to_string(),
            raised: one.raised,
            times: one.times,
        };
        self.all.iter().map(info).collect()
    }

    /// Returns when to call [`Watches::look`] next.
    pub fn next(&self) -> Option<Instant> {
        let looks = self.all.iter().filter_map(|one| one.look_at);
        let judged = self.ended.as_ref().map(|ended| ended.since + REPLY);
        looks.chain(self.window_ends).chain(judged).min()
    }

    /// Makes the checks that are due, and reports changes.
    pub fn look(&mut self, disk: &str, seen: &Seen<'_>, events: &Events) {
        let now = Instant::now();
        if self.window_ends.is_some_and(|end| end <= now) {
            self.window_ends = Some(now + WINDOW);
            let counted = (seen.summary)();
            let before = self.before.replace(counted.clone());
            self.ended = before.map(|before| Ended::new(counted.since(&before), now, seen));
        }
        if let Some(ended) = self.ended.take_if(|ended| ended.since + REPLY <= now) {
            let waits = ended.waits(now, seen);
            for watch in &mut self.all {
                if let Limit::Percentile(thousandths, op) = watch.alarm.limit {
                    let cause = watch
                        .by_percentile(&ended.window, thousandths, op, seen)
                        .or_else(|| watch.by_waiting(&ended.window, thousandths, op, &waits, seen));
                    watch.tell(disk, cause, events);
                }
            }
        }
        for watch in &mut self.all {
            if watch.look_at.is_some_and(|at| at <= now) {
                if let Some(cause) = watch.by_oldest(now, seen) {
                    watch.tell(disk, cause, events);
                }
                let (least, most) = LOOKS;
                let pause = (watch.alarm.time / 4).clamp(least, most);
                watch.look_at = Some(now + pause);
            }
        }
    }
}

impl Ended {
    fn new(window: Summary, now: Instant, seen: &Seen<'_>) -> Ended {
        let workers = seen.workers.iter().filter(|_| seen.in_flight > 0);
        Ended {
            window,
            since: now,
            asked: workers.map(WorkerHandle::begin_oldest).collect(),
        }
    }

    /// Returns the oldest request of each worker.
    ///
    /// If a worker does not respond, its request is at least as old as the question to it.
    fn waits(&self, now: Instant, seen: &Seen<'_>) -> Vec<Waits> {
        let clocks = Now::read();
        let answers = self.asked.iter().map(Receiver::try_recv);
        let waits = answers.filter_map(|answer| match answer {
            Ok(oldest) => {
                let oldest = oldest?;
                let request = SlowRequest::of(&oldest.record, &clocks);
                Some(Waits {
                    age: Duration::from_nanos(request.total_ns),
                    stage: oldest.stage.name().to_owned(),
                    request: Some(request),
                })
            }
            Err(TryRecvError::Empty) => (seen.in_flight > 0).then(|| Waits {
                age: now.duration_since(self.since),
                stage: "worker".into(),
                request: None,
            }),
            Err(TryRecvError::Disconnected) => None,
        });
        waits.collect()
    }
}

impl Watch {
    /// Judges by the number of requests that took longer or are in flight for longer.
    ///
    /// This covers operations with too few requests for a percentile, or with none completed.
    /// Returns `None` if no limit is exceeded.
    fn by_waiting(
        &self,
        window: &Summary,
        thousandths: u16,
        op: Option<Op>,
        waits: &[Waits],
        seen: &Seen<'_>,
    ) -> Option<Cause> {
        let limit = self.alarm.time;
        let is_meant = |name: &str| op.is_none_or(|op| op.name() == name);
        let is_of = |waits: &Waits, name: &str| match &waits.request {
            Some(request) => request.op == name,
            // The operation of this request is unknown.
            None => op.is_none(),
        };
        let names = Op::ALL.into_iter().map(Op::name);
        names.filter(|name| is_meant(name)).find_map(|name| {
            let counted = window.operations.iter().find(|one| one.op == name);
            let total = counted.and_then(|one| one.stages.last());
            let answered = total.map_or(0, |total| total.count);
            let slow: u64 = total.map_or(0, |total| {
                let above = total.histogram.iter();
                let above = above.filter(|Bucket(from, _, _)| *from >= limit.as_nanos() as f64);
                above.map(|Bucket(_, _, count)| count).sum()
            });
            let old: Vec<_> = { waits.iter() }
                .filter(|waits| waits.age > limit && is_of(waits, name))
                .collect();
            let (late, all) = (slow + old.len() as u64, answered + old.len() as u64);
            let is_tail = late * 1000 > u64::from(1000 - thousandths) * all;
            if !is_tail || (old.is_empty() && slow < ENOUGH) {
                return None;
            }
            let mut requests: Vec<_> = old.iter().filter_map(|one| one.request.clone()).collect();
            requests.extend(self.slow_requests(name, seen));
            let stage = old
                .iter()
                .max_by_key(|one| one.age)
                .map(|one| one.stage.clone());
            let stage = stage.or_else(|| longest(&requests)).unwrap_or_default();
            requests.truncate(TOLD);
            let (percentile, limit) = (name_of(thousandths), short_duration(limit));
            let text = match old.len() {
                0 => format!(
                    "{percentile} of {name} is over {limit}: {late} of {all} requests took longer"
                ),
                waiting => format!(
                    "{percentile} of {name} is over {limit}: {slow} of {answered} completed \
                     requests took longer; in flight for longer: {waiting}"
                ),
            };
            Some(Cause {
                text,
                stage,
                requests,
            })
        })
    }

    /// Returns requests of an operation that took too long in the last window, the slowest first.
    fn slow_requests(&self, op: &str, seen: &Seen<'_>) -> Vec<SlowRequest> {
        let window = WINDOW + REPLY;
        let since = Now::read()
            .time_ms()
            .saturating_sub(window.as_millis() as u64);
        let mut requests = (seen.slow)(usize::MAX);
        requests.retain(|one| {
            let is_slow = u128::from(one.total_ns) > self.alarm.time.as_nanos();
            one.op == op && one.time_ms >= since && is_slow
        });
        requests
    }

    /// Judges by a percentile. Returns `None` if the limit is not exceeded.
    fn by_percentile(
        &self,
        window: &Summary,
        thousandths: u16,
        op: Option<Op>,
        seen: &Seen<'_>,
    ) -> Option<Cause> {
        let limit = self.alarm.time.as_nanos() as f64;
        let meant = |name: &str| op.is_none_or(|op| op.name() == name);
        let ops = window.operations.iter().filter(|one| meant(&one.op));
        let took = ops.filter_map(|one| {
            let total = one.stages.last()?;
            let ns = match thousandths {
                500 => total.p50_ns,
                900 => total.p90_ns,
                990 => total.p99_ns,
                _ => total.p999_ns,
            };
            Some((one, ns?))
        });
        let (worst, ns) = took.max_by(|a, b| a.1.total_cmp(&b.1))?;
        if ns <= limit {
            return None;
        }
        let mut requests = self.slow_requests(&worst.op, seen);
        let stage = longest(&requests).unwrap_or_else(|| {
            let stages = worst
                .stages
                .split_last()
                .map_or(&[][..], |(_, stages)| stages);
            let longest = stages.iter().max_by(|a, b| a.mean_ns.total_cmp(&b.mean_ns));
            longest.map_or(String::new(), |stage| stage.stage.clone())
        });
        requests.truncate(TOLD);
        let (name, time) = (name_of(thousandths), Duration::from_nanos(ns as u64));
        let text = format!("{name} of {} is {}", worst.op, rounded(time));
        Some(Cause {
            text,
            stage,
            requests,
        })
    }

    /// Judges by the oldest request. `None`: not known yet. `Some(None)`: the limit is not
    /// exceeded.
    fn by_oldest(&mut self, now: Instant, seen: &Seen<'_>) -> Option<Option<Cause>> {
        let answered: Vec<_> = self.asked.iter().map(Receiver::try_recv).collect();
        if answered.contains(&Err(TryRecvError::Empty)) {
            let since = *self.unheard.get_or_insert(now);
            let is_late = now.duration_since(since) > self.alarm.time;
            return (is_late && seen.in_flight > 0).then(|| {
                Some(Cause {
                    text: "a worker with requests in flight does not respond".into(),
                    stage: "worker".into(),
                    requests: Vec::new(),
                })
            });
        }
        self.unheard = None;
        let first = self.asked.is_empty();
        self.asked.clear();
        if seen.in_flight > 0 {
            self.asked = seen
                .workers
                .iter()
                .map(WorkerHandle::begin_oldest)
                .collect();
        }
        let known = answered.into_iter().filter_map(|one| one.ok().flatten());
        let oldest = known.min_by_key(|one| one.record.stamps[0]);
        let Some(oldest) = oldest else {
            return (!first || seen.in_flight == 0).then_some(None);
        };
        let request = SlowRequest::of(&oldest.record, &Now::read());
        if u128::from(request.total_ns) <= self.alarm.time.as_nanos() {
            return Some(None);
        }
        let age = rounded(Duration::from_nanos(request.total_ns));
        let text = format!("a {} request is in flight for {age}", request.op);
        Some(Some(Cause {
            text,
            stage: oldest.stage.name().to_owned(),
            requests: vec![request],
        }))
    }

    /// Sets whether the alarm is raised, and reports a change.
    fn tell(&mut self, disk: &str, cause: Option<Cause>, events: &Events) {
        let is_new = cause.is_some() != self.raised;
        self.raised = cause.is_some();
        if !is_new {
            return;
        }
        let (name, disk) = (self.alarm.to_string(), disk.to_owned());
        match cause {
            Some(Cause {
                text,
                stage,
                requests,
            }) => {
                self.times += 1;
                tracing::warn!(
                    "disk '{disk}': alarm {name} raised: {text}; longest stage: {stage}"
                );
                events.tell(Happened::Alarm {
                    disk,
                    alarm: name,
                    text,
                    stage,
                    requests,
                });
            }
            None => {
                tracing::info!("disk '{disk}': alarm {name} cleared");
                events.tell(Happened::AlarmOver { disk, alarm: name });
            }
        }
    }
}

/// Returns the stage in which these requests spent the most time in total.
fn longest(requests: &[SlowRequest]) -> Option<String> {
    let mut stages = BTreeMap::new();
    for (stage, ns) in requests.iter().flat_map(|one| &one.stages) {
        *stages.entry(stage).or_insert(0) += ns;
    }
    let longest = stages.into_iter().max_by_key(|(_, ns)| *ns)?;
    Some(longest.0.clone())
}

/// Rounds a time to two or more significant digits.
fn rounded(time: Duration) -> String {
    let ns = time.as_nanos() as u64;
    let unit = [1, 1_000, 1_000_000, 1_000_000_000];
    let unit = unit
        .into_iter()
        .rev()
        .find(|unit| *unit * 10 <= ns)
        .unwrap_or(1);
    short_duration(Duration::from_nanos(ns / unit * unit))
}
