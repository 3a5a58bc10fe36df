//! A thread that has work all the time and is on a CPU for nearly all of it.

use fathom_run::evidence::{Evidence, ThreadRole, ThreadTime};

use crate::figures::{
    SATURATED, largest, name, of_window, on_path, percent, thread, wanting, working,
};
use crate::rule::Finding;

/// Holds if a thread on the path, or else a thread of the kernel, wanted to run all the time:
///
/// ```text
/// works         >= 0.95   [CPU time without polling, seconds per second of the window]
/// works + waits >= 0.95   if works >= 0.8; waits for a CPU are in the same unit
/// ```
///
/// By the utilisation law, the rate cannot rise without such a thread, wherever its requests are.
/// `works` is in seconds per unstolen second of the window, and for a vCPU at most what its guest
/// reports. The window of a server's thread is that of the load.
pub fn saturated(evidence: &Evidence) -> Option<Finding> {
    let works = |one: &ThreadTime| wanting(evidence, one).filter(|&share| share >= SATURATED);
    let on_cpu = |one: &ThreadTime| on_cpu(evidence, one);
    let is_load = |role| role == ThreadRole::Load; // has a rule of its own
    let serves = |role| on_path(role) && !is_load(role);
    let found = largest(evidence, serves, works)
        .or_else(|| largest(evidence, |role| role == ThreadRole::Kernel, works));
    if let Some((_, busiest)) = found {
        let others = evidence.threads.iter();
        let others = others.filter(|one| serves(one.role) && !std::ptr::eq(*one, busiest));
        let others = match others.filter(|one| works(one).is_some()).count() {
            0 => String::new(),
            1 => ", and another".into(),
            count => format!(", and {count} others"),
        };
        let text = format!("{} {}{others}", thread(busiest), on_cpu(busiest));
        return Some(Finding::verdict(text).about(name(&busiest.name)));
    }
    poller(evidence).or_else(|| {
        let (_, other) = largest(evidence, |role| role == ThreadRole::Other, works)?;
        let text = format!("{} {}", thread(other), on_cpu(other));
        Some(Finding::weak(text))
    })
}

/// Describes the CPU share: `on CPU 98%`, or `on CPU 92%, waiting for one 4%`.
fn on_cpu(evidence: &Evidence, thread: &ThreadTime) -> String {
    let working = working(evidence, thread).unwrap_or(0.0);
    let text = format!("on CPU {}", percent(working));
    match wanting(evidence, thread) {
        Some(wanting) if working < SATURATED => {
            format!("{text}, waiting for one {}", percent(wanting - working))
        }
        _ => text,
    }
}

/// Finds a thread that may be saturated, but polls and does not report how much of its time is
/// work: `CPU time >= 0.95` in seconds per second of the window.
pub fn poller(evidence: &Evidence) -> Option<Finding> {
    let on_cpu = |one: &ThreadTime| {
        let is_unknown = one.polls && working(evidence, one).is_none();
        let share = of_window(evidence, one, one.cpu).filter(|&share| share >= SATURATED);
        share.filter(|_| is_unknown)
    };
    let (share, poller) = largest(evidence, |role| role != ThreadRole::Load, on_cpu)?;
    let text = format!(
        "how much of the time of {} is work (on CPU {}, but it polls)",
        thread(poller),
        percent(share)
    );
    Some(Finding::unseen(text).about(name(&poller.name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{cell, with};

    /// The worker used this number of seconds of CPU time in 10 s.
    fn worker(cpu: f64, change: fn(&mut ThreadTime)) -> Evidence {
        with(cell(32, 400.0), |evidence| {
            evidence.threads[1].cpu = cpu;
            change(&mut evidence.threads[1]);
        })
    }

    #[test]
    fn a_thread_without_a_pause_is_saturated() {
        let finding = saturated(&worker(9.8, |_| ())).unwrap();
        assert!(finding.holds());
        assert_eq!(finding.text, "I/O thread 'worker 0' on CPU 98%");
        assert!(saturated(&worker(9.51, |_| ())).unwrap().holds());
        assert!(saturated(&worker(9.49, |worker| worker.waiting = None)).is_none());
    }

    #[test]
    fn a_thread_that_only_waits_for_a_cpu_has_work() {
        let waits = |cpu, waiting: fn(&mut ThreadTime)| saturated(&worker(cpu, waiting));
        let finding = waits(9.2, |worker| worker.waiting = Some(0.4)).unwrap();
        assert!(finding.holds());
        assert_eq!(
            finding.text,
            "I/O thread 'worker 0' on CPU 92%, waiting for one 4.0%"
        );
        assert!(waits(9.0, |worker| worker.waiting = Some(0.4)).is_none());
        // A thread that works little waits because of other threads.
        assert!(waits(7.0, |worker| worker.waiting = Some(3.0)).is_none());
    }

    #[test]
    fn a_thread_that_polls_is_only_where_it_finds_work() {
        let unknown = worker(10.0, |worker| worker.polls = true);
        assert!(!saturated(&unknown).unwrap().holds());
        let idle = worker(10.0, |worker| {
            (worker.polls, worker.polled) = (true, Some(6.0));
        });
        assert!(saturated(&idle).is_none());
        let full = worker(10.0, |worker| {
            (worker.polls, worker.polled) = (true, Some(0.1));
        });
        assert!(saturated(&full).unwrap().holds());
    }

    #[test]
    fn a_vcpu_that_spins_while_its_guest_is_idle_is_not() {
        let spinning = |busy: f64| {
            with(cell(32, 400.0), |evidence| {
                evidence.threads[0].cpu = 9.9;
                evidence.guest.as_mut().unwrap().busy[0] = busy;
            })
        };
        assert!(saturated(&spinning(20.0)).is_none());
        let busy = saturated(&spinning(93.0)).unwrap();
        assert_eq!(busy.subject.as_deref(), Some("CPU 0/KVM"));
    }

    #[test]
    fn the_kernels_threads_come_after_those_of_the_server() {
        let kernel = |worker_cpu: f64| {
            let mut evidence = worker(worker_cpu, |_| ());
            evidence.threads.push(ThreadTime {
                name: "kcryptd/253:0".into(),
                role: ThreadRole::Kernel,
                cpu: 9.99,
                ..ThreadTime::default()
            });
            saturated(&evidence).unwrap().text
        };
        assert_eq!(kernel(5.0), "kernel thread 'kcryptd/253:0' on CPU 100%");
        assert_eq!(kernel(9.6), "I/O thread 'worker 0' on CPU 96%");
    }
}
