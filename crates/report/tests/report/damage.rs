//! Runs with events that are missing, doubled, out of order, garbled or cut off. Either every
//! reported request is true, or the report says that something is wrong.

use crate::support;

use crate::support::random::Random;
use crate::support::sim::Plan;
use crate::support::{Simulated, Watches, difference, joined};
use fathom_report::analysis::Point;
use fathom_run::{Event, Kind};

const REQUESTS: u64 = 200;

#[derive(Clone, Copy, Debug)]
enum Damage {
    Drop,
    Duplicate,
    Reorder,
    Garble,
    Cut,
}

/// Damages a stream at a random place in its middle, and returns what was done, in words.
fn damage(events: &mut Vec<Event>, damage: Damage, random: &mut Random) -> String {
    let count = events.len() as u64;
    let at = (count / 10 + random.below(count * 8 / 10)) as usize;
    let was = events[at];
    match damage {
        Damage::Drop => {
            events.remove(at);
        }
        Damage::Duplicate => events.insert(at, was),
        Damage::Reorder => {
            // Swap two events of different requests; the times stay in order.
            let far = (at + 30).min(events.len() - 1);
            let (a, b) = (events[at].time, events[far].time);
            events.swap(at, far);
            (events[at].time, events[far].time) = (a, b);
        }
        Damage::Garble => {
            // Spare the times: a plausible wrong time cannot be detected.
            let first = support::times(events[at].kind).end as u64;
            let used = events[at].kind.args().len() as u64;
            let arg = (first + random.below((used - first).max(1))) as usize;
            events[at].args[arg] ^= 1 << random.below(40);
        }
        Damage::Cut => events.truncate(at),
    }
    format!("{damage:?} at {at}: {was:?} now {:?}", events.get(at))
}

/// Returns None if the report is true, or says that it may not be.
fn untold(simulated: &Simulated) -> Option<String> {
    let analysis = simulated.analyse();
    if !analysis.problems.is_empty() {
        return None;
    }
    let all = analysis.exact.map_or(Vec::new(), |exact| joined(&exact));
    for joined in &all {
        let truth = simulated
            .truths
            .iter()
            .find(|truth| (truth.points[0].1, truth.offset) == (joined.start, joined.offset));
        let Some(truth) = truth else {
            return Some(format!("nobody made {joined:?}"));
        };
        // Only one event shows that a vCPU slept: without it, a layer is wider, but true.
        let is_woken = |point: &Point| *point == Point::Woken;
        let mut truth = truth.clone();
        if !joined.points.iter().any(|(point, _)| is_woken(point)) {
            truth.points.retain(|(point, _)| !is_woken(point));
        }
        if let Some(difference) = difference(joined, &truth, 0) {
            return Some(difference);
        }
    }
    None
}

fn copy(whole: &Simulated) -> Simulated {
    Simulated {
        files: whole.files.clone(),
        run: whole.run.clone(),
        truths: whole.truths.clone(),
        calls: whole.calls.clone(),
        plan: whole.plan.clone(),
        dir: tempfile::tempdir().unwrap(),
        watches: whole.watches,
    }
}

fn check(kind: Damage, depth: u64, polling: i64, seeds: u64) {
    let mut failures = Vec::new();
    for seed in 0..seeds {
        let plan = Plan {
            polling,
            ..Plan::new(seed % 5, depth, REQUESTS)
        };
        let whole = Simulated::new(plan, Watches::default());
        // Otherwise a report would claim for any damage that something is wrong.
        assert_eq!(whole.analyse().problems, [""; 0]);
        for name in ["bench", "guest", "kvm", "block", "fathom"] {
            let mut simulated = copy(&whole);
            let mut random = Random::new(seed * 1000 + depth);
            let done = damage(simulated.file(name), kind, &mut random);
            // The collector counted the events that were written, unless the file was cut off
            // later.
            if !matches!(kind, Damage::Cut) {
                let count = simulated.file(name).len() as u64;
                let infos = &mut simulated.run.rounds[0].streams;
                infos
                    .iter_mut()
                    .find(|info| info.name == name)
                    .unwrap()
                    .events = count;
            }
            simulated.rewrite();
            if let Some(difference) = untold(&simulated) {
                failures.push(format!("{name}, seed {seed}: {done}\n{difference}"));
            }
        }
    }
    failures.sort();
    let shown: Vec<_> = failures.iter().take(5).collect();
    let count = failures.len();
    assert!(failures.is_empty(), "{count} of {}:\n{shown:#?}", seeds * 5);
}

/// The calls of a server without stamps: every point that they show is true.
#[test]
fn damaged_calls() {
    let kinds = [
        Damage::Drop,
        Damage::Duplicate,
        Damage::Reorder,
        Damage::Garble,
        Damage::Cut,
    ];
    for (seed, kind) in (0..100).zip(kinds.into_iter().cycle()) {
        let mut simulated = Simulated::new(Plan::new(seed, 1, REQUESTS), Watches::default());
        simulated.with_calls();
        let mut random = Random::new(seed);
        let done = damage(simulated.file("io-calls"), kind, &mut random);
        simulated.rewrite();
        let analysis = simulated.analyse();
        let all = joined(&analysis.exact.unwrap());
        let mut truths = simulated.truths.iter().map(|truth| &truth.points);
        let wrong = all.iter().find(|joined| {
            let truth = truths.find(|truth| truth[0].1 == joined.start).unwrap();
            let mut told = joined.points.iter();
            !told.all(|&(point, at)| truth.contains(&(point, at + joined.start)))
        });
        let told = !analysis.problems.is_empty();
        assert!(wrong.is_none() || told, "seed {seed}: {done}\n{wrong:?}");
    }
}

#[test]
fn a_dropped_event() {
    check(Damage::Drop, 1, 0, 25);
    check(Damage::Drop, 32, 0, 25);
}

#[test]
fn a_dropped_event_while_the_server_polls() {
    check(Damage::Drop, 8, 50_000, 25);
}

#[test]
fn a_doubled_event() {
    check(Damage::Duplicate, 1, 0, 25);
    check(Damage::Duplicate, 32, 0, 25);
}

#[test]
fn events_out_of_order() {
    // With many requests in flight, a moved event may still be at a possible place.
    check(Damage::Reorder, 1, 0, 50);
}

#[test]
fn a_garbled_event() {
    check(Damage::Garble, 1, 0, 25);
    check(Damage::Garble, 32, 0, 25);
}

#[test]
fn a_file_that_ends_early() {
    check(Damage::Cut, 1, 0, 10);
    check(Damage::Cut, 32, 0, 10);
}

/// A record that is cut in its middle, and a record whose time is before the previous one.
#[test]
fn a_damaged_file_is_named() {
    for name in ["bench", "guest", "kvm", "block", "fathom"] {
        let simulated = Simulated::new(Plan::new(1, 4, REQUESTS), Watches::default());
        let path = simulated.dir.path().join(format!("traced-0/{name}.events"));
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 5]).unwrap();
        let told = |simulated: &Simulated, what: &str| {
            let problems = simulated.analyse().problems;
            assert!(
                problems
                    .iter()
                    .any(|line| line.contains(name) && line.contains(what)),
                "{name}: {problems:?}"
            );
        };
        told(&simulated, "end in the middle of one");
        let mut out_of_order = bytes.clone();
        let width = (bytes.len() - header(&bytes))
            / simulated.run.rounds[0]
                .streams
                .iter()
                .find(|info| info.name == name)
                .unwrap()
                .events as usize;
        let middle = header(&bytes) + 50 * width;
        out_of_order[middle..middle + 8].copy_from_slice(&1u64.to_le_bytes());
        std::fs::write(&path, &out_of_order).unwrap();
        told(&simulated, "damaged: an event at");
        std::fs::write(&path, b"nothing").unwrap();
        told(&simulated, "not a file of events");
    }
}

fn header(bytes: &[u8]) -> usize {
    16 + u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize
}

#[test]
fn dropped_events_that_a_collector_counted_are_told() {
    let mut simulated = Simulated::new(Plan::new(1, 4, REQUESTS), Watches::default());
    simulated.run.rounds[0].streams[2].lost = Some(7);
    let time = simulated.file("block")[9].time;
    let lost = Event::new(time, Kind::Lost, 0, 0, &[3]);
    simulated.file("block").insert(9, lost);
    simulated.rewrite();
    let analysis = simulated.analyse();
    let lost = analysis.exact.unwrap().truth.lost;
    assert_eq!(lost, [("kvm".into(), 7), ("block".into(), 3)]);
    assert!(
        analysis
            .problems
            .iter()
            .any(|line| line.contains("7 events were dropped"))
    );
}

/// The benchmark reads the same few places again and again, and records of the server are missing.
/// No request is joined to another request's record.
#[test]
fn a_record_that_is_missing_is_not_taken_from_the_next_request() {
    let plan = Plan {
        places: 2,
        ..Plan::new(3, 1, REQUESTS)
    };
    let mut simulated = Simulated::new(plan, Watches::default());
    let records = simulated.file("fathom");
    let mut number = 0;
    records.retain(|_| {
        number += 1;
        number % 10 != 0
    });
    let left = records.len() as u64;
    simulated.run.rounds[0].streams[4].events = left;
    simulated.rewrite();
    let exact = simulated.analyse().exact.unwrap();
    assert_eq!(
        (exact.truth.joined, exact.truth.unmatched),
        (left, REQUESTS - left)
    );
    for joined in joined(&exact) {
        let mut truths = simulated.truths.iter();
        let truth = truths.find(|truth| truth.points[0].1 == joined.start);
        assert_eq!(difference(&joined, truth.unwrap(), 0), None);
    }
}
