//! When a round's events happened, for all tables and pictures alike.

use std::ops::RangeInclusive;
use std::path::Path;

use fathom_run::{Clock, Round, Run, RunKind};

use crate::clock::bounds::Unrelated;
use crate::clock::{self, TimeBase, bounds, crossings, trips};
use crate::join::merge::Side;
use crate::join::survey::Survey;

/// How clocks are related whose requests agree on several distances.
const PERIODIC: &str =
    "the requests repeat in a period, so several distances between the two clocks fit";

/// Returns how a round's clocks relate, and why KVM's offset is not trusted, if it is not.
pub(crate) fn time_base(
    dir: &Path,
    run: &Run,
    round: &Round,
    survey: &Survey,
) -> (TimeBase, Option<String>) {
    let trusted = clock::trusted_offset(&round.clocks, survey.offset_written);
    let (offset, doubt) = match trusted {
        Ok(offset) => (offset, None),
        Err(why) => (None, Some(why.to_string())),
    };
    let monotonic = [Clock::HostMonotonic, Clock::GuestMonotonic];
    let mut clocks = round.streams.iter().map(|info| info.clock);
    let mixed = clocks.any(|clock| monotonic.contains(&clock));
    let mut time = TimeBase::new(&round.clocks, offset, mixed);
    if survey.any(Side::Remote) {
        let (near, remote) = crossings::of(dir, round, &time);
        match bounds::relate(&near, &remote) {
            Ok(found) => time = time.with_remote(found),
            Err(Unrelated::Periodic) => time.remote_method = PERIODIC.into(),
            Err(Unrelated::Few) => {}
        }
    }
    if time.error.is_some() || !survey.any(Side::Guest) {
        return (time, doubt);
    }
    if !survey.tells_of_requests(Side::Host) {
        return (time.guest_alone(), doubt);
    }
    let guest = trips::of_guest(dir, run, round, survey, &time);
    let host = trips::of_host(dir, run, round, survey, &time);
    match bounds::relate(&guest, &host) {
        Ok(found) => time = time.with_bounds(found),
        Err(Unrelated::Periodic) => time.method = PERIODIC.into(),
        Err(Unrelated::Few) => {}
    }
    (time, doubt)
}

/// Returns the time that all sides of a joined run watched; two recordings begin and end at
/// different times. Returns all of time for other runs.
pub(crate) fn common_window(run: &Run, survey: &Survey, time: &TimeBase) -> RangeInclusive<i64> {
    let mut window = i64::MIN..=i64::MAX;
    if run.kind != RunKind::Joined {
        return window;
    }
    for side in [Side::Guest, Side::Host, Side::Remote] {
        let ends = survey.ends.iter().filter(|end| Side::of(end.0) == side);
        let ends = ends.filter_map(|&(clock, first, last)| {
            Some((time.ns(clock, first)?, time.ns(clock, last)?))
        });
        let union = ends.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
        if let Some((first, last)) = union {
            window = first.max(*window.start())..=last.min(*window.end());
        }
    }
    window
}
