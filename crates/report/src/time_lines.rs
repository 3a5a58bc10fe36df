//! Activities of each thread over a window: system calls, and user space between them.

use std::collections::HashMap;

use fathom_run::{Event, Kind, Thread};

use crate::analysis::TimeLine;
use crate::calls::{Call, order, thread_of};

/// Maximum number of spans of a thread; more than a picture can show.
const MAX_SPANS: usize = 2000;
const MAX_THREADS: usize = 64;

/// Collects the spans of a window, event by event.
#[derive(Debug)]
pub struct TimeLines {
    /// None: the window begins with the first event.
    start: Option<i64>,
    length: i64,
    threads: HashMap<u32, Line>,
    last: i64,
}

#[derive(Debug, Default)]
struct Line {
    spans: Vec<(i64, i64, What)>,
    now: Option<(i64, What)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    User,
    Call(Call),
    /// Events are missing.
    Unknown,
}

impl TimeLines {
    /// Collects the first `length` ns.
    pub fn first(length: i64) -> TimeLines {
        TimeLines {
            start: None,
            length,
            threads: HashMap::new(),
            last: i64::MIN,
        }
    }

    /// Collects from `start` to `end`, both in ns of the events' times.
    pub fn within(start: i64, end: i64) -> TimeLines {
        TimeLines {
            start: Some(start),
            ..TimeLines::first(end.saturating_sub(start))
        }
    }

    /// Processes an event at `time` in ns; events must be in order of time. Returns false after the
    /// end of the window: later events have no effect.
    #[inline]
    pub fn add(&mut self, time: i64, event: &Event) -> bool {
        let start = *self.start.get_or_insert(time);
        if time.saturating_sub(start) > self.length {
            return false;
        }
        self.last = time;
        let what = match event.kind {
            Kind::SysEnter => What::Call(Call::new(event.args[0], event.args[2])),
            Kind::SysExit => What::User,
            Kind::Lost => {
                let lines = self.threads.values_mut();
                lines.for_each(|line| line.turn(start, time, What::Unknown));
                return true;
            }
            _ => return true,
        };
        if self.threads.len() < MAX_THREADS || self.threads.contains_key(&event.tid) {
            let line = self.threads.entry(event.tid).or_default();
            line.turn(start, time, what);
            if line.spans.len() == MAX_SPANS {
                // End all lines at the same time, so that they can be compared.
                self.length = time.saturating_sub(start);
            }
        }
        true
    }

    /// Returns the length of the collected part of the window, in ns. The part is shorter than
    /// requested if a thread has too many spans.
    pub fn length(&self) -> i64 {
        self.length
    }

    /// Returns the lines, in the order of the table of calls; `threads` lists the known threads.
    pub fn finish(mut self, threads: &[Thread]) -> Vec<TimeLine> {
        let start = self.start.unwrap_or(0);
        let end = self.last.min(start.saturating_add(self.length));
        let mut lines: Vec<TimeLine> = self
            .threads
            .drain()
            .map(|(tid, mut line)| {
                line.turn(start, end, What::Unknown);
                TimeLine {
                    thread: thread_of(threads, tid),
                    spans: line.finish(start),
                }
            })
            .filter(|line| !line.spans.is_empty())
            .collect();
        lines.sort_by_key(|line| order(&line.thread));
        lines
    }
}

impl Line {
    /// Ends the thread's current span at `time` and starts the next one.
    fn turn(&mut self, start: i64, time: i64, what: What) {
        if let Some((since, was)) = self.now.replace((time, what)) {
            let since = since.max(start);
            if was != What::Unknown && since < time {
                self.spans.push((since, time, was));
            }
        }
    }

    fn finish(self, start: i64) -> Vec<(i64, i64, String)> {
        let name = |what| match what {
            What::Call(call) => call.name().into_owned(),
            What::User | What::Unknown => "user".to_owned(),
        };
        let from_start = |time: i64| time.saturating_sub(start);
        let span = |(from, to, what)| (from_start(from), from_start(to), name(what));
        self.spans.into_iter().map(span).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(tid: u32, nr: u64) -> Event {
        Event::new(0, Kind::SysEnter, 0, tid, &[nr, 0, 0, 0, 0])
    }

    fn exit(tid: u32, nr: u64) -> Event {
        Event::new(0, Kind::SysExit, 0, tid, &[nr, 0])
    }

    fn spans(line: &TimeLine) -> Vec<(i64, i64, &str)> {
        let spans = line.spans.iter();
        spans
            .map(|(from, to, what)| (*from, *to, what.as_str()))
            .collect()
    }

    #[test]
    fn a_line_has_no_gaps_but_those_of_missing_events() {
        let mut lines = TimeLines::first(1000);
        for (time, event) in [
            (100, enter(1, 0)),
            (110, exit(1, 0)),
            (150, enter(1, 17)),
            (200, Event::new(0, Kind::Lost, 0, 0, &[1])),
            (400, enter(1, 271)),
            (450, enter(2, 0)),
            (480, exit(1, 271)),
        ] {
            assert!(lines.add(time, &event));
        }
        let lines = lines.finish(&[]);
        assert_eq!(
            spans(&lines[0]),
            [
                (0, 10, "read"),
                (10, 50, "user"),
                (50, 100, "pread64"),
                (300, 380, "ppoll"),
            ]
        );
        assert_eq!(spans(&lines[1]), [(350, 380, "read")]);
    }

    #[test]
    fn what_reaches_over_the_windows_edges_is_clipped() {
        let mut lines = TimeLines::within(1000, 2000);
        assert!(lines.add(500, &enter(1, 0)));
        assert!(lines.add(600, &exit(1, 0)));
        assert!(lines.add(900, &enter(1, 17)));
        assert!(lines.add(1100, &exit(1, 17)));
        assert!(lines.add(1900, &enter(1, 0)));
        assert!(lines.add(2000, &exit(2, 0)));
        assert!(!lines.add(2001, &exit(1, 0)));
        let lines = lines.finish(&[]);
        assert_eq!(
            spans(&lines[0]),
            [(0, 100, "pread64"), (100, 900, "user"), (900, 1000, "read")]
        );
    }

    #[test]
    fn too_many_spans_end_the_window_for_all() {
        let mut lines = TimeLines::first(i64::MAX / 2);
        let mut time = 0;
        lines.add(0, &enter(9, 0));
        while lines.add(time, &enter(1, 0)) {
            lines.add(time + 1, &exit(1, 0));
            time += 2;
        }
        let lines = lines.finish(&[]);
        assert_eq!(lines[0].spans.len(), MAX_SPANS);
        let end = lines[0].spans[MAX_SPANS - 1].1;
        assert_eq!(spans(&lines[1]), [(0, end, "read")]);
    }
}
