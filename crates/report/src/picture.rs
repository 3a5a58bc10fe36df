//! Chooses the part of a round that the picture of its threads shows.

use std::path::Path;

use fathom_run::{Event, Kind, Round};

use crate::analysis::{Picture, Pictured};
use crate::clock::{TimeBase, trusted_offset};
use crate::join::merge::Side;
use crate::join::way::Key;

/// Length of the window in ns: enough for some requests of any device, and still readable.
const LENGTH: i64 = 10_000_000;

/// A window in ns of the host's clock, and its description. Without a window, the picture begins
/// at the middle of the round's events.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Moment {
    pub(crate) window: Option<(i64, i64)>,
    pub(crate) picture: Picture,
}

/// Returns the windows to try, best first: the slowest request with some time around it, the
/// request alone, and the middle of the round. The second is for rounds with too many calls to
/// draw more. If the slowest request is unknown, only the middle of the round is returned.
pub(crate) fn choose(dir: &Path, round: &Round) -> Vec<Moment> {
    let picture = |why_not: &str| Picture {
        round: round.name.clone(),
        length: LENGTH,
        request: None,
        why_not: Some(why_not.to_owned()),
    };
    let middle = |why_not: &str| Moment {
        window: None,
        picture: picture(why_not),
    };
    match slowest(dir, round) {
        Ok(slow) => vec![
            slow.moment(LENGTH, picture("")),
            slow.moment(1, picture("")),
            middle("the slowest request contains too many calls, or none"),
        ],
        Err(why) => vec![middle(&why)],
    }
}

impl Picture {
    /// Returns whether the first `length` ns of the window contain its request.
    pub(crate) fn is_within(&self, length: i64) -> bool {
        let request = self.request.as_ref();
        request.is_none_or(|request| request.start + request.total <= length)
    }
}

/// An operation of the benchmark, in ns of the host's clock.
#[derive(Clone, Copy, Debug)]
struct Slow {
    number: u64,
    start: i64,
    end: i64,
    key: Key,
}

impl Slow {
    /// Returns the request with an eighth of its duration on each side, but at least `least` ns.
    fn moment(self, least: i64, picture: Picture) -> Moment {
        let total = self.end - self.start;
        let length = least.max(total / 4 * 5);
        let start = self.start + total / 2 - length / 2;
        let request = Pictured {
            number: self.number,
            operation: self.key.class.name(),
            offset: self.key.offset,
            length: self.key.length,
            start: self.start - start,
            total,
        };
        Moment {
            window: Some((start, start + length)),
            picture: Picture {
                length,
                request: Some(request),
                why_not: None,
                ..picture
            },
        }
    }
}

/// Returns the benchmark's slowest operation; the error says why none was found.
fn slowest(dir: &Path, round: &Round) -> Result<Slow, String> {
    let offset = trusted_offset(&round.clocks, false)?;
    let time = TimeBase::new(&round.clocks, offset, false);
    let guests = round.streams.iter();
    let guests = guests.filter(|info| Side::of(info.clock) == Side::Guest);
    let (mut slowest, mut number) = (None, 0);
    for info in guests {
        // Damage ends the reading; the reader of the round's tables reports it.
        let events = round
            .open(dir, info)
            .into_iter()
            .flatten()
            .map_while(Result::ok);
        for event in events.filter(|event| event.kind == Kind::BenchOperation) {
            let ns = |ticks| time.ns(info.clock, ticks);
            let Some((start, end)) = ns(event.time).zip(ns(event.args[0])) else {
                return Err("the guest's clock was not related to the host's then".into());
            };
            let longest = slowest.is_none_or(|slow: Slow| slow.end - slow.start < end - start);
            if longest {
                slowest = Some(Slow {
                    number,
                    start,
                    end,
                    key: key(&event),
                });
            }
            number += 1;
        }
    }
    slowest.ok_or_else(|| "no benchmark reported its requests".into())
}

fn key(event: &Event) -> Key {
    let [_, offset, length, _, flags, ..] = event.args;
    Key::new(flags, offset, length)
}
