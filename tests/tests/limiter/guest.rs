//! Tests that the known limit of a guest's disk is named.

use std::process::Command;

use crate::ALONE;
use fathom_lab::experiment::runner::Runner;
use fathom_lab::experiment::{Context, Order, find};
use fathom_limiter::{Verdict, judge};
use fathom_run::Run;
use fathom_testing::{decide, outrank_other_programs};
use fathom_tests::fathom;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Reads through a filter. Returns the verdict.
fn through(filter: &str) -> Verdict {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("run");
    let mut order = Order::new(find("seqread").unwrap());
    for (name, text) in [
        ("size", "16M"),
        ("runtime", "2s"),
        ("serve", &format!("--filter={filter}")),
    ] {
        order.set(name, &[text.to_owned()]).unwrap();
    }
    let context = Context { fathom: fathom() };
    let runner = Runner::new(&order, &dir).unwrap();
    runner.run(&context, None, &mut |_| {}).unwrap();
    let plan = Run::load(&dir).unwrap().experiment.unwrap();
    let cells = plan.load_cells(&dir).unwrap();
    judge(cells[0].evidence.as_ref().unwrap())
}

#[test]
fn a_filter_that_holds_requests_is_named() {
    // A guest that waits for a CPU for longer than the filter holds its requests is limited by
    // that.
    let _alone = ALONE.lock();
    outrank_other_programs();
    for (filter, name) in [
        ("throttle:iops-total=50", "throttle"),
        ("delay:read=20ms", "delay"),
    ] {
        let verdict = through(filter);
        let is_first = (verdict.rule(), verdict.subject()) == (Some("filter"), Some(name));
        // On a busy machine, the guest's wait for a CPU may be the first limit.
        let is_next = verdict.rule() == Some("run-queue") && { verdict.also.iter() }
            .any(|line| line.starts_with(&format!("{name} filter")));
        assert!(is_first || is_next, "{verdict:?}");
    }
    // A filter that delays nothing is not named.
    let verdict = through("throttle:iops-total=1000000");
    assert_ne!(verdict.rule(), Some("filter"), "{verdict:?}");
}

/// The guest, its QEMU and its server share one CPU.
#[test]
fn a_vcpu_of_an_overcommitted_host_is_named() {
    let _alone = ALONE.lock();
    // Other programs may use this machine's CPUs for a while.
    decide(|| {
        let verdict = an_overcommitted_host();
        assert_eq!(verdict.rule(), Some("run-queue"), "{verdict:#?}");
    });
}

fn an_overcommitted_host() -> Verdict {
    let allowed = sched_getaffinity(None).unwrap();
    let cpu = (0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu));
    let mut one = CpuSet::new();
    one.set(cpu.unwrap());
    // The affinity of this thread, which all programs that it starts inherit.
    sched_setaffinity(None, &one).unwrap();
    // With one spinner, the guest would wait for half of the time, which is just where the rule
    // begins to hold.
    let spin = || {
        Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
    };
    let spinners = [spin().unwrap(), spin().unwrap()];
    let verdict = std::panic::catch_unwind(|| through("throttle:iops-total=1000000"));
    for mut spinner in spinners {
        spinner.kill().unwrap();
        spinner.wait().unwrap();
    }
    verdict.unwrap()
}
