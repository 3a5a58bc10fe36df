//! The exact join against the truth of simulated runs.

mod support;

use fathom_report::analysis::{Exact, Layer};
use support::sim::Plan;
use support::{Simulated, Watches, difference, joined};

/// Every request is joined, and as it truly was.
fn assert_true(simulated: &Simulated, error: i64) -> Exact {
    let analysis = simulated.analyse();
    let exact = analysis
        .exact
        .unwrap_or_else(|| panic!("no breakdown: {:?}", analysis.problems));
    let mut truths: Vec<_> = simulated.truths.iter().collect();
    truths.sort_by_key(|truth| (truth.points[0].1, truth.offset));
    let all = joined(&exact);
    assert_eq!(all.len(), truths.len(), "{:?}", analysis.problems);
    for (joined, truth) in all.iter().zip(truths) {
        if let Some(difference) = difference(joined, truth, error) {
            panic!("request {}: {difference}", joined.number);
        }
        let sum: i64 = joined.layers.iter().map(|(_, time)| time).sum();
        assert_eq!(sum, joined.total, "layers add up");
    }
    let truth = &exact.truth;
    assert_eq!(
        (
            truth.unmatched,
            truth.incomplete,
            truth.inconsistent,
            truth.violations
        ),
        (0, 0, 0, 0),
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
    assert_eq!(exact.truth.ambiguous, 0);
    let unattributed = exact
        .layers
        .iter()
        .find(|row| row.layer == Layer::Unattributed);
    assert!(unattributed.is_none());
}
