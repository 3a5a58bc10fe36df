//! A filter that delays requests.

use fathom_run::evidence::Evidence;

use crate::figures::{name, percent, share};
use crate::rule::Finding;

/// Name of the throttle filter. A token bucket delays requests only if they exceed its rate, so it
/// is the limit as soon as the delay is noticeable.
const THROTTLE: &str = "throttle";
const NOTICEABLE: f64 = 0.10;
/// Minimum share of a request's time for other filters. A filter that only adds time does not block
/// other requests, so it limits only if it takes the greater part.
const MOST: f64 = 0.50;

/// Holds if a filter delays requests for a part of their time:
///
/// ```text
/// share = mean delay of all requests [ns] / load mean [ns]
/// share >= 0.1 for `throttle`, else share >= 0.5
/// ```
///
/// The delay is the mean over the server's requests. If the server has larger requests than the
/// load (read-ahead), it may exceed the load's mean, and counts as the whole time.
pub fn holds_requests(evidence: &Evidence) -> Option<Finding> {
    let held = |mean_ns: f64| share(mean_ns, evidence.load.mean_ns);
    let shares = evidence.filters.iter();
    let shares = shares.filter_map(|one| Some((held(one.mean_ns)?, one)));
    let is_limit = |share: f64, filter: &str| {
        // A filter may have options: `throttle:iops-read=1000`.
        let is_throttle = filter.split(':').next() == Some(THROTTLE);
        share >= if is_throttle { NOTICEABLE } else { MOST }
    };
    // A filter that limits is preferred to one that only takes longer.
    let (share, one) = shares.max_by(|one, other| {
        let key = |(share, held): &(f64, &fathom_run::evidence::Held)| {
            (is_limit(*share, &held.filter), *share)
        };
        let (one, other) = (key(one), key(other));
        one.0.cmp(&other.0).then(one.1.total_cmp(&other.1))
    })?;
    let filter = name(&one.filter);
    let text = format!("{filter} filter: {} of the request's time", percent(share));
    let finding = match is_limit(share, &one.filter) {
        true => Finding::verdict(text),
        false => Finding::weak(text),
    };
    (share >= NOTICEABLE).then(|| finding.about(filter))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{cell, with};
    use fathom_run::evidence::Held;

    /// A cell of 400 us per request, with filters (name, us).
    fn filtered(filters: &[(&str, f64)]) -> Evidence {
        with(cell(8, 400.0), |evidence| {
            let held = |&(filter, us): &(&str, f64)| Held {
                filter: filter.into(),
                requests: 1000,
                mean_ns: us * 1e3,
            };
            evidence.filters = filters.iter().map(held).collect();
        })
    }

    #[test]
    fn a_throttle_limits_as_soon_as_it_holds() {
        let finding = holds_requests(&filtered(&[("throttle", 244.0)])).unwrap();
        assert!(finding.holds());
        assert_eq!(finding.text, "throttle filter: 61% of the request's time");
        assert_eq!(finding.subject.as_deref(), Some("throttle"));
        assert!(
            holds_requests(&filtered(&[("throttle", 41.0)]))
                .unwrap()
                .holds()
        );
        assert!(holds_requests(&filtered(&[("throttle", 39.0)])).is_none());
    }

    #[test]
    fn a_delay_limits_where_it_is_most() {
        assert!(
            holds_requests(&filtered(&[("delay", 201.0)]))
                .unwrap()
                .holds()
        );
        assert!(
            !holds_requests(&filtered(&[("delay", 199.0)]))
                .unwrap()
                .holds()
        );
    }

    #[test]
    fn of_two_the_one_that_limits_is_named() {
        let two = [("delay", 190.0), ("throttle", 60.0)];
        let finding = holds_requests(&filtered(&two)).unwrap();
        assert!(finding.holds() && finding.subject.as_deref() == Some("throttle"));
        assert!(holds_requests(&filtered(&[])).is_none());
    }
}
