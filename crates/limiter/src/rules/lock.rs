//! A lock that requests wait for.

use fathom_run::evidence::Evidence;

use crate::figures::{name, percent, ratio};
use crate::rule::Finding;

/// Minimum share of the requests' total time; more than an uncontended lock costs.
const MUCH: f64 = 0.10;

/// Holds if requests wait for a lock for a part of their time:
///
/// ```text
/// share = waiting of all threads [s] / (requests * load mean [s])
/// 0.1 <= share <= 1
/// ```
///
/// Threads that wait for work may wait for longer than all requests together.
pub fn waited_for(evidence: &Evidence) -> Option<Finding> {
    let load = &evidence.load;
    let spent = load.requests as f64 * load.mean_ns / 1e9;
    let shares = evidence.locks.iter();
    let shares = shares.filter_map(|lock| Some((ratio(lock.seconds, spent)?, lock)));
    let much = shares.filter(|(share, _)| *share >= MUCH);
    // Waits longer than all of the requests' time include threads that wait for work.
    let key = |share: f64| (share <= 1.0, share);
    let (share, lock) = much.max_by(|one, other| {
        let (one, other) = (key(one.0), key(other.0));
        one.0.cmp(&other.0).then(one.1.total_cmp(&other.1))
    })?;
    let whose = format!("lock '{}' ({})", name(&lock.name), name(&lock.side));
    let finding = match share <= 1.0 {
        true => Finding::verdict(format!(
            "{whose}: waited for in {} of the requests' time",
            percent(share)
        )),
        false => Finding::weak(format!(
            "{whose}: waited for in more than all of the requests' time, so not by them alone"
        )),
    };
    Some(finding.about(name(&lock.name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{cell, with};
    use fathom_run::evidence::LockWait;

    /// 32 requests in flight for 10 s, which is 317 s of request time, and locks with these seconds
    /// of waiting.
    fn locks(seconds: &[f64]) -> Evidence {
        with(cell(32, 400.0), |evidence| {
            let lock = |&seconds: &f64| LockWait {
                name: format!("lock{seconds}"),
                side: "host".into(),
                waits: 1000,
                seconds,
            };
            evidence.locks = seconds.iter().map(lock).collect();
        })
    }

    #[test]
    fn a_lock_that_takes_much_of_the_requests_time_is_named() {
        let finding = waited_for(&locks(&[3.0, 73.0, 40.0])).unwrap();
        assert!(finding.holds());
        assert_eq!(
            finding.text,
            "lock 'lock73' (host): waited for in 23% of the requests' time"
        );
        assert!(waited_for(&locks(&[32.0])).is_some());
        assert!(waited_for(&locks(&[31.0])).is_none());
    }

    #[test]
    fn threads_that_wait_for_work_are_not_requests_that_wait() {
        assert!(!waited_for(&locks(&[640.0])).unwrap().holds());
        let both = waited_for(&locks(&[640.0, 73.0])).unwrap();
        assert_eq!(both.subject.as_deref(), Some("lock73"));
    }
}
