//! Relates the guest's clock to the host's by causality: no request reaches the server before the
//! guest issues it, and none completes in the guest before the server is done.
//!
//! Each request seen on both sides bounds the distance between the clocks from above and below.
//! First, a rough distance is found: the one that most requests agree with. Then each request, in
//! order, narrows the bounds at its time. The result is the straight line with the most room to
//! both bounds. The error is the largest distance from it of any other line that keeps all
//! bounds.

use std::collections::HashMap;

use super::Line;
use super::trips::{GuestTrip, HostTrip};
use crate::join::way::Key;

/// Number of guest requests, then of server requests, from which the rough distance is found.
const ROUGH_GUEST: usize = 400;
const ROUGH_HOST: usize = 1600;
/// The share of the guest requests that must agree on the rough distance.
const AGREE: f64 = 0.5;
/// The share of those requests from which another distance fits as well.
const RIVAL: f64 = 0.9;
/// The largest relative difference between the rates of the clocks.
const MAX_DRIFT: f64 = 1e-3;
/// Number of slices of time for which the tightest bounds are kept.
const SLICES: usize = 512;
/// Number of steps of the searches for the best line and for its error.
const HALVINGS: usize = 80;

/// How the guest's ns relate to the host's.
#[derive(Clone, Debug)]
pub(crate) struct Relation {
    pub(crate) line: Line,
    /// The largest error of the line, in ns.
    pub(crate) error: i64,
    pub(crate) method: String,
}

/// Why two clocks are not related.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unrelated {
    /// Too few requests were seen on both sides.
    Few,
    /// Several distances fit: the requests repeat in a period, and look the same one period later.
    Periodic,
}

/// A bound: at the guest's time `at`, the distance (host minus guest) is at most, or at least,
/// `distance`.
#[derive(Clone, Copy, Debug)]
struct Bound {
    at: i64,
    distance: i64,
}

/// Relates the clocks by requests seen on both sides, each in order of time. Fails when too few
/// requests agree, or when they agree on several distances.
pub(crate) fn relate(guest: &[GuestTrip], host: &[HostTrip]) -> Result<Relation, Unrelated> {
    let rough = rough(guest, host)?;
    let mut bounds = Bounds::new(guest);
    let matched = track(guest, host, rough, &mut bounds);
    if matched < 2 {
        return Err(Unrelated::Few);
    }
    let (line, error, drift) = bounds.fit().ok_or(Unrelated::Few)?;
    Ok(Relation {
        line,
        error,
        method: format!(
            "causality over {matched} requests (the two differ by {:.1} ppm)",
            drift.abs() * 1e6
        ),
    })
}

/// Returns the distances (lowest, highest) that a guest request and a server request allow, if
/// they are the same request.
fn window(guest: &GuestTrip, host: &HostTrip) -> (i64, i64) {
    (host.to - guest.complete, host.from - guest.issue)
}

fn same(guest: &GuestTrip, host: &HostTrip) -> bool {
    host.key.is_none_or(|key| key == guest.key)
}

/// Returns the range of distances that most pairs of requests agree with.
fn rough(guest: &[GuestTrip], host: &[HostTrip]) -> Result<(i64, i64), Unrelated> {
    let guest = &guest[..guest.len().min(ROUGH_GUEST)];
    let host = &host[..host.len().min(ROUGH_HOST)];
    let mut edges: Vec<(i64, i32)> = Vec::new();
    for guest in guest {
        for host in host.iter().filter(|host| same(guest, host)) {
            let (low, high) = window(guest, host);
            if low <= high {
                edges.push((low, -1)); // starts sort before ends at the same distance
                edges.push((high, 1));
            }
        }
    }
    edges.sort_unstable();
    let (mut depth, mut best, mut place) = (0, 0, None);
    for (i, &(at, step)) in edges.iter().enumerate() {
        depth -= step;
        if depth > best {
            best = depth;
            place = Some((at, edges.get(i + 1).map_or(at, |next| next.0)));
        }
    }
    let enough = (guest.len() as f64 * AGREE).max(1.0);
    let place = place.filter(|_| f64::from(best) >= enough);
    let place = place.ok_or(Unrelated::Few)?;
    match is_unique(&edges, best) {
        true => Ok(place),
        false => Err(Unrelated::Periodic),
    }
}

/// Returns whether nearly `best` requests agree in one range of distances only. Between two ranges,
/// less than half of them agree.
fn is_unique(edges: &[(i64, i32)], best: i32) -> bool {
    let (mut depth, mut ranges, mut is_inside) = (0, 0, false);
    for &(_, step) in edges {
        depth -= step;
        if depth * 2 < best {
            is_inside = false;
        } else if !is_inside && f64::from(depth) >= RIVAL * f64::from(best) {
            is_inside = true;
            ranges += 1;
        }
    }
    ranges == 1
}

/// Matches the guest's requests in order: finds the counterpart of each near the current distance
/// and keeps the bounds. Returns the number of matched requests.
fn track(guest: &[GuestTrip], host: &[HostTrip], rough: (i64, i64), bounds: &mut Bounds) -> u64 {
    let mut by_key: HashMap<Option<Key>, Vec<usize>> = HashMap::new();
    for (i, trip) in host.iter().enumerate() {
        by_key.entry(trip.key).or_default().push(i);
    }
    let mut used = vec![false; host.len()];
    let (mut low, mut high) = rough;
    // The rough distance comes from many requests, during which the clocks drifted.
    let head = &guest[..guest.len().min(ROUGH_GUEST)];
    let span = head.last().map_or(0, |last| last.complete - head[0].issue);
    let room = (span as f64 * MAX_DRIFT) as i64;
    (low, high) = (low - room, high + room);
    let mut before = guest.first().map_or(0, |trip| trip.issue);
    let mut matched = 0;
    for trip in guest {
        let room = ((trip.issue - before) as f64 * MAX_DRIFT) as i64;
        (low, high) = (low - room, high + room);
        before = trip.issue;
        let keyed = by_key.get(&Some(trip.key));
        let Some(places) = keyed.or_else(|| by_key.get(&None)) else {
            continue;
        };
        // Requests that reached the server about when the guest issued this one.
        let first = places.partition_point(|&i| host[i].from < trip.issue + low);
        let near = places[first..].iter().copied();
        let near = near.take_while(|&i| host[i].from <= trip.complete + high);
        let mut fits = near.filter(|&i| {
            let (a, b) = window(trip, &host[i]);
            !used[i] && a <= high && low <= b && a <= b
        });
        let Some(i) = fits.next() else { continue };
        if fits.next().is_some() {
            continue; // ambiguous, so neither gives a bound
        }
        used[i] = true;
        matched += 1;
        for (at, distance, is_upper) in told(trip, &host[i]) {
            match is_upper {
                true => high = high.min(distance),
                false => low = low.max(distance),
            }
            bounds.add(Bound { at, distance }, is_upper);
        }
        if low > high {
            // The clocks do not keep to a line, or events are missing: continue from the middle.
            let middle = low + (high - low) / 2;
            (low, high) = (middle - (low - middle), middle + (low - middle));
            (low, high) = (low.min(high), low.max(high));
        }
    }
    matched
}

/// Returns the bounds from a request: (guest's time, distance, whether it is an upper bound).
fn told(guest: &GuestTrip, host: &HostTrip) -> impl Iterator<Item = (i64, i64, bool)> {
    let kick = guest.kick.zip(host.exit);
    let handler = guest.handler.zip(host.back);
    [
        Some((guest.issue, host.from - guest.issue, true)),
        Some((guest.complete, host.to - guest.complete, false)),
        kick.map(|(kick, exit)| (kick, exit - kick, true)),
        handler.map(|(handler, back)| (handler, back - handler, false)),
    ]
    .into_iter()
    .flatten()
}

/// The tightest bounds of each slice of time.
#[derive(Debug)]
struct Bounds {
    start: i64,
    width: i64,
    upper: Vec<Option<Bound>>,
    lower: Vec<Option<Bound>>,
}

impl Bounds {
    fn new(guest: &[GuestTrip]) -> Bounds {
        let start = guest.first().map_or(0, |trip| trip.issue);
        let end = guest
            .iter()
            .map(|trip| trip.complete)
            .max()
            .unwrap_or(start);
        Bounds {
            start,
            width: (end - start) / SLICES as i64 + 1,
            upper: vec![None; SLICES],
            lower: vec![None; SLICES],
        }
    }

    fn add(&mut self, bound: Bound, is_upper: bool) {
        let slice = ((bound.at - self.start) / self.width).clamp(0, SLICES as i64 - 1) as usize;
        let (kept, sign) = match is_upper {
            true => (&mut self.upper[slice], 1),
            false => (&mut self.lower[slice], -1),
        };
        if kept.is_none_or(|kept| bound.distance * sign < kept.distance * sign) {
            *kept = Some(bound);
        }
    }

    /// Returns the lowest and the highest distance at the middle that keep all bounds, for a drift.
    /// If no distance keeps all bounds, the lowest is above the highest.
    fn room(&self, drift: f64) -> (f64, f64) {
        let middle = self.middle();
        let at = |bound: &Bound| bound.distance as f64 - drift * (bound.at - middle) as f64;
        let low = self.lower.iter().flatten().map(at);
        let high = self.upper.iter().flatten().map(at);
        (
            low.fold(f64::NEG_INFINITY, f64::max),
            high.fold(f64::INFINITY, f64::min),
        )
    }

    fn middle(&self) -> i64 {
        self.start + self.width * (SLICES as i64 / 2)
    }

    fn slack(&self, drift: f64) -> f64 {
        let (low, high) = self.room(drift);
        high - low
    }

    /// Returns the line with the most room, its error, and its drift.
    fn fit(&self) -> Option<(Line, i64, f64)> {
        // The room is a concave function of the drift, so a ternary search finds its maximum.
        let (mut a, mut b) = (-MAX_DRIFT, MAX_DRIFT);
        for _ in 0..HALVINGS {
            let (p, q) = (a + (b - a) / 3.0, b - (b - a) / 3.0);
            match self.slack(p) < self.slack(q) {
                true => a = p,
                false => b = q,
            }
        }
        let drift = (a + b) / 2.0;
        let (low, high) = self.room(drift);
        let distance = (low + high) / 2.0;
        if !distance.is_finite() {
            return None;
        }
        let error = self.error(drift, distance);
        let middle = self.middle();
        let line = Line::through(middle as u64, middle + distance.round() as i64, 1.0 + drift);
        Some((line, error, drift))
    }

    /// Returns how far another line that keeps all bounds may be from this one, at either end.
    fn error(&self, drift: f64, distance: f64) -> i64 {
        let half = (self.width * (SLICES as i64 / 2)) as f64;
        if self.slack(drift) < 0.0 {
            return (-self.slack(drift)).ceil() as i64;
        }
        let edge = |mut outside: f64| {
            let mut inside = drift;
            for _ in 0..HALVINGS {
                let middle = (inside + outside) / 2.0;
                match self.slack(middle) >= 0.0 {
                    true => inside = middle,
                    false => outside = middle,
                }
            }
            inside
        };
        let (first, last) = (edge(-MAX_DRIFT), edge(MAX_DRIFT));
        let mut worst: f64 = 0.0;
        for step in 0..=32 {
            let other = first + (last - first) * f64::from(step) / 32.0;
            let (low, high) = self.room(other);
            for end in [-half, half] {
                let turn = (other - drift) * end;
                worst = worst.max((high - distance + turn).abs());
                worst = worst.max((low - distance + turn).abs());
            }
        }
        worst.ceil() as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Builds requests of about 300 us, every 400 us, by clocks with a distance and a drift.
    fn trips(distance: i64, drift: f64, n: i64, seed: u64) -> (Vec<GuestTrip>, Vec<HostTrip>) {
        let mut random = seed;
        let mut some = |from: i64, to: i64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            from + ((random >> 33) as i64) % (to - from)
        };
        let guests = |host: i64| {
            let own = host as f64 - (host - 1_000_000_000) as f64 * drift / (1.0 + drift);
            own.round() as i64 - distance
        };
        let (mut guest, mut host) = (Vec::new(), Vec::new());
        let mut at = 1_000_000_000;
        for i in 0..n {
            let key = Key::new(0, (i as u64 % 50) * 4096, 4096);
            let issue = at + some(0, 100_000);
            let (from, to) = (issue + some(20_000, 60_000), issue + some(150_000, 250_000));
            let complete = to + some(20_000, 60_000);
            guest.push(GuestTrip {
                key,
                issue: guests(issue),
                complete: guests(complete),
                kick: None,
                handler: None,
            });
            host.push(HostTrip {
                key: Some(key),
                from,
                to,
                exit: None,
                back: None,
            });
            at = complete + some(0, 100_000);
        }
        (guest, host)
    }

    proptest! {
        #[test]
        fn the_true_clock_lies_within_the_error(
            distance in -2_000_000_000_000i64..2_000_000_000_000,
            ppm in -200.0f64..200.0,
            seed: u64,
            skipped in 0usize..30,
        ) {
            let (guest, mut host) = trips(distance, ppm * 1e-6, 3000, seed);
            // The host's recording began a little later, and lost a request.
            host.drain(..skipped);
            host.remove(host.len() / 2);
            let found = relate(&guest, &host).unwrap();
            prop_assert!(found.error < 60_000, "{}", found.error);
            for (i, trip) in guest.iter().enumerate().step_by(100) {
                let (true_guest, _) = (trip.issue, i);
                let told = found.line.y(true_guest as u64);
                let g0 = 1_000_000_000 - distance;
                let real = (true_guest - g0) as f64 * (1.0 + ppm * 1e-6) + 1e9;
                let off = (told as f64 - real).abs();
                prop_assert!(off <= found.error as f64 + 2.0, "{off} of {}", found.error);
            }
        }
    }

    #[test]
    fn what_has_nothing_in_common_is_not_related() {
        let (guest, _) = trips(5, 0.0, 500, 1);
        let (_, mut host) = trips(5, 0.0, 500, 2);
        for trip in &mut host {
            trip.key = Some(Key::new(0, 1 << 40, 512));
        }
        assert_eq!(relate(&guest, &host).unwrap_err(), Unrelated::Few);
        assert_eq!(relate(&[], &[]).unwrap_err(), Unrelated::Few);
    }

    /// Requests that all take equally long look the same one period later.
    #[test]
    fn a_periodic_load_is_not_related() {
        let (mut guest, mut host) = trips(5, 0.0, 2000, 3);
        for (i, (guest, host)) in guest.iter_mut().zip(&mut host).enumerate() {
            let at = 1_000_000_000 + i as i64 * 400_000;
            (guest.issue, guest.complete) = (at, at + 300_000);
            (host.from, host.to) = (at + 7_040_000, at + 7_200_000);
        }
        let unkeyed = host.iter().map(|trip| HostTrip { key: None, ..*trip });
        let unkeyed: Vec<HostTrip> = unkeyed.collect();
        // Keys repeat after 50 requests.
        for host in [&host, &unkeyed] {
            assert_eq!(relate(&guest, host).unwrap_err(), Unrelated::Periodic);
        }
        // Keys that do not repeat show the distance.
        for (i, (guest, host)) in guest.iter_mut().zip(&mut host).enumerate() {
            guest.key = Key::new(0, i as u64 * 4096, 4096);
            host.key = Some(guest.key);
        }
        assert!(relate(&guest, &host).is_ok());
    }

    #[test]
    fn without_keys_the_pattern_tells() {
        let distance = -77_000_000;
        let (guest, mut host) = trips(distance, 20e-6, 2000, 9);
        for trip in &mut host {
            trip.key = None;
        }
        host.drain(..7);
        let found = relate(&guest, &host).unwrap();
        assert!(found.error < 60_000, "{found:?}");
        // The point at which the test's clocks are exactly `distance` apart.
        let off = found.line.y((1_000_000_000 - distance) as u64) - 1_000_000_000;
        assert!(off.abs() <= found.error + 2, "{off}: {found:?}");
    }
}
