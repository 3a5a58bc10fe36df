//! Suspects what limits a disk, by a few rules about where its requests spend their time.
//!
//! The result is a hint, derived only from the interval's figures.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Kind of the suspected limiter, for programs:
///
/// - `idle`: the disk has few or no requests.
/// - `frozen`: the disk is frozen.
/// - `stuck`: requests are in flight, and none has completed.
/// - `filter`: a filter delays requests.
/// - `thread`: a thread has no CPU time left.
/// - `tables`: lookups in the image's tables take most of the time.
/// - `storage`: the storage is busy.
/// - `latency`: few requests are in flight at the same time, so their latency limits the speed.
/// - `mixed`: no single cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LimiterKind {
    /// The disk has few or no requests.
    Idle,
    /// The disk is frozen.
    Frozen,
    /// Requests are in flight, and none has completed.
    Stuck,
    /// A filter delays requests.
    Filter,
    /// A thread has no CPU time left.
    Thread,
    /// Lookups in the image's tables take most of the time.
    Tables,
    /// The storage is busy.
    Storage,
    /// Few requests are in flight at the same time, so their latency limits the speed.
    Latency,
    /// No single cause.
    Mixed,
}

/// The suspected limiter of a disk in an interval: a hint, which simple rules derive from the
/// interval's numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Limiter {
    /// Kind of the limiter, for programs.
    pub kind: LimiterKind,
    /// Description of the limiter for display, in one line.
    pub text: String,
}

/// The figures of a disk in an interval.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub frozen: bool,
    pub requests: u64,
    pub in_flight: u64,
    /// Mean number of requests in flight.
    pub depth: f64,
    pub mean_us: f64,
    /// Shares of the time that requests spend in these stages.
    pub queue: f64,
    pub map: f64,
    pub device: f64,
    /// The filters as on the command line.
    pub filters: Vec<String>,
    /// Share of a CPU that the busiest worker has used, and share of the time in which it polled.
    pub cpu_percent: f64,
    pub polling_percent: f64,
    /// CPU usage in percent of the busiest thread of the disk's pool, for all disks of the pool.
    pub pool_cpu_percent: f64,
    /// Whether the disk's storage is an NBD server.
    pub is_nbd: bool,
}

/// Filters that delay requests. Others change or count them.
const HOLDING: [&str; 4] = ["delay", "throttle", "pause", "fault"];
/// Share of the time above which a stage counts as the main one.
const MOST: f64 = 0.5;
/// Percentage of a CPU above which no CPU time is left.
const BUSY: f64 = 90.0;
/// Mean number of requests in flight below which the disk is mostly idle.
const LITTLE: f64 = 0.05;
/// Mean number of requests in flight up to which requests come one after the other.
const ONE: f64 = 1.5;
/// Mean number of requests in flight from which on the storage counts as busy.
const DEEP: f64 = 4.0;

impl Limiter {
    /// Derives the suspected limiter from the figures of an interval.
    pub fn of(seen: &Seen) -> Limiter {
        let (kind, text) = judge(seen);
        Limiter { kind, text }
    }
}

fn judge(seen: &Seen) -> (LimiterKind, String) {
    use LimiterKind::{Filter, Frozen, Idle, Latency, Mixed, Storage, Stuck, Tables, Thread};
    let percent = |share: f64| format!("{:.0}%", 100.0 * share);
    let depth = seen.depth;
    if seen.frozen {
        return (
            Frozen,
            "frozen: requests wait until 'fathom disk thaw'".to_owned(),
        );
    }
    if seen.requests == 0 {
        return match seen.in_flight {
            0 => (Idle, "idle".to_owned()),
            n => (Stuck, stuck(n, &seen.filters)),
        };
    }
    if seen.queue > MOST && !seen.filters.is_empty() {
        let share = percent(seen.queue);
        let holding = holding(&seen.filters);
        return (Filter, format!("{holding} {share} of the time"));
    }
    if seen.cpu_percent > BUSY && seen.polling_percent < 100.0 - BUSY {
        let text = format!("its thread: {:.0}% of a CPU", seen.cpu_percent);
        return (Thread, text);
    }
    if seen.pool_cpu_percent > BUSY && seen.polling_percent < 100.0 - BUSY {
        let text = format!(
            "a thread of its pool: {:.0}% of a CPU",
            seen.pool_cpu_percent
        );
        return (Thread, text);
    }
    if depth < LITTLE {
        return (
            Idle,
            format!("mostly idle: busy {} of the time", busy(depth)),
        );
    }
    if seen.map > MOST {
        let share = percent(seen.map);
        return (
            Tables,
            format!("the image's tables: {share} of the time (metadata-cache)"),
        );
    }
    let storage = if seen.is_nbd {
        "the NBD server"
    } else {
        "the storage"
    };
    if seen.device > MOST && depth >= DEEP {
        let share = percent(seen.device);
        return (
            Storage,
            format!("{storage}: {share} of the time, {depth:.0} in flight"),
        );
    }
    if depth <= ONE {
        let took = time(seen.mean_us);
        return (
            Latency,
            format!("latency: {depth:.1} in flight, {took} each"),
        );
    }
    if seen.device > MOST {
        let share = percent(seen.device);
        return (
            Storage,
            format!("{storage}: {share} of the time, only {depth:.1} in flight"),
        );
    }
    let (queue, device) = (percent(seen.queue), percent(seen.device));
    (
        Mixed,
        format!("nothing alone: queue {queue}, device {device}, {depth:.1} in flight"),
    )
}

fn stuck(in_flight: u64, filters: &[String]) -> String {
    let text = format!("{in_flight} in flight, none answered");
    match filters.is_empty() {
        true => text,
        false => format!("{text}; {}", holding(filters)),
    }
}

/// Names the filters that delay requests, as far as known.
fn holding(filters: &[String]) -> String {
    let name = |filter: &String| filter.split(':').next().unwrap_or_default().to_owned();
    let may = filters
        .iter()
        .filter(|filter| HOLDING.contains(&&*name(filter)));
    let may: Vec<_> = may.map(String::as_str).collect();
    match (&may[..], filters) {
        ([one], _) => format!("filter {one} holds back"),
        ([], [one]) => format!("filter {one} holds back"),
        ([], _) => format!("filters {} hold back", filters.join(", ")),
        (several, _) => format!("filters {} hold back", several.join(", ")),
    }
}

fn busy(depth: f64) -> String {
    match depth < 0.01 {
        true => "less than 1%".to_owned(),
        false => format!("{:.0}%", 100.0 * depth),
    }
}

fn time(us: f64) -> String {
    match us {
        us if us >= 1e6 => format!("{:.1} s", us / 1e6),
        us if us >= 1e4 => format!("{:.0} ms", us / 1e3),
        us if us >= 1e3 => format!("{:.1} ms", us / 1e3),
        us => format!("{us:.0} us"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the figures of a disk with some load.
    fn some() -> Seen {
        Seen {
            requests: 1000,
            in_flight: 1,
            depth: 1.0,
            mean_us: 80.0,
            device: 0.9,
            ..Seen::default()
        }
    }

    fn is(seen: Seen, kind: LimiterKind, words: &str) {
        let limiter = Limiter::of(&seen);
        assert_eq!(limiter.kind, kind, "{limiter:?}");
        assert!(limiter.text.contains(words), "{limiter:?}");
        assert_eq!(limiter.text.lines().count(), 1);
    }

    #[test]
    fn each_limit_is_told_apart() {
        use LimiterKind::*;
        is(Seen::default(), Idle, "idle");
        is(
            Seen {
                frozen: true,
                ..some()
            },
            Frozen,
            "thaw",
        );
        is(
            Seen {
                requests: 0,
                in_flight: 3,
                ..some()
            },
            Stuck,
            "3 in flight",
        );
        is(
            Seen {
                depth: 0.02,
                ..some()
            },
            Idle,
            "2%",
        );
        is(
            Seen {
                map: 0.7,
                device: 0.2,
                ..some()
            },
            Tables,
            "70%",
        );
        is(
            Seen {
                depth: 32.0,
                ..some()
            },
            Storage,
            "32 in flight",
        );
        is(
            Seen {
                depth: 32.0,
                is_nbd: true,
                ..some()
            },
            Storage,
            "NBD server",
        );
        is(some(), Latency, "80 us each");
        is(
            Seen {
                depth: 3.0,
                ..some()
            },
            Storage,
            "only 3.0",
        );
        is(
            Seen {
                depth: 3.0,
                device: 0.4,
                ..some()
            },
            Mixed,
            "device 40%",
        );
    }

    #[test]
    fn a_thread_that_only_polls_is_not_busy() {
        let busy = Seen {
            cpu_percent: 98.0,
            depth: 32.0,
            ..some()
        };
        is(busy.clone(), LimiterKind::Thread, "98% of a CPU");
        is(
            Seen {
                polling_percent: 60.0,
                ..busy
            },
            LimiterKind::Storage,
            "storage",
        );
        let of_pool = Seen {
            pool_cpu_percent: 99.0,
            depth: 32.0,
            ..some()
        };
        is(of_pool, LimiterKind::Thread, "pool");
    }

    #[test]
    fn the_filter_that_may_hold_back_is_named() {
        let held = |filters: &[&str]| Seen {
            queue: 0.97,
            device: 0.02,
            filters: filters.iter().map(|one| (*one).to_owned()).collect(),
            ..some()
        };
        let filter = LimiterKind::Filter;
        is(
            held(&["readonly", "delay:read=30ms"]),
            filter,
            "filter delay:read=30ms holds",
        );
        is(
            held(&["delay", "throttle:iops=5"]),
            filter,
            "filters delay, throttle:iops=5 hold",
        );
        is(held(&["cow"]), filter, "filter cow");
        // Without filters, requests queue in front of the image.
        is(held(&[]), LimiterKind::Latency, "latency");
    }
}
