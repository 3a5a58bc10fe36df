//! Threads that are ready to run and wait for a CPU of the host.

use fathom_run::evidence::{Evidence, ThreadRole, ThreadTime};

use crate::device_part::device_share;
use crate::figures::{DELAYED, SATURATED, largest, of_window, on_path, percent, thread, working};
use crate::rule::Finding;

/// Holds if a thread wanted to run all the time and waited for a CPU: there are too many threads
/// for the CPUs.
pub fn starved(evidence: &Evidence) -> Option<Finding> {
    let wants_all = |one: &ThreadTime| {
        let (waits, works) = (waits(evidence, one)?, working(evidence, one)?);
        (waits >= DELAYED && waits + works >= SATURATED).then_some(waits)
    };
    let (waits, starved) = largest(evidence, on_path, wants_all)?;
    let whose = match starved.role {
        ThreadRole::Vcpu => "; the host's CPUs are overcommitted",
        _ => "",
    };
    let text = format!(
        "run queue: {} waited for a CPU in {} of the window and had one in {}{whose}",
        thread(starved),
        percent(waits),
        percent(of_window(evidence, starved.cpu)?)
    );
    Some(Finding::verdict(text).about(crate::figures::name(&starved.name)))
}

/// Finds a thread that waits noticeably. Holds if the waiting takes more of a request's time than
/// the device does.
pub fn delayed(evidence: &Evidence) -> Option<Finding> {
    if starved(evidence).is_some() {
        return None; // reported by `starved`
    }
    let (share, delayed) = largest(evidence, on_path, |one| waits(evidence, one))?;
    let text = format!(
        "run queue: {} waited for a CPU in {} of the window",
        thread(delayed),
        percent(share)
    );
    let finding = match device_share(evidence) {
        Some(device) if device >= share => Finding::weak(text),
        _ => Finding::verdict(text),
    };
    (share >= DELAYED).then(|| finding.about(crate::figures::name(&delayed.name)))
}

fn waits(evidence: &Evidence, thread: &ThreadTime) -> Option<f64> {
    of_window(evidence, thread.waiting?)
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
        assert!(starved(&vcpu(9.0, 0.51)).is_some());
        assert!(starved(&vcpu(9.6, 0.49)).is_none());
        assert!(starved(&vcpu(5.2, 4.2)).is_none());
    }

    #[test]
    fn waiting_counts_against_what_the_device_takes() {
        let waits = |waiting: f64, device_us: f64| {
            with(vcpu(3.0, waiting), |evidence| {
                evidence.device.as_mut().unwrap().mean_ns = device_us * 1e3;
            })
        };
        assert!(delayed(&waits(0.49, 4.0)).is_none());
        assert!(delayed(&waits(0.51, 4.0)).unwrap().holds());
        assert!(!delayed(&waits(0.51, 380.0)).unwrap().holds());
        assert!(delayed(&vcpu(5.2, 4.6)).is_none(), "that is starved");
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
