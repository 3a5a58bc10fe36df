//! A slow request in the form for reports and the API.

use crate::clock::Clock;
use crate::ring::TraceRecord;
use crate::stage::Stage;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

/// A request that is among a disk's slowest recent requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowRequest {
    /// Identifier of the request; exemplars of metrics refer to it.
    pub id: String,
    /// Time of the reply, in milliseconds since 1970.
    pub time_ms: u64,
    /// Name of the operation, as [`Op::name`](crate::stage::Op::name) returns it.
    pub op: String,
    /// Offset in bytes from the start of the disk.
    pub offset: u64,
    /// Length of the request in bytes.
    pub len: u64,
    /// Number of the virtqueue on the disk, or of the NBD connection on the server modulo 65536.
    pub queue: u16,
    /// 0, or the errno that the request failed with.
    pub error: i32,
    /// Whether polling rather than a kick detected the request.
    pub polled: bool,
    /// Time from the detection of the request until its end, in nanoseconds.
    pub total_ns: u64,
    /// Time spent in each stage, in nanoseconds.
    pub stages: BTreeMap<String, u64>,
    /// The stage that took longest.
    pub longest: String,
}

/// The current time by both clocks, to convert stamps to dates.
pub struct Now {
    ticks: u64,
    time_ms: u64,
    ns_per_tick: f64,
}

impl Now {
    /// Reads both clocks.
    pub fn read() -> Now {
        let clock = Clock::get();
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        Now {
            ticks: clock.now(),
            time_ms: time.map_or(0, |time| time.as_millis() as u64),
            ns_per_tick: 1e9 / clock.hz(),
        }
    }

    /// Returns the current time in milliseconds since 1970.
    pub fn time_ms(&self) -> u64 {
        self.time_ms
    }

    fn ns(&self, ticks: u64) -> u64 {
        (ticks as f64 * self.ns_per_tick) as u64
    }
}

impl SlowRequest {
    /// Converts the record of a finished request. `now` must be later than the request's end.
    pub fn of(record: &TraceRecord, now: &Now) -> SlowRequest {
        let [start, .., end] = record.stamps;
        let stamps = record.stamps.windows(2);
        let times = stamps.map(|pair| now.ns(pair[1].saturating_sub(pair[0])));
        let times: Vec<_> = Stage::ALL.into_iter().zip(times).collect();
        let longest = times.iter().max_by_key(|(_, ns)| *ns);
        let ago_ms = now.ns(now.ticks.saturating_sub(end)) / 1_000_000;
        SlowRequest {
            id: format!("{start:x}"),
            time_ms: now.time_ms.saturating_sub(ago_ms),
            op: record.op.name().to_owned(),
            offset: record.offset,
            len: record.len,
            queue: record.queue,
            error: record.error,
            polled: record.polled,
            total_ns: now.ns(end.saturating_sub(start)),
            longest: longest.map_or("", |(stage, _)| stage.name()).to_owned(),
            stages: { times.iter() }
                .map(|(stage, ns)| (stage.name().to_owned(), *ns))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::Wire;
    use crate::stage::{Op, Stamps};
    use std::time::Duration;

    #[test]
    fn the_longest_stage_is_told_and_when_it_was() {
        let clock = Clock::get();
        let ms = |n| clock.ticks(Duration::from_millis(n));
        let end = clock.now();
        let mut stamps = Stamps::start(end - ms(30));
        stamps.enter(Stage::Queue, end - ms(29));
        stamps.enter(Stage::Device, end - ms(9));
        stamps.end(end);
        let record = TraceRecord {
            stamps: stamps.raw(),
            offset: 512,
            len: 1024,
            queue: 1,
            op: Op::Write,
            error: 0,
            polled: false,
            wire: Wire::None,
        };
        let now = Now::read();
        let slow = SlowRequest::of(&record, &now);
        assert_eq!((&*slow.op, &*slow.longest), ("write", "queue"));
        let near = |ns: u64, ms: u64| ns.abs_diff(ms * 1_000_000) < ms * 30_000;
        assert!(
            near(slow.total_ns, 30) && near(slow.stages["queue"], 20),
            "{slow:?}"
        );
        assert!(
            near(slow.stages["device"], 9) && near(slow.stages["wake"], 1),
            "{slow:?}"
        );
        assert!(now.time_ms - slow.time_ms < 1000);
        let text = serde_json::to_string(&slow).unwrap();
        assert_eq!(serde_json::from_str::<SlowRequest>(&text).unwrap(), slow);
    }
}
