//! Requests that are sent to another host; each host records them by its own clock.

use std::collections::HashMap;

use crate::support::random::Random;
use crate::support::sim::Plan;
use crate::support::{Simulated, Watches, joined};
use fathom_report::analysis::{Analysis, Exact, HostClass, Joined, Layer, Point};
use fathom_run::{Clock, Event, Kind, Pair, RunKind, StreamInfo, flags};
use proptest::prelude::*;

const REMOTE: &str = "remote";
/// Ticks of the remote TSC per ns.
const TICKS: f64 = 2.5;

/// The distance of the remote host's clock from this host's.
#[derive(Clone, Copy, Debug)]
struct Apart {
    distance: i64,
    ppm: f64,
}

impl Apart {
    /// Returns the remote CLOCK_MONOTONIC at an instant of this host's.
    fn ns(self, at: i64) -> f64 {
        at as f64 + self.distance as f64 + (at as f64 - 1e9) * self.ppm * 1e-6
    }

    fn tsc(self, at: i64) -> u64 {
        (self.ns(at) * TICKS).round() as u64
    }
}

/// Whether and how the server forwarded a request to the remote host.
#[derive(Clone, Debug)]
enum Fate {
    /// The request was sent; the remote points are in times of this host's clock.
    Went(Vec<(Point, i64)>),
    /// The request was sent as several commands.
    Several,
    Stayed,
}

struct Wire {
    simulated: Simulated,
    /// By the time at which the server sent the request, and its offset.
    fates: HashMap<(i64, u64), Fate>,
    others: u64,
}

const STAMPS: [Point; 6] = [
    Point::RemoteWake,
    Point::RemotePop,
    Point::RemoteMap,
    Point::RemoteDevice,
    Point::RemoteResult,
    Point::RemoteSent,
];

/// Returns seven rising instants within `from..to`, none near its ends.
fn within(random: &mut Random, from: i64, to: i64) -> [i64; 7] {
    let room = (to - from) as u64 * 8 / 10;
    let first = from + (to - from) / 10;
    let mut all = [(); 7].map(|()| first + random.below(room.max(1)) as i64);
    all.sort_unstable();
    all
}

impl Wire {
    fn new(plan: Plan, apart: Apart, seed: u64) -> Wire {
        let mut random = Random::new(seed);
        let mut simulated = Simulated::new(plan, Watches::default());
        simulated.without("block");
        let watches = simulated.watches;
        let zero = watches.host_tsc(0);
        let ns = |ticks: u64| ((ticks - zero) / (watches.host_tsc(1) - zero)) as i64;
        let (mut remote, mut fates, mut others) = (Vec::new(), HashMap::new(), 0);
        for (i, event) in simulated.file("fathom").iter_mut().enumerate() {
            let (from, to) = (ns(event.args[2]), ns(event.args[3]));
            let cookie = random.next();
            let (flag, fate) = match i % 10 {
                3 => (flags::SEVERAL, Fate::Several),
                6 => (0, Fate::Stayed),
                n => {
                    let at = within(&mut random, from, to);
                    remote.push(request(event, cookie, at, apart));
                    let mut at = [at[0], at[1], at[2], at[3], at[4], at[6]];
                    if n == 8 {
                        // The first piece of the request; the second one ends later.
                        let piece = [
                            at[0] - 4,
                            at[0] - 3,
                            at[0] - 2,
                            at[0] - 1,
                            at[0],
                            at[0],
                            at[0],
                        ];
                        remote.push(request(event, cookie, piece, apart));
                        at[0] -= 4;
                    }
                    (
                        flags::WENT,
                        Fate::Went(STAMPS.into_iter().zip(at).collect()),
                    )
                }
            };
            let (queue, all, errno) = event.fathom_rest();
            event.args[8] = Event::pack_fathom_rest(queue, all | flag, errno);
            event.args[9] = if flag == flags::WENT { cookie } else { 0 };
            fates.insert((from, event.args[6]), fate);
            if i % 7 == 0 {
                // Another client's request.
                let at = within(&mut random, from, to);
                remote.push(request(event, random.next(), at, apart));
                others += 1;
            }
        }
        remote.sort_by_key(|event| event.time);
        let round = &mut simulated.run.rounds[0];
        round.traced.push(REMOTE.into());
        round.streams.push(StreamInfo {
            name: REMOTE.into(),
            clock: Clock::RemoteTsc,
            events: remote.len() as u64,
            lost: Some(0),
        });
        round.clocks.remote = [900_000_000, 2_000_000_000, 3_000_000_000]
            .map(|at| Pair {
                tsc: apart.tsc(at),
                monotonic_ns: apart.ns(at).round() as u64,
            })
            .to_vec();
        simulated.files.push((REMOTE, Clock::RemoteTsc, remote));
        simulated.rewrite();
        Wire {
            simulated,
            fates,
            others,
        }
    }

    fn fate(&self, joined: &Joined) -> &Fate {
        let device = joined
            .points
            .iter()
            .find(|(point, _)| *point == Point::Device);
        let at = joined.start + device.expect("Fathom has stamped it").1;
        &self.fates[&(at, joined.offset)]
    }
}

/// Returns a request as the remote server records it.
fn request(near: &Event, cookie: u64, at: [i64; 7], apart: Apart) -> Event {
    let [wake, stages @ ..] = at.map(|at| apart.tsc(at));
    let mut args = [0; 10];
    args[..6].copy_from_slice(&stages);
    args[6..8].copy_from_slice(&near.args[6..8]);
    let (_, ops, _) = near.fathom_rest();
    args[8] = Event::pack_fathom_rest(0, ops & 0xffff | flags::CAME, 0);
    args[9] = cookie;
    Event::new(wake, Kind::FathomRequest, 0, 0, &args)
}

fn exact(analysis: Analysis) -> Exact {
    analysis.exact.expect("requests were followed")
}

fn plan(depth: u64, seed: u64) -> Plan {
    Plan::new(seed, depth, 800)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn requests_are_followed_there_and_back(
        distance in -1_000_000_000i64..1_000_000_000_000,
        ppm in -80.0f64..80.0,
        depth in prop::sample::select(vec![1u64, 4, 32]),
        seed: u64,
    ) {
        let wire = Wire::new(plan(depth, seed), Apart { distance, ppm }, seed);
        let analysis = wire.simulated.analyse();
        let told = analysis.problems.join("; ");
        prop_assert!(told.contains(&format!("{} requests to the remote disk", wire.others)), "{told}");
        let exact = exact(analysis);
        let truth = &exact.truth;
        prop_assert_eq!((truth.unmatched, truth.incomplete, truth.violations), (0, 0, 0));
        let error = truth.remote_clock_error_ns.expect("the clocks are related");
        prop_assert!(error < 60_000, "{truth:?}");
        for request in joined(&exact) {
            let seen: Vec<(Point, i64)> = request.points.iter()
                .filter(|(point, _)| STAMPS.contains(point))
                .map(|&(point, at)| (point, at + request.start))
                .collect();
            match wire.fate(&request) {
                Fate::Went(points) => {
                    prop_assert_eq!(request.host, HostClass::Remote);
                    prop_assert_eq!(seen.len(), points.len());
                    for (&(point, at), &(true_point, true_at)) in seen.iter().zip(points) {
                        prop_assert_eq!(point, true_point);
                        prop_assert!((at - true_at).abs() <= error + 3, "{point:?}: {at} for {true_at}, {error}");
                    }
                    // Sums that do not depend on the distance of the clocks are unchanged, except
                    // for rates.
                    let time = |wanted: &[Layer]| -> i64 {
                        let layers = request.layers.iter().filter(|(layer, _)| wanted.contains(layer));
                        layers.map(|(_, time)| time).sum()
                    };
                    let there = points[5].1 - points[0].1;
                    let at = |wanted| request.points.iter().find(|(point, _)| *point == wanted).unwrap().1;
                    let away = at(Point::Result) - at(Point::Device);
                    let network = time(&[Layer::NetworkOut, Layer::NetworkBack]);
                    prop_assert!((network - (away - there)).abs() <= 20, "{network}: {away}, {there}");
                }
                Fate::Several => {
                    prop_assert_eq!((request.host, seen.len()), (HostClass::Split, 0));
                }
                Fate::Stayed => {
                    prop_assert_eq!((request.host, seen.len()), (HostClass::Unknown, 0));
                }
            }
        }
    }
}

/// Records of the remote server that are missing, or whose stages are not in order.
#[test]
fn what_is_missing_there_is_said() {
    let apart = Apart {
        distance: 77_000_000,
        ppm: 3.0,
    };
    let mut wire = Wire::new(plan(4, 5), apart, 5);
    let remote = wire.simulated.file(REMOTE);
    let (before, mut removed) = (remote.len(), 0);
    let mut keep = 0;
    remote.retain(|_| {
        keep += 1;
        keep % 50 != 0
    });
    removed += before - remote.len();
    remote[20].args.swap(0, 3);
    wire.simulated.rewrite();
    let analysis = wire.simulated.analyse();
    let told = analysis.problems.join("; ");
    assert!(told.contains("events are missing from its file"), "{told}");
    let truth = exact(analysis).truth;
    assert!(
        truth.incomplete > 0 && truth.incomplete <= removed as u64 + 1,
        "{truth:?}"
    );
    assert_eq!(truth.inconsistent, 1, "{truth:?}");
}

/// The report uses only the time that both recordings watched.
#[test]
fn a_recording_that_begins_later_and_ends_earlier_lacks_nothing() {
    let apart = Apart {
        distance: -50_000_000,
        ppm: -9.0,
    };
    let mut wire = Wire::new(plan(32, 3), apart, 3);
    let remote = wire.simulated.file(REMOTE);
    let n = remote.len();
    *remote = remote[n / 4..n * 3 / 4].to_vec();
    let kept = remote.len() as u64;
    let round = &mut wire.simulated.run.rounds[0];
    round.streams.last_mut().unwrap().events = kept;
    wire.simulated.run.kind = RunKind::Joined;
    wire.simulated.rewrite();
    let exact = exact(wire.simulated.analyse());
    let truth = &exact.truth;
    assert!(truth.joined > 300, "{truth:?}");
    // For the last requests in flight, only the guest's side and the destination are known.
    assert!(truth.incomplete <= 32, "{truth:?}");
}

/// The records of another server, or of another time.
#[test]
fn a_stranger_is_left_out() {
    let apart = Apart {
        distance: 0,
        ppm: 0.0,
    };
    let mut wire = Wire::new(plan(1, 9), apart, 9);
    for event in wire.simulated.file(REMOTE) {
        event.args[9] ^= 1;
    }
    wire.simulated.rewrite();
    let analysis = wire.simulated.analyse();
    let told = analysis.problems.join("; ");
    assert!(told.contains("remote is left out"), "{told}");
    let exact = exact(analysis);
    assert_eq!(exact.truth.remote_clock_error_ns, None);
    assert!(
        exact
            .layers
            .iter()
            .all(|row| row.layer != Layer::NetworkOut)
    );
    assert!(exact.layers.iter().any(|row| row.layer == Layer::HostIo));
}
