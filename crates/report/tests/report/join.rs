//! The exact join, compared with the truth of simulated runs.

use crate::support;

use crate::support::sim::Plan;
use crate::support::{Simulated, Watches, difference, joined};
use fathom_report::analysis::{Exact, HostClass, Layer};
use fathom_run::RunKind;

/// Asserts that every request is joined, with its true points.
fn assert_true(simulated: &Simulated, error: i64) -> Exact {
    let analysis = simulated.analyse();
    let exact = analysis
        .exact
        .unwrap_or_else(|| panic!("no breakdown: {:?}", analysis.problems));
    let mut truths: Vec<_> = simulated.truths.iter().collect();
    truths.sort_by_key(|truth| (truth.points[0].1, truth.offset));
    let all = joined(&exact);
    assert_eq!(all.len(), truths.len(), "{:?}", analysis.problems);
    let mut wrong = Vec::new();
    for (joined, truth) in all.iter().zip(truths) {
        wrong.extend(difference(joined, truth, error));
        let sum: i64 = joined.layers.iter().map(|(_, time)| time).sum();
        assert_eq!(sum, joined.total, "layers add up");
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let truth = &exact.truth;
    assert_eq!(
        (
            truth.ambiguous,
            truth.unmatched,
            truth.incomplete,
            truth.inconsistent,
            truth.violations
        ),
        (0, 0, 0, 0, 0),
        "{:?}",
        analysis.problems
    );
    exact
}

fn simulate(plan: Plan) -> Exact {
    assert_true(&Simulated::new(plan, Watches::default()), 0)
}

#[test]
fn one_request_at_a_time() {
    let exact = simulate(Plan::new(1, 1, 2000));
    assert_eq!(exact.truth.kicked, 2000);
    let unattributed = exact
        .layers
        .iter()
        .find(|row| row.layer == Layer::Unattributed);
    assert!(unattributed.is_none());
}

#[test]
fn thirty_two_at_a_time_in_batches() {
    for seed in 0..20 {
        let exact = simulate(Plan::new(seed, 32, 3000));
        let truth = exact.truth;
        assert!(truth.batched > 300, "{}", truth.batched);
        assert!(truth.polled > 0 && truth.kicked > 0);
    }
}

#[test]
fn a_server_that_polls() {
    for polling in [30_000, 100_000, 10_000_000] {
        for depth in [1, 4, 32] {
            let plan = Plan {
                polling,
                ..Plan::new(polling as u64 + depth, depth, 2000)
            };
            let exact = simulate(plan);
            assert!(exact.truth.polled > 0, "{polling} {depth}");
        }
    }
}

#[test]
fn several_queues_and_vcpus() {
    for (vcpus, queues) in [(2, 1), (2, 2), (4, 4), (4, 2)] {
        for depth in [4, 32] {
            let plan = Plan {
                vcpus,
                queues,
                ..Plan::new(u64::from(vcpus) + depth, depth, 2000)
            };
            simulate(plan);
        }
    }
}

#[test]
fn every_sort_of_request() {
    for depth in [1, 8] {
        let plan = Plan {
            flushes: if depth == 1 { 10 } else { 0 },
            discards: 10,
            large: 20,
            splits: 30,
            cached: 30,
            ..Plan::new(5 + depth, depth, 2000)
        };
        simulate(plan);
    }
}

#[test]
fn neighbours_that_the_host_merges() {
    let plan = Plan {
        random: false,
        writes: 0,
        merges: 70,
        cached: 0,
        splits: 0,
        ..Plan::new(9, 16, 2000)
    };
    let exact = simulate(plan);
    let merged = exact.truth.hosts.iter();
    let merged: u64 = merged
        .filter(|(class, _)| *class == HostClass::Merged)
        .map(|(_, count)| count)
        .sum();
    assert!(merged > 500, "{merged}");
}

#[test]
fn probes_that_tell_less() {
    for depth in [1, 32] {
        for (fast_mmio, eventfds, vqs) in [
            (true, true, true),
            (true, false, true),
            (false, false, true),
            (false, true, false),
        ] {
            let plan = Plan {
                fast_mmio,
                eventfds,
                vqs,
                ..Plan::new(3, depth, 1500)
            };
            simulate(plan);
        }
    }
}

/// KVM's scaling ratio rounds to ticks: times are right within 2 ns.
#[test]
fn a_scaled_tsc() {
    let watches = Watches {
        ratio: Some((1 << 48) / 5 * 4),
        ..Watches::default()
    };
    let simulated = Simulated::new(Plan::new(4, 8, 1500), watches);
    assert_true(&simulated, 2);
}

/// The two recordings of a joined run do not begin and end at the same time. A request that only
/// one side saw does not count as unmatched.
#[test]
fn recordings_of_different_length() {
    let mut simulated = Simulated::new(Plan::new(7, 1, 2000), Watches::default());
    simulated.run.kind = RunKind::Joined;
    let kvm = simulated.file("kvm");
    let quarter = kvm.len() / 4;
    let recorded = kvm[quarter].time..=kvm[3 * quarter].time;
    for name in ["kvm", "block", "fathom"] {
        let events = simulated.file(name);
        events.retain(|event| recorded.contains(&event.time));
    }
    simulated.rewrite();
    let exact = simulated.analyse().exact.expect("a breakdown");
    let truth = &exact.truth;
    assert!((900..1100).contains(&truth.joined), "{truth:?}");
    // The requests at the two edges.
    assert!(truth.unmatched <= 2 && truth.incomplete <= 2, "{truth:?}");
    let wrong = joined(&exact).into_iter().filter(|joined| {
        let same = |truth: &&support::sim::Truth| truth.points[0].1 == joined.start;
        let truth = simulated.truths.iter().find(same);
        truth.is_none_or(|truth| difference(joined, truth, 0).is_some())
    });
    assert!(wrong.count() <= 2);
}
