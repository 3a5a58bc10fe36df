//! The contents of a trace: followed requests, as in the tables, and the raw events.

use std::collections::BinaryHeap;
use std::path::Path;

use fathom_run::{Kind, Round, Run};

use crate::clock::TimeBase;
use crate::join::Joiner;
use crate::join::merge::{Merged, Seen, Side};
use crate::join::survey::Survey;
use crate::join::way::Way;
use crate::timing;

/// A round with something to show.
pub(super) struct Watched<'a> {
    dir: &'a Path,
    round: &'a Round,
    pub(super) name: &'a str,
    survey: Survey,
    time: TimeBase,
    joins: bool,
}

/// The requests of a round.
#[derive(Default)]
pub(super) struct Followed {
    /// The earliest requests, in the order of their start.
    pub(super) ways: Vec<Way>,
    pub(super) all: u64,
    /// The start of the first and the end of the last of `ways`.
    pub(super) extent: Option<(i64, i64)>,
    pub(super) problems: Vec<String>,
}

/// Returns the rounds that the exact tables use, and the rounds with system calls.
pub(super) fn rounds<'a>(dir: &'a Path, run: &'a Run) -> Vec<Watched<'a>> {
    let guests = run.rounds.iter().filter(|round| !round.on_host);
    let surveyed: Vec<(&Round, Survey)> = guests
        .map(|round| (round, Survey::of(dir, run, round)))
        .collect();
    let useful = surveyed.iter().filter(|(_, survey)| survey.is_useful());
    let best = useful.map(|(_, survey)| survey.depth()).max().unwrap_or(0);
    let watched = surveyed.into_iter().map(|(round, survey)| Watched {
        dir,
        round,
        name: &round.name,
        // The tables report doubts about the clocks.
        time: timing::time_base(dir, run, round, &survey).0,
        joins: survey.is_useful() && survey.depth() == best,
        survey,
    });
    let shown = |watched: &Watched| watched.joins || watched.survey.host(Kind::SysEnter);
    watched.filter(shown).collect()
}

/// A request, ordered by its start: (start, number, request).
struct Early(i64, u64, Way);

impl PartialEq for Early {
    fn eq(&self, other: &Early) -> bool {
        (self.0, self.1) == (other.0, other.1)
    }
}

impl Eq for Early {}

impl PartialOrd for Early {
    fn partial_cmp(&self, other: &Early) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Early {
    fn cmp(&self, other: &Early) -> std::cmp::Ordering {
        (self.0, self.1).cmp(&(other.0, other.1))
    }
}

impl Watched<'_> {
    /// Follows the round's requests. Returns at most `most` of them, and only those that started
    /// within `window` ns of the first.
    pub(super) fn follow(&self, run: &Run, most: usize, window: Option<i64>) -> Followed {
        let mut followed = Followed::default();
        if !self.joins {
            return followed;
        }
        let mut merged = Merged::open(self.dir, self.round, &self.time, |_| true);
        let (mut earliest, mut all) = (BinaryHeap::new(), 0u64);
        let mut joiner = Joiner::new(run, &self.survey, &self.time, |way| {
            all += 1;
            earliest.push(Early(way.extent().0, way.number, way));
            if earliest.len() > most {
                earliest.pop(); // drops the latest request
            }
        });
        let common = timing::common_window(run, &self.survey, &self.time);
        while let Some(seen) = merged.next() {
            if common.contains(&seen.at) {
                joiner.event(&seen);
            }
        }
        joiner.finish();
        followed.all = all;
        let mut ways: Vec<Way> = earliest
            .into_sorted_vec()
            .into_iter()
            .map(|e| e.2)
            .collect();
        if let (Some(window), Some(first)) = (window, ways.first()) {
            let until = first.extent().0.saturating_add(window);
            ways.retain(|way| way.extent().0 <= until);
        }
        let begin = ways.first().map(|way| way.extent().0);
        let ends = ways
            .iter()
            .map(Way::extent)
            .map(|(start, total)| start + total);
        followed.extent = begin.zip(ends.max());
        followed.ways = ways;
        let lost = self.survey.lost.iter();
        let lost = lost.map(|(name, count)| format!("{name}: {count} events were dropped"));
        followed.problems = merged.problems.into_iter().chain(lost).collect();
        followed
    }

    /// Returns the time of the round's first event on the host.
    pub(super) fn begin(&self) -> Option<i64> {
        let mut merged = Merged::open(self.dir, self.round, &self.time, |side| side == Side::Host);
        let named = std::iter::from_fn(|| merged.next());
        // Symbols have no time.
        named
            .filter(|seen| seen.event.time != 0)
            .map(|seen| seen.at)
            .next()
    }

    /// Passes the host's events of a window to `take`, in order of time, until `take` returns
    /// false.
    pub(super) fn events(&self, (begin, end): (i64, i64), mut take: impl FnMut(&Seen) -> bool) {
        let mut merged = Merged::open(self.dir, self.round, &self.time, |side| side == Side::Host);
        while let Some(seen) = merged.next() {
            if seen.at > end {
                break;
            }
            if seen.at >= begin && seen.event.time != 0 && !take(&seen) {
                break;
            }
        }
    }
}
