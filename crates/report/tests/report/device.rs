//! Runs whose host device has other users, or whose image has no known places on the device.

use crate::support::sim::Plan;
use crate::support::{Simulated, Watches};
use fathom_report::analysis::{Analysis, HostClass, Point};
use fathom_run::{Event, Kind, RunKind};

/// A thread of another process, which uses the same device.
const STRANGER: u32 = 9999;

/// A run in which another process makes the same requests as the server, elsewhere on the device.
/// The other process's requests begin a little earlier and take longer.
fn shared_device(seed: u64, depth: u64) -> Simulated {
    let mut simulated = Simulated::new(
        Plan {
            splits: 0,
            cached: 0,
            ..Plan::new(seed, depth, 300)
        },
        Watches::default(),
    );
    let file = simulated.file("block");
    let others: Vec<Event> = file
        .iter()
        .map(|event| {
            let mut other = *event;
            other.args[1] += 1 << 40;
            match event.kind {
                Kind::BlockRqIssue => (other.tid, other.time) = (STRANGER, event.time - 300),
                _ => other.time += 60_000,
            }
            other
        })
        .collect();
    file.extend(others);
    file.sort_by_key(|event| event.time);
    simulated.run.rounds[0].streams[3].events = simulated.files[3].2.len() as u64;
    simulated
}

/// Removes everything that only Fathom and the guest show, as for a QEMU that serves the disk.
fn without_records(simulated: &mut Simulated) {
    for name in ["bench", "guest", "fathom"] {
        simulated.without(name);
    }
    simulated.run.kind = RunKind::Host;
}

fn said(analysis: &Analysis, words: &str) -> bool {
    analysis.problems.iter().any(|line| line.contains(words))
}

#[test]
fn io_of_others_is_not_the_disks_without_extents() {
    let mut simulated = shared_device(31, 1);
    without_records(&mut simulated);
    simulated.run.disks[0].extents.clear();
    simulated.rewrite();
    let analysis = simulated.analyse();
    let exact = analysis.exact.as_ref().unwrap();
    assert_eq!((exact.truth.requests, exact.truth.joined), (300, 300));
    assert!(said(&analysis, "server's own threads"), "{analysis:?}");
    // With extents, no thread needs to be known.
    let mut simulated = shared_device(31, 1);
    without_records(&mut simulated);
    simulated.run.threads.clear();
    simulated.rewrite();
    let analysis = simulated.analyse();
    assert_eq!(analysis.exact.as_ref().unwrap().truth.requests, 300);
    assert!(!said(&analysis, "server's own threads"));
}

/// Requests of one length that are in flight at the same time look the same.
#[test]
fn host_requests_without_extents_may_be_anothers() {
    for depth in [1, 8] {
        let mut simulated = shared_device(32, depth);
        simulated.run.disks[0].extents.clear();
        simulated.rewrite();
        let analysis = simulated.analyse();
        let exact = analysis.exact.as_ref().unwrap();
        assert_eq!(exact.truth.joined, 300, "{:?}", analysis.problems);
        let wrong = exact.slowest.iter().filter(|joined| {
            let truth = &simulated.truths[joined.number as usize];
            let at = |points: &[_]| {
                let found = points.iter().find(|(point, _)| *point == Point::HostIssue);
                found.map(|&(_, at)| at)
            };
            at(&joined.points).map(|at| at + joined.start) != at(&truth.points)
        });
        let wrong = wrong.count() as u64;
        assert!(wrong <= exact.truth.ambiguous, "{wrong} of {exact:?}");
        assert_eq!(wrong > 0, depth > 1);
        assert_eq!(exact.truth.hosts, [(HostClass::Direct, 300)]);
    }
}

#[test]
fn the_wikis_host_io_is_the_disks_own() {
    for is_placed in [true, false] {
        let mut simulated = shared_device(33, 1);
        simulated.without("fathom");
        if !is_placed {
            simulated.run.disks[0].extents.clear();
        }
        simulated.rewrite();
        let wiki = simulated.analyse().wiki.unwrap();
        let row = wiki.cumulative.iter().find(|row| row.0 == "Host I/O");
        let times = simulated.truths.iter().map(|truth| {
            let at = |point| truth.points.iter().find(|(p, _)| *p == point).unwrap().1;
            at(Point::HostComplete) - at(Point::HostIssue)
        });
        let mean = times.sum::<i64>() as f64 / 300.0;
        assert!((row.unwrap().1 - mean).abs() < 1.0, "{row:?}, {mean}");
    }
}
