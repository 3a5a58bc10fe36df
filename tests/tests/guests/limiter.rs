//! What limits a guest's disk, built on purpose, is named.

use std::process::Command;
use std::time::Duration;

use fathom_lab::KvmHost;
use fathom_lab::experiment::runner::Runner;
use fathom_lab::experiment::{Context, Order, Settings, find, nested};
use fathom_limiter::{Verdict, judge};
use fathom_run::Run;
use fathom_run::evidence::Evidence;
use fathom_tests::fathom;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const SOON: Duration = Duration::from_secs(60);
/// A cell in a KVM host that is emulated takes half a minute, and one that stands still for good.
const CELL: Duration = Duration::from_secs(150);

/// Reads through a filter of Fathom's; the verdict.
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
    runner.run(&context, &mut |_| {}).unwrap();
    let plan = Run::load(&dir).unwrap().experiment.unwrap();
    let cells = plan.load_cells(&dir).unwrap();
    judge(cells[0].evidence.as_ref().unwrap())
}

#[test]
fn a_filter_that_holds_requests_is_named() {
    for (filter, name) in [
        ("throttle:iops-total=50", "throttle"),
        ("delay:read=20ms", "delay"),
    ] {
        let verdict = through(filter);
        let said = format!("{verdict:?}");
        assert_eq!(
            (verdict.rule(), verdict.subject()),
            (Some("filter"), Some(name)),
            "{said}"
        );
    }
    // One that holds nothing is not.
    let verdict = through("throttle:iops-total=1000000");
    assert_ne!(verdict.rule(), Some("filter"), "{verdict:?}");
}

/// The guest, its QEMU and its server have one CPU, and share it.
#[test]
fn a_vcpu_of_an_overcommitted_host_is_named() {
    let attempts = (0..ATTEMPTS).map(|_| an_overcommitted_host());
    let misses: Vec<Verdict> = attempts
        .take_while(|verdict| verdict.rule() != Some("run-queue"))
        .collect();
    assert!(misses.len() < ATTEMPTS, "{misses:#?}");
}

fn an_overcommitted_host() -> Verdict {
    let allowed = sched_getaffinity(None).unwrap();
    let cpu = (0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu));
    let mut one = CpuSet::new();
    one.set(cpu.unwrap());
    // Of this thread, and so of all that it starts.
    sched_setaffinity(None, &one).unwrap();
    // With one, the guest would wait for half of the time, which is where the rule begins to hold.
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

/// Others may use this machine's CPUs for a while, and an emulated host may stand still.
const ATTEMPTS: usize = 3;

/// In an emulated KVM host: only KVM tells a guest what is stolen from it. That host has one CPU,
/// which the guest's own QEMU needs now and then: something is always stolen.
#[test]
fn what_a_neighbour_steals_from_a_guest_is_named_and_is_what_limits() {
    let attempts = (0..ATTEMPTS).map(|_| a_guest_with_a_neighbour());
    let misses: Vec<String> = attempts.map_while(Result::err).collect();
    assert!(misses.len() < ATTEMPTS, "{misses:#?}");
}

fn a_guest_with_a_neighbour() -> Result<(), String> {
    let mut host = KvmHost::boot(&fathom()).unwrap();
    let alone = cached_reads(&mut host)?;
    let neighbour = "sh -c 'while :; do :; done' </dev/null >/dev/null 2>&1 &";
    host.check(neighbour, SOON).unwrap();
    let beside = cached_reads(&mut host)?;
    let verdict = judge(&beside);
    let is_named = verdict.rule() == Some("steal") && verdict.subject() == Some("guest CPU 0");
    let share = |evidence: &Evidence| evidence.guest.as_ref().unwrap().steal[0];
    let is_its_doing = share(&beside) > 1.5 * share(&alone);
    let is_limit = alone.load.requests * 2 > beside.load.requests * 3;
    let said = format!("{verdict}\nalone: {alone:#?}\nbeside: {beside:#?}");
    eprintln!("{said}");
    let is_right = is_named && is_its_doing && is_limit;
    is_right.then_some(()).ok_or(said)
}

/// What a guest of a KVM host sees of its reads from its page cache, which keep its CPU busy and ask
/// the host for nothing. It sees none of the host's threads, which would tell the same.
fn cached_reads(host: &mut KvmHost) -> Result<Evidence, String> {
    let defaults = Settings::defaults(find("settings").unwrap().parameters());
    let settings = [("direct", "off"), ("size", "1M"), ("runtime", "5s")].into_iter();
    let settings = settings.fold(defaults, |all, (name, value)| all.with(name, value));
    let dir = tempfile::tempdir().unwrap();
    let mut progress = |step: &str| eprintln!("{step}");
    let seen = nested::run_within(host, "settings", &settings, dir.path(), CELL, &mut progress);
    let seen = seen.map_err(|error| error.to_string())?;
    let Evidence { load, guest, .. } = seen.evidence.unwrap();
    Ok(Evidence {
        seconds: load.seconds,
        load,
        guest,
        ..Evidence::default()
    })
}
