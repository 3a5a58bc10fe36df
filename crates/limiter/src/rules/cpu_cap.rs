//! A control group whose threads are throttled because it has used up its CPU quota.

use fathom_run::evidence::Evidence;

use crate::figures::{DELAYED, name, number, percent, ratio, share};
use crate::rule::Finding;

/// Minimum share of throttled periods among those in which the group ran. Fewer are bursts that the
/// cap is meant to cut.
const OFTEN: f64 = 0.10;
/// Minimum throttled time of all its threads, as a share of the window. A group throttled at the
/// very end of each period is throttled in all periods but loses nothing.
const HELD: f64 = DELAYED;
/// Share of throttled periods below which the cap is not mentioned.
const SELDOM: f64 = 0.01;

/// Holds if the group is throttled often and loses time by that:
///
/// ```text
/// throttled periods / periods        >= 0.10   [periods in which the group ran]
/// throttled seconds / window seconds >= 0.05   [of all its threads together, so it may exceed 1]
/// ```
pub fn throttled(evidence: &Evidence) -> Option<Finding> {
    let cap = evidence.cgroup.as_ref()?;
    let periods = share(cap.throttled as f64, cap.periods as f64)?;
    let held = ratio(cap.seconds, evidence.seconds)?;
    let text = format!(
        "CPU cap of the cgroup '{}', {} of periods throttled: its threads were held for {} s in {} s",
        name(&cap.group),
        percent(periods),
        number(cap.seconds),
        number(evidence.seconds)
    );
    let finding = match periods >= OFTEN && held >= HELD {
        true => Finding::verdict(text),
        false => Finding::weak(text),
    };
    (periods >= SELDOM).then(|| finding.about(name(&cap.group)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{cell, with};
    use fathom_run::evidence::Throttling;

    fn capped(throttled: u64, seconds: f64) -> Evidence {
        with(cell(32, 400.0), |evidence| {
            evidence.cgroup = Some(Throttling {
                group: "/machine/vm1".into(),
                periods: 100,
                throttled,
                seconds,
            });
        })
    }

    #[test]
    fn a_group_that_is_held_often_and_for_long_is_capped() {
        let finding = throttled(&capped(43, 4.1)).unwrap();
        assert!(finding.holds());
        assert_eq!(
            finding.text,
            "CPU cap of the cgroup '/machine/vm1', 43% of periods throttled: its threads were held \
             for 4.1 s in 10 s"
        );
        assert!(throttled(&capped(10, 0.5)).unwrap().holds());
    }

    #[test]
    fn seldom_or_for_a_moment_is_not() {
        assert!(!throttled(&capped(9, 4.1)).unwrap().holds());
        assert!(!throttled(&capped(100, 0.49)).unwrap().holds());
        assert!(throttled(&capped(0, 0.0)).is_none());
        assert!(throttled(&cell(32, 400.0)).is_none());
    }
}
