//! Runs of the host alone: kicks and interrupts that several requests could have, and requests
//! that are in flight when the recording ends.

use crate::support::sim::Plan;
use crate::support::{Simulated, Watches};
use fathom_report::analysis::{Analysis, Joined, Point};
use fathom_run::{Event, Kind, RunKind};

/// Returns a run of the host with these streams.
fn host(plan: Plan, streams: &[&str]) -> Simulated {
    let mut simulated = Simulated::new(plan, Watches::default());
    for name in ["bench", "guest", "kvm", "block", "fathom"] {
        if !streams.contains(&name) {
            simulated.without(name);
        }
    }
    simulated.run.kind = RunKind::Host;
    simulated
}

fn plan(seed: u64, depth: u64) -> Plan {
    Plan {
        splits: 0,
        cached: 0,
        ..Plan::new(seed, depth, 500)
    }
}

fn at(joined: &Joined, point: Point) -> Option<i64> {
    let found = joined.points.iter().find(|(p, _)| *p == point);
    found.map(|&(_, at)| at + joined.start)
}

/// Writes the run without the events of its streams that `is_left_out` accepts.
fn write_without(simulated: &mut Simulated, is_left_out: impl Fn(&Event) -> bool) {
    for (i, (_, _, events)) in simulated.files.iter_mut().enumerate() {
        events.retain(|event| !is_left_out(event));
        simulated.run.rounds[0].streams[i].events = events.len() as u64;
    }
    simulated.rewrite();
}

fn said(analysis: &Analysis, words: &str) -> bool {
    analysis.problems.iter().any(|line| line.contains(words))
}

/// Without records of the server, only a request that is alone has a certain kick and interrupt.
#[test]
fn kicks_of_several_requests_are_ambiguous() {
    for depth in [1, 16] {
        let simulated = host(plan(41, depth), &["kvm", "block"]);
        simulated.rewrite();
        let exact = simulated.analyse().exact.unwrap();
        assert_eq!(exact.truth.joined, 500);
        let mut wrong = 0;
        for joined in &exact.slowest {
            let of = |truth: &[(Point, i64)], point| {
                let found = truth.iter().find(|(p, _)| *p == point);
                found.map(|&(_, at)| at)
            };
            let issue = at(joined, Point::HostIssue);
            let mut truths = simulated.truths.iter();
            let truth = truths.find(|truth| of(&truth.points, Point::HostIssue) == issue);
            let truth = &truth.unwrap().points;
            let differs = |point| at(joined, point) != of(truth, point);
            wrong += u64::from(differs(Point::Signal) || differs(Point::Interrupt));
        }
        assert!(wrong <= exact.truth.ambiguous, "{wrong}: {:?}", exact.truth);
        assert_eq!(
            (wrong > 0, exact.truth.ambiguous > 0),
            (depth > 1, depth > 1)
        );
    }
}

#[test]
fn kicks_alone_are_ambiguous_if_several_precede_an_interrupt() {
    for (depth, vcpus) in [(1, 1), (16, 4)] {
        let mut simulated = host(
            Plan {
                vcpus,
                ..plan(42, depth)
            },
            &["kvm"],
        );
        simulated.run.disks[0].host = None;
        simulated.rewrite();
        let exact = simulated.analyse().exact.unwrap();
        assert_eq!(exact.truth.ambiguous > 0, depth > 1, "{:?}", exact.truth);
        assert_eq!(exact.truth.unmatched, 0, "{:?}", exact.truth);
    }
}

/// The server's records show the wake of a request, which two kicks may have caused.
#[test]
fn two_kicks_before_one_wake_are_ambiguous() {
    let mut simulated = host(plan(43, 1), &["kvm", "fathom"]);
    simulated.rewrite();
    assert_eq!(simulated.analyse().exact.unwrap().truth.ambiguous, 0);
    // Each kick comes twice within 50 ns.
    let again: Vec<Event> = simulated
        .file("kvm")
        .iter()
        .filter(|event| event.kind == Kind::KvmMmio)
        .flat_map(|event| {
            let exit = Event {
                time: event.time - 150,
                ..Event::new(0, Kind::KvmExit, 0, event.tid + 50, &[0x400, 2, 0, 1])
            };
            let ring = Event {
                time: event.time - 148,
                tid: event.tid + 50,
                ..*event
            };
            [exit, ring]
        })
        .collect();
    let file = simulated.file("kvm");
    file.extend(again);
    file.sort_by_key(|event| event.time);
    let mut second = simulated.run.threads.last().unwrap().clone();
    (second.tid, second.vcpu) = (second.tid + 50, Some(1));
    simulated.run.threads.push(second);
    write_without(&mut simulated, |_| false);
    let truth = simulated.analyse().exact.unwrap().truth;
    assert_eq!((truth.joined, truth.ambiguous), (500, 500));
}

/// Queue 0 is idle, so the only eventfd that was seen is queue 1's.
#[test]
fn kicks_of_unknown_queues_are_still_found() {
    for queues_unknown in [true, false] {
        let mut simulated = host(plan(44, 1), &["kvm", "block", "fathom"]);
        for event in simulated.file("fathom") {
            let (_, flags, errno) = event.fathom_rest();
            event.args[8] = Event::pack_fathom_rest(1, flags, errno);
        }
        let disk = &mut simulated.run.disks[0];
        disk.doorbells.clear();
        disk.msi.clear();
        disk.queues_unknown = queues_unknown;
        simulated.rewrite();
        let exact = simulated.analyse().exact.unwrap();
        let seen = exact
            .slowest
            .iter()
            .filter(|one| at(one, Point::Signal).is_some());
        assert_eq!(seen.count(), if queues_unknown { 500 } else { 0 });
    }
}

/// Returns the time in ticks of the completion of the request before the last one.
fn last_but_one(simulated: &mut Simulated) -> u64 {
    let block = simulated.file("block").iter().rev();
    let mut completions = block.filter(|event| event.kind == Kind::BlockRqComplete);
    completions.nth(1).unwrap().time
}

#[test]
fn a_request_in_flight_at_the_end_is_told() {
    for streams in [
        &["guest", "kvm", "block", "fathom"][..],
        &["kvm", "block"],
        &["kvm"],
    ] {
        let mut simulated = host(plan(45, 1), streams);
        if !streams.contains(&"block") {
            simulated.run.disks[0].host = None;
        }
        // The recording ends just before the last interrupt.
        let kvm = simulated.file("kvm").iter().rev();
        let mut interrupts = kvm.filter(|event| event.kind == Kind::KvmMsiSetIrq);
        let last = interrupts.next().unwrap().time;
        let is_late = |event: &Event| match event.kind {
            // The device has not completed the request either, and the server writes no record.
            Kind::BlockRqComplete => event.time + 45_000 > last,
            Kind::FathomRequest => event.args[5] >= last,
            _ => event.time >= last,
        };
        let guest = simulated
            .watches
            .guest_tsc(0)
            .wrapping_sub(simulated.watches.host_tsc(0));
        for (name, _, events) in &mut simulated.files {
            let shift = if *name == "guest" { guest } else { 0 };
            let on_host = |event: &Event| Event {
                time: event.time.wrapping_sub(shift),
                ..*event
            };
            events.retain(|event| !is_late(&on_host(event)));
        }
        write_without(&mut simulated, |_| false);
        let analysis = simulated.analyse();
        let truth = &analysis.exact.as_ref().unwrap().truth;
        let told = (truth.in_flight, truth.requests, truth.unmatched);
        assert_eq!(told, (1, 499, 0), "{streams:?}: {:?}", analysis.problems);
        assert_eq!(truth.inconsistent, 0, "{:?}", analysis.problems);
        assert!(said(&analysis, "in flight at end: 1, oldest 0."));
    }
}

/// A request that takes longer than the join waits for events is not forgotten.
#[test]
fn a_slow_request_of_the_device_is_followed() {
    const LATE: u64 = 3 * 500_000_000;
    let mut simulated = host(plan(46, 1), &["kvm", "block"]);
    let end = last_but_one(&mut simulated);
    for name in ["kvm", "block"] {
        for event in simulated.file(name) {
            event.time += if event.time >= end { LATE } else { 0 };
        }
    }
    // Events of another thread continue meanwhile.
    let tid = simulated.run.threads.last().unwrap().tid;
    let exits = (1..2000).map(|i| {
        let time = end + i * LATE / 2000;
        Event {
            time,
            ..Event::new(0, Kind::KvmUserspaceExit, 0, tid + 9, &[])
        }
    });
    let exits: Vec<Event> = exits.collect();
    let file = simulated.file("kvm");
    file.extend(exits);
    file.sort_by_key(|event| event.time);
    write_without(&mut simulated, |_| false);
    let analysis = simulated.analyse();
    let exact = analysis.exact.as_ref().unwrap();
    assert_eq!((exact.truth.joined, exact.truth.inconsistent), (500, 0));
    let slow = &exact.slowest[0];
    assert!(slow.total > 500_000_000, "{slow:?}");
    assert!(at(slow, Point::Signal).is_some());
}
