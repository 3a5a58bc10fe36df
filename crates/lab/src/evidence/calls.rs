//! Counts system calls of threads with the kernel's tracepoint. While counting is on, every system
//! call of the machine takes longer. Therefore only a fifth of the window is counted, and the
//! result is extrapolated to the whole window.

use std::fs;
use std::time::Instant;

use perf_event::Builder;
use perf_event::events::Tracepoint;

use super::counters::Counters;

/// Period in samples of the counted parts. The middle sample of each period begins a part that ends
/// at the next sample. When a window begins, the load has not fully started, so the first sample
/// begins no part.
const EVERY: usize = 5;
/// Minimum number of counted parts. Fewer parts may not represent the window.
const FEWEST: usize = 2;

const IDS: [&str; 2] = [
    "/sys/kernel/tracing/events/raw_syscalls/sys_enter/id",
    "/sys/kernel/debug/tracing/events/raw_syscalls/sys_enter/id",
];

/// Counts system calls in one window.
pub struct Calls {
    /// The tracepoint, or `None` if the kernel does not count it or this process may not use it.
    event: Option<Tracepoint>,
    samples: usize,
    part: Option<Part>,
    /// Number of finished parts, the calls counted in them, and their duration in seconds.
    parts: usize,
    counted: u64,
    seconds: f64,
}

/// A part of the window in which calls are counted.
struct Part {
    since: Instant,
    counters: Counters,
}

impl Calls {
    pub fn new() -> Calls {
        let id = IDS.iter().find_map(|path| fs::read_to_string(path).ok());
        let id = id.and_then(|text| text.trim().parse().ok());
        Calls {
            event: id.map(Tracepoint::with_id),
            samples: 0,
            part: None,
            parts: 0,
            counted: 0,
            seconds: 0.0,
        }
    }

    /// Records that the window was sampled. `threads` are the threads to count.
    pub fn sampled(&mut self, threads: impl Iterator<Item = u32>) {
        self.end_part();
        if self.samples % EVERY == EVERY / 2
            && let Some(event) = self.event
        {
            match Counters::begin(&mut builder(event), threads) {
                Ok(counters) => self.part = counters.map(Part::begin),
                Err(_) => self.event = None,
            }
        }
        self.samples += 1;
    }

    /// Returns the extrapolated number of calls in a window of `seconds`, or `None` if too few
    /// parts were counted.
    pub fn end(mut self, seconds: f64) -> Option<u64> {
        self.end_part();
        let all = self.counted as f64 * seconds / self.seconds;
        (self.parts >= FEWEST && self.seconds > 0.0).then_some(all.round() as u64)
    }

    fn end_part(&mut self) {
        let Some(mut part) = self.part.take() else {
            return;
        };
        let seconds = part.since.elapsed().as_secs_f64();
        if let Ok(counted) = part.counters.counted() {
            self.parts += 1;
            self.counted += counted;
            self.seconds += seconds;
        }
    }
}

impl Part {
    fn begin(counters: Counters) -> Part {
        Part {
            since: Instant::now(),
            counters,
        }
    }
}

/// Configures the tracepoint's counter. The event happens in the kernel, so kernel mode is
/// included.
fn builder(event: Tracepoint) -> Builder<'static> {
    let mut builder = Builder::new(event);
    builder.include_kernel();
    builder
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tracers::tracefs::Tracefs;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    #[test]
    fn a_thread_has_the_calls_that_it_makes() {
        let (stop, made) = (AtomicBool::new(false), AtomicU64::new(0));
        let (told, thread) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: no arguments.
                told.send(unsafe { libc::gettid() } as u32).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    rustix::thread::sched_yield();
                    made.fetch_add(1, Ordering::SeqCst);
                }
            });
            let threads = [thread.recv().unwrap(), u32::MAX >> 1];
            let made = || made.load(Ordering::SeqCst);
            let _mounted = Tracefs::open();
            let event = Calls::new().event;
            let before = made();
            let part = event.map(|event| Counters::begin(&mut builder(event), threads.into_iter()));
            let begun = made();
            fathom_testing::until("1000 calls", || made() >= begun + 1000);
            let ending = made();
            let counted = part.map(|part| part.map(|part| part.unwrap().counted().unwrap()));
            let after = made();
            stop.store(true, Ordering::Relaxed);
            // SAFETY: no arguments.
            let is_root = unsafe { libc::geteuid() } == 0;
            match counted {
                // At most one call is between its execution and its count.
                Some(Ok(counted)) => {
                    let possible = ending - begun - 1..=after - before + 1;
                    assert!(possible.contains(&counted), "{counted}, not {possible:?}");
                }
                other => assert!(!is_root, "root may count, but: {other:?}"),
            }
        });
    }

    #[test]
    fn the_window_is_like_its_parts() {
        let calls = |parts| Calls {
            parts,
            counted: 10,
            seconds: 0.5,
            ..Calls::new()
        };
        assert_eq!(calls(FEWEST).end(2.0), Some(40));
        assert_eq!(calls(FEWEST - 1).end(2.0), None);
    }

    #[test]
    fn where_nothing_can_be_counted_nothing_is_said() {
        let mut calls = Calls::new();
        calls.sampled(std::iter::empty());
        assert_eq!(calls.end(1.0), None);
    }
}
