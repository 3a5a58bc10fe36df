//! Tests that the verdict names the limit of a served disk if a test creates this limit, and never
//! names an absent limit.
//!
//! The verdict uses only measurements from outside of real servers and real loads. Each test
//! confirms the limit: more of the limiting resource gives more throughput. Server and load have a
//! CPU each.

#[path = "limiter/draws.rs"]
mod draws;
#[path = "limiter/groups.rs"]
mod groups;
#[path = "limiter/guest.rs"]
mod guest;
#[path = "limiter/memory.rs"]
mod memory;
#[path = "limiter/scene.rs"]
mod scene;

use fathom_limiter::judge;
use fathom_run::evidence::{Evidence, ThreadTime};
use fathom_testing::{decide, outrank_other_programs};
use memory::{AMPLE, TIGHT, seen_with_memory};
use parking_lot::Mutex;
use scene::{
    LOAD, SERVER, Scene, Work, bench, checksums, rate, seen, seen_on_disk, told_by_bench,
    told_by_fio,
};

/// Checks the verdict on a load.
///
/// If other programs use the two CPUs, the verdict may also be a thread that has waited for its
/// CPU, or no rule with the same thread named.
fn expect(evidence: &Evidence, rule: &str, thread: &str) -> Result<(), String> {
    let verdict = judge(evidence);
    eprintln!("{verdict}");
    let said = format!("{verdict:#?}\n{evidence:#?}");
    let has_waited = |one: &ThreadTime| {
        verdict.text.contains(&format!("'{}'", one.name))
            && one
                .waiting
                .is_some_and(|waited| waited > 0.05 * evidence.seconds)
    };
    let is_right = match verdict.rule() {
        Some("run-queue") => evidence.threads.iter().any(has_waited),
        None => verdict.text.contains(thread),
        other => other == Some(rule),
    };
    is_right.then_some(()).ok_or(said)
}

/// Reads of 256k: the worker copies each byte, and the load accesses none.
///
/// The worker always has requests in one queue while the load's threads refill the others.
const COPIES: &[&str] = &[
    "--rw",
    "randread",
    "--bs",
    "256k",
    "--iodepth",
    "16",
    "--queues",
    "4",
];

/// Returns the evidence of a load of `fathom bench`.
fn benched(args: &[&str], scene: Scene) -> Evidence {
    let work = Work {
        command: &|sockets| bench(sockets, args),
        told: &told_by_bench,
    };
    seen(&work, scene)
}

/// Returns the evidence of a load that processes the data, which the worker only copies.
fn checked(scene: Scene) -> Evidence {
    let work = Work {
        command: &checksums,
        told: &told_by_fio,
    };
    seen(&work, scene)
}

fn with_busy(cpu: u32) -> Scene<'static> {
    Scene {
        busy: Some(cpu),
        ..Scene::default()
    }
}

/// Checks that one load has at least `times` as many requests per second as another.
fn expect_times(more: &Evidence, less: &Evidence, times: f64, what: &str) -> Result<(), String> {
    let (more, less) = (rate(more), rate(less));
    let said = format!("{what}: {more:.0} against {less:.0} a second");
    eprintln!("{said}");
    (more > times * less).then_some(()).ok_or(said)
}

/// Held by each test, because each would limit the others.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn what_limits_a_served_disk_is_named_and_is_what_limits() {
    let _alone = ALONE.lock();
    let limits: [fn() -> Result<(), String>; 6] =
        [a_thread, the_load, latency, a_filter, the_device, memory];
    // On a busy machine, other programs would be the limit.
    outrank_other_programs();
    // Other programs may use the disk for a while.
    limits.iter().for_each(|limit| decide(|| limit().unwrap()));
}

fn a_thread() -> Result<(), String> {
    let alone = benched(COPIES, Scene::default());
    expect(&alone, "thread", "I/O thread 'worker 0'")?;
    let server_shares = benched(COPIES, with_busy(SERVER));
    expect(&server_shares, "run-queue", "worker 0")?;
    let load_shares = benched(COPIES, with_busy(LOAD));
    expect_times(
        &alone,
        &server_shares,
        1.3,
        "the worker without a neighbour",
    )?;
    expect_times(
        &load_shares,
        &server_shares,
        1.2,
        "the load's neighbour, not the worker's",
    )
}

fn the_load() -> Result<(), String> {
    let alone = checked(Scene::default());
    expect(&alone, "load-thread", "load")?;
    let shares = checked(with_busy(LOAD));
    expect_times(&alone, &shares, 1.3, "the load without a neighbour")
}

/// No limit is wrong here: single requests take their time.
fn latency() -> Result<(), String> {
    let depth = |depth: &str| {
        let args = ["--rw", "randread", "--iodepth", depth];
        benched(&args, Scene::default())
    };
    let one = depth("1");
    expect(&one, "latency", "latency")?;
    expect_times(&depth("4"), &one, 1.15, "four at once")
}

fn a_filter() -> Result<(), String> {
    let limited = |filter: &str| {
        let scene = Scene {
            filter: Some(filter),
            ..Scene::default()
        };
        benched(&["--rw", "randread", "--iodepth", "32"], scene)
    };
    let tight = limited("throttle:iops-read=1000");
    expect(&tight, "filter", "throttle")?;
    expect_times(
        &limited("throttle:iops-read=2000"),
        &tight,
        1.8,
        "twice the limit",
    )?;
    let slow = limited("delay:read=20ms");
    expect(&slow, "filter", "delay")?;
    expect_times(&limited("delay:read=10ms"), &slow, 1.6, "half the delay")
}

/// The device is saturated: more requests in flight are not faster, and other readers slow the load
/// down.
fn the_device() -> Result<(), String> {
    let alone = seen_on_disk(32, 1);
    expect(&alone, "device", "device ")?;
    let deeper = seen_on_disk(64, 1);
    expect_times(&alone, &deeper, 0.7, "half as many at once")?;
    expect_times(&alone, &seen_on_disk(32, 2), 1.3, "without another reader")
}

/// Data for which the page cache has no room is read again and again.
fn memory() -> Result<(), String> {
    let tight = seen_with_memory(TIGHT);
    assert!(
        tight.pressure.is_some(),
        "this test needs /proc/pressure: boot with psi=1"
    );
    let verdict = judge(&tight);
    eprintln!("{verdict}");
    let is_named = verdict.rule() == Some("pressure") && verdict.subject() == Some("memory");
    is_named
        .then_some(())
        .ok_or_else(|| format!("{verdict:#?}\n{tight:#?}"))?;
    let ample = seen_with_memory(AMPLE);
    let verdict = judge(&ample);
    let is_other = verdict.rule() != Some("pressure");
    is_other
        .then_some(())
        .ok_or_else(|| format!("{verdict:#?}\n{ample:#?}"))?;
    expect_times(&ample, &tight, 1.5, "with enough memory")
}
