//! Threads that are ready to run and wait for a CPU of the host.

use fathom_run::evidence::{Evidence, ThreadRole, ThreadTime};

use crate::figures::{
    DELAYED, GAIN, SATURATED, largest, name, of_window, on_path, percent, thread, working,
};
use crate::rule::Finding;
use crate::slices::{Side, Waiting};

/// Finds a thread that wanted to run all the time and waited for a CPU: there are too many threads
/// for the CPUs.
///
/// ```text
/// waits + works           >= 0.95     [seconds per second of the window]
/// (waits + works) / works >= 1.15     [gain without the waits; with less, the thread is the limit]
/// ```
///
/// Holds if no larger part of a request's time was seen elsewhere.
pub fn starved(evidence: &Evidence) -> Option<Finding> {
    stronger(|side| starved_of(evidence, side))
}

fn starved_of(evidence: &Evidence, side: Side) -> Option<(f64, Finding)> {
    let wants_all = |one: &ThreadTime| {
        let (waits, works) = (waits(evidence, one)?, working(evidence, one)?);
        let gains = waits + works >= GAIN * works;
        (waits >= DELAYED && waits + works >= SATURATED && gains).then_some(waits)
    };
    let (waits, starved) = largest(evidence, |role| is_of(side, role), wants_all)?;
    let whose = match starved.role {
        ThreadRole::Vcpu => "; the host's CPUs are overcommitted",
        _ => "",
    };
    let text = format!(
        "run queue: {} waited for a CPU in {} of the window and had one in {}{whose}",
        thread(starved),
        percent(waits),
        percent(of_window(evidence, starved, starved.cpu)?)
    );
    let waiting = of_requests(evidence, side);
    let finding = match waiting {
        Some(waiting) if !waiting.is_largest => Finding::weak(text),
        _ => Finding::verdict(text),
    };
    let part = waiting.map_or(waits, |waiting| waiting.most);
    Some((part, finding.about(name(&starved.name))))
}

/// Finds threads that wait noticeably: in 5% of a request's time, or of the window if the requests
/// are not known.
///
/// Holds if the waits of all threads of one side are the largest part of a request's time. The
/// waits must be longer than each part that was seen elsewhere, and at least half of the time in
/// which requests may have waited for this side (see `Waiting`).
pub fn delayed(evidence: &Evidence) -> Option<Finding> {
    if starved(evidence).is_some_and(|finding| finding.holds()) {
        return None; // reported by `starved`
    }
    stronger(|side| delayed_of(evidence, side))
}

fn delayed_of(evidence: &Evidence, side: Side) -> Option<(f64, Finding)> {
    if starved_of(evidence, side).is_some() {
        return None;
    }
    let of_side = |role| is_of(side, role);
    let (share, delayed) = largest(evidence, of_side, |one| waits(evidence, one))?;
    let text = format!(
        "run queue: {} waited for a CPU in {} of the window",
        thread(delayed),
        percent(share)
    );
    let (part, finding) = match of_requests(evidence, side) {
        Some(waiting) => {
            let most = percent(waiting.most);
            let text = format!("{text}, at most {most} of the request's time");
            let finding = match waiting.is_largest && waiting.explains {
                true => Finding::verdict(text),
                false => Finding::weak(text),
            };
            (waiting.most, finding)
        }
        None => (share, Finding::weak(text)),
    };
    (part >= DELAYED).then(|| (part, finding.about(name(&delayed.name))))
}

/// Returns the finding of the side that holds, else of the one with the larger part of a request's
/// time.
fn stronger(find: impl Fn(Side) -> Option<(f64, Finding)>) -> Option<Finding> {
    let found = [Side::Guest, Side::Server].into_iter().filter_map(find);
    let key = |(part, finding): &(f64, Finding)| (finding.holds(), *part);
    let strongest = found.max_by(|one, other| {
        let (one, other) = (key(one), key(other));
        one.0.cmp(&other.0).then(one.1.total_cmp(&other.1))
    });
    strongest.map(|(_, finding)| finding)
}

fn is_of(side: Side, role: ThreadRole) -> bool {
    on_path(role) && Side::of(role) == side
}

/// Returns the waiting of all threads of a side as a part of a request's time.
fn of_requests(evidence: &Evidence, side: Side) -> Option<Waiting> {
    let threads = evidence.threads.iter().filter(|one| is_of(side, one.role));
    let all: Vec<f64> = threads.filter_map(|one| waits(evidence, one)).collect();
    Waiting::of(evidence, side, &all)
}

fn waits(evidence: &Evidence, thread: &ThreadTime) -> Option<f64> {
    of_window(evidence, thread, thread.waiting?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{cell, with};

    /// The vCPU ran and waited for these numbers of seconds of 10 s; its guest is busy.
    fn vcpu(cpu: f64, waiting: f64) -> Evidence {
        with(cell(32, 400.0), |evidence| {
            let vcpu = &mut evidence.threads[0];
            (vcpu.cpu, vcpu.waiting) = (cpu, Some(waiting));
            evidence.guest.as_mut().unwrap().busy[0] = 99.0;
        })
    }

    #[test]
    fn a_vcpu_that_wants_a_cpu_and_has_none_is_starved() {
        let finding = starved(&vcpu(5.2, 4.6)).unwrap();
        assert_eq!(
            finding.text,
            "run queue: vCPU 'CPU 0/KVM' waited for a CPU in 46% of the window and had one in \
             52%; the host's CPUs are overcommitted"
        );
        assert!(starved(&vcpu(8.3, 1.3)).is_some());
        assert!(starved(&vcpu(5.2, 4.2)).is_none());
        // Without the waits, the vCPU would do little more.
        assert!(starved(&vcpu(9.0, 0.51)).is_none());
    }

    #[test]
    fn a_starved_thread_is_not_the_limit_of_requests_elsewhere() {
        let elsewhere = |device_us: f64| {
            with(vcpu(5.2, 4.6), |evidence| {
                evidence.device.as_mut().unwrap().mean_ns = device_us * 1e3;
            })
        };
        assert!(starved(&elsewhere(180.0)).unwrap().holds());
        assert!(!starved(&elsewhere(190.0)).unwrap().holds());
    }

    /// A cell with one request of 400 us at a time, of which the device takes `device_us`. The vCPU
    /// waits for `waiting` of 10 s.
    fn one_by_one(waiting: f64, device_us: f64) -> Evidence {
        with(cell(1, 400.0), |evidence| {
            evidence.device.as_mut().unwrap().mean_ns = device_us * 1e3;
            let vcpu = &mut evidence.threads[0];
            (vcpu.cpu, vcpu.waiting) = (1.0, Some(waiting));
            evidence.threads[1].cpu = 0.5;
        })
    }

    #[test]
    fn waiting_is_a_part_of_the_requests_time() {
        let finding = delayed(&one_by_one(5.0, 100.0)).unwrap();
        assert!(finding.holds());
        assert_eq!(
            finding.text,
            "run queue: vCPU 'CPU 0/KVM' waited for a CPU in 50% of the window, at most 52% of the \
             request's time"
        );
        assert_eq!(finding.subject.as_deref(), Some("CPU 0/KVM"));
        assert!(delayed(&vcpu(5.2, 4.6)).is_none(), "that is starved");
    }

    #[test]
    fn waiting_loses_to_anything_larger() {
        // The device takes more.
        assert!(!delayed(&one_by_one(2.0, 300.0)).unwrap().holds());
        // Most of the time was not seen.
        assert!(!delayed(&one_by_one(2.0, 100.0)).unwrap().holds());
        assert!(!delayed(&one_by_one(0.94, 4.0)).unwrap().holds());
        let short = with(one_by_one(0.2, 100.0), |evidence| {
            evidence.threads[1].waiting = Some(0.0);
        });
        assert!(delayed(&short).is_none());
    }

    #[test]
    fn waiting_of_unknown_requests_is_only_mentioned() {
        let unknown = with(one_by_one(5.0, 100.0), |evidence| {
            evidence.load = Default::default();
        });
        let finding = delayed(&unknown).unwrap();
        assert!(!finding.holds() && finding.text.ends_with("50% of the window"));
    }

    #[test]
    fn what_is_not_on_the_way_may_wait() {
        let other = with(cell(32, 400.0), |evidence| {
            evidence.threads.push(ThreadTime {
                name: "vnc_worker".into(),
                role: ThreadRole::Other,
                cpu: 5.0,
                waiting: Some(5.0),
                ..ThreadTime::default()
            });
        });
        assert!(starved(&other).is_none() && delayed(&other).is_none());
    }
}
