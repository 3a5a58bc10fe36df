//! Injects delays on purpose, as a known truth for latency instruments.
//!
//! Every other request or notification waits at one place, and the injector measures the actual
//! delay.
//!
//! Injection is not a filter: `delay` holds requests before they reach the disk and does not
//! block the worker. Injection slows down the worker itself, its storage, or its interrupts, which
//! is what an instrument must detect.

use fathom_core::{
    Channel, ChannelLayer, Clock, Cx, Disk, DiskError, DiskLayer, RequestId, Source, SourceLayer,
    Stage, WrapSource,
};
use fathom_units::parse_duration;
use parking_lot::Mutex;
use serde::Serialize;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The place of an injected delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// In the stage `queue`, before the disk receives the request.
    Queue,
    /// In the stage `device`, before the storage does the I/O.
    Storage,
    /// In the stage `notify`, before the guest is interrupted.
    Notify,
}

/// `PLACE=DELAY`, such as `storage=100ms`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Injection {
    /// Place at which requests are delayed.
    pub place: Place,
    /// Time for which every other request or notification waits, at most 10 s.
    pub delay: Duration,
}

impl FromStr for Injection {
    type Err = String;

    fn from_str(text: &str) -> Result<Injection, String> {
        let bad = || {
            format!("'{text}' is not storage, queue or notify with a time, such as storage=100ms")
        };
        let (place, delay) = text.split_once('=').ok_or_else(bad)?;
        let place = match place {
            "queue" => Place::Queue,
            "storage" => Place::Storage,
            "notify" => Place::Notify,
            _ => return Err(bad()),
        };
        match parse_duration(delay) {
            Ok(delay) if delay <= Duration::from_secs(10) => Ok(Injection { place, delay }),
            Ok(_) => Err("a delay of more than 10s cannot be injected".into()),
            Err(_) => Err(bad()),
        }
    }
}

/// Statistics of the injected delays as measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Injected {
    /// Place at which requests were delayed.
    pub place: Place,
    /// Number of measured delays, at least 1.
    pub count: usize,
    /// Shortest delay in nanoseconds.
    pub min_ns: f64,
    /// Median of the delays in nanoseconds.
    pub p50_ns: f64,
    /// Longest delay in nanoseconds.
    pub max_ns: f64,
}

impl fmt::Display for Injected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = 1e6;
        write!(
            f,
            "injected at {:?}: {} delays of {:.3} to {:.3} ms, median {:.3} ms",
            self.place,
            self.count,
            self.min_ns / ms,
            self.max_ns / ms,
            self.p50_ns / ms
        )
    }
}

/// State shared by all delays of one injection.
pub struct Injector {
    injection: Injection,
    turn: AtomicU64,
    /// The measured delays in ticks.
    measured: Mutex<Vec<u64>>,
}

impl Injector {
    /// Creates the state of an injection, with no delays measured yet.
    pub fn new(injection: Injection) -> Arc<Injector> {
        Arc::new(Injector {
            injection,
            turn: AtomicU64::new(0),
            measured: Mutex::default(),
        })
    }

    /// Waits if it is this caller's turn, and returns whether it was.
    fn delay(&self) -> bool {
        if self.turn.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
            return false;
        }
        let clock = Clock::get();
        let start = clock.now();
        std::thread::sleep(self.injection.delay);
        let ticks = clock.now() - start;
        let mut measured = self.measured.lock();
        measured.push(ticks);
        true
    }

    /// Returns the statistics, or `None` before the first delay.
    pub fn outcome(&self) -> Option<Injected> {
        let measured = self.measured.lock();
        let mut sorted = measured.clone();
        sorted.sort_unstable();
        let ns = |ticks: u64| ticks as f64 * 1e9 / Clock::get().hz();
        Some(Injected {
            place: self.injection.place,
            count: sorted.len(),
            min_ns: ns(*sorted.first()?),
            p50_ns: ns(sorted[sorted.len() / 2]),
            max_ns: ns(*sorted.last()?),
        })
    }

    /// Wraps the disk that workers use.
    pub fn wrap_disk(self: &Arc<Self>, disk: Arc<dyn Disk>) -> Arc<dyn Disk> {
        match self.injection.place {
            Place::Notify => disk,
            Place::Queue | Place::Storage => Arc::new(SlowDisk {
                disk,
                injector: self.clone(),
            }),
        }
    }

    /// Returns the wrapper for queues, if notifications are delayed.
    pub fn wrap_source(self: &Arc<Self>) -> Option<WrapSource> {
        let injector = self.clone();
        (self.injection.place == Place::Notify).then(|| {
            let wrap = move |source| -> Box<dyn Source> {
                let injector = injector.clone();
                Box::new(SlowSource { source, injector })
            };
            Arc::new(wrap) as WrapSource
        })
    }
}

struct SlowDisk {
    disk: Arc<dyn Disk>,
    injector: Arc<Injector>,
}

impl DiskLayer for SlowDisk {
    fn below(&self) -> &dyn Disk {
        &*self.disk
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        Ok(Box::new(SlowChannel {
            channel: self.disk.channel(cx)?,
            injector: self.injector.clone(),
        }))
    }
}

struct SlowChannel {
    channel: Box<dyn Channel>,
    injector: Arc<Injector>,
}

impl ChannelLayer for SlowChannel {
    fn below(&mut self) -> &mut dyn Channel {
        &mut *self.channel
    }

    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        if self.injector.injection.place == Place::Storage {
            cx.enter(id, Stage::Device);
        }
        if self.injector.delay() {
            cx.tick();
        }
        self.channel.submit(cx, id);
    }
}

struct SlowSource {
    source: Box<dyn Source>,
    injector: Arc<Injector>,
}

impl SourceLayer for SlowSource {
    fn below(&self) -> &dyn Source {
        &*self.source
    }

    fn below_mut(&mut self) -> &mut dyn Source {
        &mut *self.source
    }

    fn into_below(self: Box<Self>) -> Box<dyn Source> {
        self.source
    }

    fn notify(&mut self) {
        self.injector.delay();
        self.source.notify();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_core::{Broken, Request};
    use std::any::Any;
    use std::os::fd::RawFd;

    #[test]
    fn an_injection_is_a_place_and_a_time() {
        let injection = |text: &str| text.parse::<Injection>();
        let delay = Duration::from_millis(100);
        let place = Place::Storage;
        assert_eq!(injection("storage=100ms"), Ok(Injection { place, delay }));
        for bad in [
            "",
            "storage",
            "storage=",
            "disk=1ms",
            "queue=1",
            "notify=11s",
        ] {
            assert!(injection(bad).is_err(), "{bad}");
        }
    }

    /// A queue of a killed server with three requests to serve again.
    struct Killed;

    impl Source for Killed {
        fn capacity(&self) -> usize {
            8
        }

        fn kick_fd(&self) -> Option<RawFd> {
            None
        }

        fn inherited(&self) -> usize {
            3
        }

        fn pending(&mut self) -> bool {
            false
        }

        fn pop(&mut self, _: &mut Cx, _: usize, _: &mut Vec<RequestId>) -> Result<u32, Broken> {
            Ok(0)
        }

        fn finish(&mut self, _: &Request) {}

        fn publish(&mut self, _: &mut Cx) -> bool {
            false
        }

        fn into_any(self: Box<Self>) -> Box<dyn Any> {
            self
        }
    }

    #[test]
    fn slow_queue_of_a_killed_server_has_its_requests_served_again() {
        let injector = Injector::new("notify=1ms".parse().unwrap());
        let slow = injector.wrap_source().unwrap()(Box::new(Killed));
        assert_eq!(slow.inherited(), 3);
    }

    #[test]
    fn every_other_one_is_delayed_and_measured() {
        let delay = Duration::from_millis(2);
        let injector = Injector::new(Injection {
            place: Place::Queue,
            delay,
        });
        assert_eq!(injector.outcome(), None);
        let delayed: Vec<bool> = (0..6).map(|_| injector.delay()).collect();
        assert_eq!(delayed, [false, true, false, true, false, true]);
        let outcome = injector.outcome().unwrap();
        assert_eq!(outcome.count, 3);
        assert!(outcome.min_ns >= 2e6 && outcome.min_ns <= outcome.p50_ns);
    }
}
