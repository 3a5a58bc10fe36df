//! Merges the streams of a round into one, in order of time.

use std::path::Path;

use fathom_run::{Clock, Event, Kind, Round, Stream};

use crate::clock::TimeBase;

/// Time in ns by which the merge advances the benchmark's operations. An operation then precedes
/// its bio even where their clocks differ a little.
const HEAD_START: i64 = 50_000;

/// The machine that an event is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Guest,
    Host,
    /// The host to which requests are sent.
    Remote,
}

impl Side {
    /// Returns the side that a clock belongs to.
    pub(crate) fn of(clock: Clock) -> Side {
        match clock {
            Clock::GuestTsc | Clock::GuestMonotonic => Side::Guest,
            Clock::HostTsc | Clock::HostMonotonic | Clock::HostRealtime => Side::Host,
            Clock::RemoteTsc | Clock::RemoteMonotonic => Side::Remote,
        }
    }
}

/// An event and its time, in ns of the host's CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) at: i64,
    pub(crate) side: Side,
    /// The clock of the other times in the event's arguments.
    pub(crate) clock: Clock,
    pub(crate) event: Event,
}

struct Source {
    stream: Stream,
    name: String,
    clock: Clock,
    head: Option<(i64, Event)>,
}

/// All streams of a round whose times can be converted, merged.
pub(crate) struct Merged<'a> {
    time: &'a TimeBase,
    sources: Vec<Source>,
    /// Problems, a line each; a damaged file is read up to the damage.
    pub(crate) problems: Vec<String>,
}

impl<'a> Merged<'a> {
    /// Opens the streams whose clock `time` knows and whose side `wanted` accepts.
    pub(crate) fn open(
        dir: &Path,
        round: &Round,
        time: &'a TimeBase,
        wanted: impl Fn(Side) -> bool,
    ) -> Merged<'a> {
        let mut merged = Merged {
            time,
            sources: Vec::new(),
            problems: Vec::new(),
        };
        for info in &round.streams {
            if !wanted(Side::of(info.clock)) || !time.knows(info.clock) {
                continue;
            }
            match round.open(dir, info) {
                Ok(stream) => merged.sources.push(Source {
                    stream,
                    name: info.name.clone(),
                    clock: info.clock,
                    head: None,
                }),
                Err(error) => merged.problems.push(error.to_string()),
            }
        }
        for i in 0..merged.sources.len() {
            merged.advance(i);
        }
        merged
    }

    /// Returns the next event, or None at the end.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<Seen> {
        let heads = self.sources.iter().enumerate();
        let first = heads
            .filter_map(|(i, source)| source.head.as_ref().map(|(key, _)| (*key, i)))
            .min()?
            .1;
        let (key, event) = self.sources[first].head.take()?;
        self.advance(first);
        let clock = self.sources[first].clock;
        let early = if event.kind == Kind::BenchOperation {
            HEAD_START
        } else {
            0
        };
        Some(Seen {
            at: key + early,
            side: Side::of(clock),
            clock,
            event,
        })
    }

    #[inline]
    fn advance(&mut self, i: usize) {
        let source = &mut self.sources[i];
        source.head = match source.stream.next_event() {
            Ok(Some(event)) => {
                let early = match event.kind {
                    Kind::BenchOperation => HEAD_START,
                    _ => 0,
                };
                let at = self.time.ns(source.clock, event.time);
                at.map(|at| (at - early, event))
            }
            Ok(None) => {
                if source.stream.is_cut() {
                    let name = &source.name;
                    self.problems.push(format!(
                        "the events of {name} end in the middle of one: what came after is lost"
                    ));
                }
                None
            }
            Err(error) => {
                self.problems
                    .push(format!("{error}: its events are used up to there"));
                None
            }
        };
    }
}
