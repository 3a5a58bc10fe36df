//! Tests that a known limit is named, even if other rules hold as well.

use fathom_run::evidence::{
    DeviceTime, Evidence, Held, IoLimit, IoLimitKind, Layer, LockWait, Pressure, Processors,
    ThreadRole, Throttling,
};

use super::{cell, thread, with};
use crate::{judge, names};

#[track_caller]
fn named(evidence: &Evidence, rule: &str, subject: &str) -> String {
    let verdict = judge(evidence);
    let found = (verdict.rule(), verdict.subject());
    assert_eq!(found, (Some(rule), Some(subject)), "{verdict:#?}");
    verdict.text
}

/// A cell with a disk in memory, so that nothing waits for a device.
fn in_memory(depth: u32, us: f64) -> Evidence {
    with(cell(depth, us), |evidence| {
        (evidence.device, evidence.bare) = (None, None);
    })
}

#[test]
fn a_capped_group_is_named_though_its_thread_looks_saturated() {
    let capped = with(in_memory(32, 600.0), |evidence| {
        evidence.threads[1].cpu = 9.6;
        evidence.threads[0].waiting = Some(3.0);
        evidence.cgroup = Some(Throttling {
            group: "/vm1".into(),
            periods: 100,
            throttled: 43,
            seconds: 6.2,
        });
    });
    named(&capped, "cpu-cap", "/vm1");
    // The group is throttled briefly, in bursts, so the thread is the limit.
    let grazed = with(capped, |evidence| {
        let cap = evidence.cgroup.as_mut().unwrap();
        (cap.throttled, cap.seconds) = (4, 0.1);
        evidence.threads[0].waiting = Some(0.1);
    });
    named(&grazed, "thread", "worker 0");
    assert!(judge(&grazed).also[0].contains("4.0% of periods"));
}

#[test]
fn a_throttle_is_named() {
    let throttled = with(cell(8, 8000.0), |evidence| {
        let device = evidence.device.as_mut().unwrap();
        (device.mean_ns, device.in_flight) = (90e3, 0.09);
        evidence.filters.push(Held {
            filter: "throttle".into(),
            requests: 9900,
            mean_ns: 7.8e6,
        });
    });
    let text = named(&throttled, "filter", "throttle");
    assert_eq!(text, "throttle filter: 98% of the request's time");
}

#[test]
fn a_slow_device_is_named_by_the_filter_that_makes_it_slow() {
    let slow = with(in_memory(1, 2100.0), |evidence| {
        evidence.filters.push(Held {
            filter: "delay".into(),
            requests: 4700,
            mean_ns: 2e6,
        });
    });
    named(&slow, "filter", "delay");
}

#[test]
fn a_slow_device_at_depth_1_is_latency_of_the_device() {
    let layers = with(cell(1, 5000.0), |evidence| {
        let layer = |name: &str, mean_ns| Layer {
            name: name.into(),
            mean_ns,
        };
        evidence.layers = vec![layer("guest", 1e5), layer("host: device", 4.8e6)];
    });
    let text = named(&layers, "latency", "host: device");
    assert!(
        text.starts_with("latency: depth 1 / 5.0 ms, nothing busy"),
        "{text}"
    );
}

#[test]
fn a_device_at_its_limit_is_named_whoever_polls_or_looks_busy() {
    named(&cell(32, 400.0), "device", "nvme0n1");
    let polls = with(cell(32, 400.0), |evidence| {
        evidence.threads[1].cpu = 10.0;
        evidence.threads[1].polls = true;
    });
    named(&polls, "device", "nvme0n1");
    assert!(judge(&polls).also[0].contains("it polls"));
    let busy = with(cell(32, 400.0), |evidence| evidence.threads[1].cpu = 9.7);
    named(&busy, "device", "nvme0n1");
}

#[test]
fn a_device_that_could_do_more_is_not_at_its_limit() {
    let shared = with(cell(32, 400.0), |evidence| {
        evidence.bare.as_mut().unwrap().requests_per_second *= 2.0;
    });
    let verdict = judge(&shared);
    assert_eq!(verdict.rule(), Some("latency"), "{verdict:#?}");
    assert!(verdict.also[0].contains("the bare device does 2 times as much"));
}

#[test]
fn a_saturated_worker_is_named_before_the_load_that_feeds_it() {
    let saturated = with(in_memory(32, 60.0), |evidence| {
        evidence.threads[1].cpu = 9.8;
        evidence.load.thread_cpu = vec![9.7];
    });
    let text = named(&saturated, "thread", "worker 0");
    assert_eq!(text, "I/O thread 'worker 0' on CPU 98%");
    assert_eq!(
        judge(&saturated).also,
        ["the load's own thread: on CPU 97%"]
    );
}

#[test]
fn load_in_an_emulated_guest_is_named_not_its_vcpu() {
    let emulated = with(in_memory(32, 3000.0), |evidence| {
        evidence.threads[0] = thread("CPU 0/TCG", ThreadRole::Vcpu, 9.98);
        evidence.guest.as_mut().unwrap().busy[0] = 100.0;
        evidence.load.thread_cpu = vec![9.8];
    });
    let verdict = judge(&emulated);
    assert_eq!(verdict.rule(), Some("load-thread"), "{verdict:#?}");
    assert_eq!(verdict.also, ["vCPU 'CPU 0/TCG' on CPU 100%"]);
    // If the load has time to spare, the vCPU is the limit, because of interrupts or a driver.
    let driver = with(emulated, |evidence| evidence.load.thread_cpu = vec![4.0]);
    named(&driver, "thread", "CPU 0/TCG");
}

#[test]
fn an_overcommitted_vcpu_is_named_from_both_sides() {
    let seen_by_host = with(in_memory(32, 900.0), |evidence| {
        evidence.threads[0].cpu = 5.1;
        evidence.threads[0].waiting = Some(4.7);
        evidence.guest.as_mut().unwrap().busy[0] = 97.0;
        evidence.load.thread_cpu = vec![9.6];
    });
    named(&seen_by_host, "run-queue", "CPU 0/KVM");
    let seen_by_guest = with(in_memory(32, 900.0), |evidence| {
        evidence.threads.clear();
        evidence.guest = Some(Processors {
            busy: vec![52.0],
            steal: vec![46.0],
        });
        evidence.load.thread_cpu = vec![9.6];
    });
    named(&seen_by_guest, "steal", "guest CPU 0");
}

#[test]
fn a_worker_at_its_limit_is_named_though_a_vcpu_waits_a_little() {
    let both = with(in_memory(32, 60.0), |evidence| {
        evidence.threads[1].cpu = 9.8;
        evidence.threads[0].waiting = Some(0.7);
        evidence.guest.as_mut().unwrap().steal[0] = 6.0;
    });
    named(&both, "thread", "worker 0");
    assert_eq!(judge(&both).also.len(), 2);
}

#[test]
fn a_lock_is_named_where_nobody_is_saturated() {
    let lock = with(in_memory(32, 400.0), |evidence| {
        evidence.locks.push(LockWait {
            name: "qemu_global_mutex".into(),
            side: "host".into(),
            waits: 80_000,
            seconds: 71.0,
        });
    });
    named(&lock, "lock", "qemu_global_mutex");
}

#[test]
fn a_host_without_memory_is_named_before_latency() {
    let short = with(in_memory(1, 900.0), |evidence| {
        evidence.pressure = Some(Pressure {
            cpu: 3.0,
            io: 99.0,
            memory: 31.0,
        });
    });
    named(&short, "pressure", "memory");
}

#[test]
fn where_nothing_is_wrong_nothing_but_latency_is_named() {
    let fine = judge(&cell(1, 90.0));
    assert_eq!(
        (fine.rule(), fine.also.len()),
        (Some("latency"), 0),
        "{fine:#?}"
    );
    // The same applies to a load with few requests.
    let paced = with(cell(4, 90.0), |evidence| {
        let device = evidence.device.as_mut().unwrap();
        device.in_flight /= 10.0;
        for count in [&mut device.requests, &mut device.bytes] {
            *count /= 10;
        }
        for count in [&mut evidence.load.requests, &mut evidence.load.bytes] {
            *count /= 10;
        }
    });
    let verdict = judge(&paced);
    assert_eq!(verdict.limiter, None);
    assert_eq!(
        verdict.to_string(),
        "unknown, not seen: what the load did between its requests: its own pace, or flushes that \
         it does not count (it had 0.4 of 4 in flight); seen: busiest vCPU 'CPU 0/KVM' on CPU 38%; \
         the load had 0.4 of 4 in flight; the device \
         0.4 (96% of the request's time); the host's CPUs 42% busy"
    );
    assert!(verdict.also.is_empty(), "{verdict:#?}");
}

/// A cell with one request at a time, whose vCPU waits for a CPU in 9.4% of the window, with these
/// layers (name, share).
fn layered(us: f64, layers: &[(&str, f64)]) -> Evidence {
    with(cell(1, us), |evidence| {
        evidence.threads[0].waiting = Some(0.94);
        evidence.device = None;
        let layer = |&(name, share): &(&str, f64)| Layer {
            name: name.into(),
            mean_ns: share * us * 1e3,
        };
        evidence.layers = layers.iter().map(layer).collect();
    })
}

#[test]
fn short_waits_of_a_vcpu_are_not_the_limit() {
    let guest = ("guest, KVM and QEMU", 0.15);
    let shared = [guest, ("fathom: wake", 0.75), ("host: device", 0.10)];
    let shared = layered(4000.0, &shared);
    named(&shared, "latency", "fathom: wake");
    assert!(judge(&shared).also[0].starts_with("run queue: vCPU 'CPU 0/KVM' waited"));
    let tables = [guest, ("fathom: map", 0.60), ("host: device", 0.25)];
    let verdict = judge(&layered(400.0, &tables));
    assert_eq!(verdict.rule(), Some("tables"), "{verdict:#?}");
}

#[test]
fn an_io_limit_above_the_device_is_not_latency() {
    let layers = [("guest, KVM and QEMU", 0.03), ("host: device", 0.97)];
    let capped = with(layered(3300.0, &layers), |evidence| {
        evidence.device = cell(1, 100.0).device;
        let device = evidence.device.as_mut().unwrap();
        (device.requests, device.bytes) = (evidence.load.requests, evidence.load.bytes);
    });
    let verdict = judge(&capped);
    assert_eq!(verdict.limiter, None);
    let words = "unknown, not seen: what holds requests between the server and the device";
    assert!(verdict.text.starts_with(words), "{verdict:#?}");
    let seen = with(capped, |evidence| {
        evidence.io_limit = Some(IoLimit {
            group: "/vm1".into(),
            device: "sdb".into(),
            kind: IoLimitKind::Reads,
            allowed: 300.0,
            used: evidence.load.requests,
        });
    });
    named(&seen, "io-cap", "/vm1");
}

#[test]
fn a_device_with_a_neighbour_is_not_judged_by_its_figures() {
    let neighbour = with(cell(4, 900.0), |evidence| {
        let device = evidence.device.as_mut().unwrap();
        (device.requests, device.bytes) = (device.requests + 20_000, device.bytes + (20_000 << 20));
        (device.in_flight, device.mean_ns) = (36.0, 8e6);
    });
    let verdict = judge(&neighbour);
    assert_eq!(verdict.limiter, None);
    let words =
        "the load's part of the device nvme0n1, which other I/O uses: 36 in flight, and 4 of";
    assert!(verdict.text.contains(words), "{verdict:#?}");
    let seen = with(neighbour, |evidence| {
        evidence.device.as_mut().unwrap().own_bytes = Some(evidence.load.bytes);
    });
    named(&seen, "neighbour", "nvme0n1");
}

#[test]
fn start_and_end_of_a_load_do_not_hide_a_full_device() {
    let longer = with(cell(32, 400.0), |evidence| {
        evidence.seconds = 12.5;
        evidence.load.seconds = 10.0;
        let device = evidence.device.as_mut().unwrap();
        device.in_flight *= 0.8;
        device.mean_ns = 0.91 * 4e5;
        evidence.bare = None;
    });
    named(&longer, "device", "nvme0n1");
}

#[test]
fn without_evidence_it_is_unknown() {
    let nothing = judge(&Evidence::default());
    assert_eq!(nothing.limiter, None);
    assert!(nothing.text.starts_with("unknown") && nothing.also.is_empty());
    // An idle device of other users says nothing about a load in memory.
    let device = Some(DeviceTime::default());
    let idle = judge(&Evidence {
        device,
        ..Evidence::default()
    });
    assert_eq!(idle.limiter, None);
}

#[test]
fn a_verdict_is_written_as_json_with_its_rule() {
    let json = serde_json::to_value(judge(&cell(32, 400.0))).unwrap();
    assert_eq!(json["limiter"]["rule"], "device");
    assert_eq!(json["limiter"]["subject"], "nvme0n1");
    let unique = [
        "device",
        "filter",
        "io-cap",
        "cpu-cap",
        "run-queue",
        "steal",
        "load-thread",
    ];
    assert_eq!(names()[..7], unique);
}
