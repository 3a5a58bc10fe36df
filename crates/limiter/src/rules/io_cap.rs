//! A control group whose I/O on a block device runs at the group's limit.

use fathom_run::evidence::{Evidence, IoLimitKind};

use crate::figures::{KEPT, load_in_flight, name, number, offered, percent, ratio};
use crate::rule::Finding;

/// Minimum share of the limit that is used. The kernel enforces a limit in slices of time, and the
/// window's edges account for the rest.
const USED: f64 = 0.90;
/// Share of the limit from which the limit is mentioned.
const NEAR: f64 = 0.70;
/// Most that the share may exceed 1 in the text: counters and windows do not end at exactly the
/// same moment.
const MOST: f64 = 1.0;

/// Holds if the group uses its limit, while the load keeps its requests in flight:
///
/// ```text
/// used / load's own seconds / allowed >= 0.9   [bytes or requests per second]
/// in flight / offered                 >= 0.5   [requests; if it is known what is offered]
/// ```
///
/// The limit applies to all I/O of the group, also that of its other processes.
pub fn used(evidence: &Evidence) -> Option<Finding> {
    let cap = evidence.io_limit.as_ref()?;
    let rate = ratio(cap.used as f64, evidence.load_seconds())?;
    let share = ratio(rate, cap.allowed).filter(|&share| share >= NEAR)?;
    let (unit, scale) = match cap.kind {
        IoLimitKind::ReadBytes => ("MB/s of reads", 1e6),
        IoLimitKind::WriteBytes => ("MB/s of writes", 1e6),
        IoLimitKind::Reads => ("reads per second", 1.0),
        IoLimitKind::Writes => ("writes per second", 1.0),
    };
    let text = format!(
        "I/O limit of the cgroup '{}' on {}: {} of the allowed {} {unit}",
        name(&cap.group),
        name(&cap.device),
        percent(share.min(MOST)),
        number(cap.allowed / scale),
    );
    let kept = load_in_flight(evidence).zip(offered(&evidence.load));
    let waits = kept.is_none_or(|(in_flight, offered)| in_flight >= KEPT * offered);
    let finding = match share >= USED && waits {
        true => Finding::verdict(text),
        false => Finding::weak(text),
    };
    Some(finding.about(name(&cap.group)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{cell, with};
    use fathom_run::evidence::IoLimit;

    fn capped(kind: IoLimitKind, allowed: f64, used: u64) -> Evidence {
        with(cell(4, 13_000.0), |evidence| {
            evidence.io_limit = Some(IoLimit {
                group: "/machine/vm1".into(),
                device: "sdb".into(),
                kind,
                allowed,
                used,
            });
        })
    }

    #[test]
    fn a_group_at_its_limit_is_capped() {
        let finding = used(&capped(IoLimitKind::Reads, 300.0, 2_950)).unwrap();
        assert!(finding.holds());
        assert_eq!(
            finding.text,
            "I/O limit of the cgroup '/machine/vm1' on sdb: 98% of the allowed 300 reads per second"
        );
        let bytes = used(&capped(IoLimitKind::WriteBytes, 2e6, 20_100_000)).unwrap();
        assert!(bytes.holds());
        let words = "100% of the allowed 2 MB/s of writes";
        assert!(bytes.text.ends_with(words), "{}", bytes.text);
    }

    #[test]
    fn a_limit_with_room_is_not_the_limiter() {
        assert!(
            !used(&capped(IoLimitKind::Reads, 300.0, 2_500))
                .unwrap()
                .holds()
        );
        assert!(used(&capped(IoLimitKind::Reads, 300.0, 2_000)).is_none());
        assert!(used(&capped(IoLimitKind::Reads, 0.0, 2_000)).is_none());
        assert!(used(&cell(32, 400.0)).is_none());
        // The load pauses between its requests.
        let paced = with(capped(IoLimitKind::Reads, 300.0, 2_950), |evidence| {
            evidence.load.requests /= 4;
        });
        assert!(!used(&paced).unwrap().holds());
    }
}
