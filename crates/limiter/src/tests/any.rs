//! Tests with arbitrary evidence.

use fathom_run::evidence::{
    Bare, DeviceTime, Evidence, Held, IoLimit, IoLimitKind, Layer, Load, LockWait, Pressure,
    Processors, ThreadRole, ThreadTime, Throttling,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::{judge, names};

/// Mostly values that fit into a window, so that rules sometimes hold.
fn figure() -> impl Strategy<Value = f64> {
    let odd = [
        0.0,
        -0.0,
        f64::NAN,
        f64::INFINITY,
        f64::MIN_POSITIVE,
        f64::MAX,
        -1.0,
    ];
    prop_oneof![4 => 0.0..12.0, 2 => any::<f64>(), 1 => proptest::sample::select(odd.to_vec())]
}

fn count() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 0..1000u64, 1 => any::<u64>()]
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![Just("throttle".to_owned()), any::<String>()]
}

fn role() -> impl Strategy<Value = ThreadRole> {
    use ThreadRole::{Io, Kernel, Main, Other, Pool, Vcpu};
    proptest::sample::select(vec![Vcpu, Main, Io, Pool, ThreadRole::Load, Kernel, Other])
}

prop_compose! {
    fn load()(
        threads in any::<u32>(), depth in any::<u32>(), small in any::<bool>(),
        requests in count(), bytes in count(), seconds in figure(), mean_ns in figure(),
        thread_cpu in vec(figure(), 0..4), polls in any::<bool>(),
    ) -> Load {
        let (threads, depth) = if small { (threads % 3, depth % 3) } else { (threads, depth) };
        Load { threads, depth, requests, bytes, seconds, mean_ns, thread_cpu, polls }
    }
}

prop_compose! {
    fn processors()(busy in vec(figure(), 0..3), steal in vec(figure(), 0..3)) -> Processors {
        Processors { busy, steal }
    }
}

prop_compose! {
    fn thread()(
        name in text(), role in role(), vcpu in any::<Option<u32>>(), cpu in figure(),
        waiting in proptest::option::of(figure()), polls in any::<bool>(),
        polled in proptest::option::of(figure()),
    ) -> ThreadTime {
        let vcpu = vcpu.map(|vcpu| vcpu % 4);
        ThreadTime { pid: 1, tid: 1, name, role, vcpu, cpu, waiting, polls, polled }
    }
}

prop_compose! {
    fn device()(
        name in text(), requests in count(), bytes in count(), utilisation in figure(),
        in_flight in figure(), mean_ns in figure(),
        queue in any::<Option<u32>>(), queues in any::<Option<u32>>(),
        own_bytes in proptest::option::of(count()),
    ) -> DeviceTime {
        DeviceTime {
            name, requests, bytes, utilisation, in_flight, mean_ns, queue, queues, own_bytes,
        }
    }
}

prop_compose! {
    fn io_limit()(
        group in text(), device in text(), allowed in figure(), used in count(),
        kind in proptest::sample::select(vec![IoLimitKind::Reads, IoLimitKind::WriteBytes]),
    ) -> IoLimit {
        IoLimit { group, device, kind, allowed, used }
    }
}

prop_compose! {
    fn limits()(
        group in text(), periods in count(), throttled in count(), seconds in figure(),
        cpu in figure(), io in figure(), memory in figure(),
        requests_per_second in figure(), bytes_per_second in figure(), mean_ns in figure(),
    ) -> (Throttling, Pressure, Bare) {
        (
            Throttling { group, periods, throttled, seconds },
            Pressure { cpu, io, memory },
            Bare { requests_per_second, bytes_per_second, mean_ns },
        )
    }
}

prop_compose! {
    fn evidence()(
        seconds in figure(), load in load(),
        host in proptest::option::of(processors()), guest in proptest::option::of(processors()),
        threads in vec(thread(), 0..4), device in proptest::option::of(device()),
        limits in limits(), seen in any::<[bool; 3]>(),
        io_limit in proptest::option::of(io_limit()),
        filters in vec((text(), figure()), 0..3), layers in vec((text(), figure()), 0..3),
        locks in vec((text(), figure()), 0..3),
    ) -> Evidence {
        let (cgroup, pressure, bare) = limits;
        let held = |(filter, mean_ns)| Held { filter, requests: 1, mean_ns };
        let layer = |(name, mean_ns)| Layer { name, mean_ns };
        let lock = |(name, seconds)| LockWait { name, side: "host".into(), waits: 1, seconds };
        Evidence {
            seconds, load, host, guest, threads, device, io_limit,
            cgroup: Some(cgroup).filter(|_| seen[0]),
            pressure: Some(pressure).filter(|_| seen[1]),
            bare: Some(bare).filter(|_| seen[2]),
            filters: filters.into_iter().map(held).collect(),
            layers: layers.into_iter().map(layer).collect(),
            locks: locks.into_iter().map(lock).collect(),
            crossings: None,
            instructions: None,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]
    #[test]
    fn any_evidence_has_a_verdict_of_one_line(evidence in evidence()) {
        let verdict = judge(&evidence);
        prop_assert_eq!(verdict.limiter.is_none(), verdict.text.starts_with("unknown"));
        if let Some(rule) = verdict.rule() {
            prop_assert!(names().contains(&rule));
        }
        for line in verdict.also.iter().chain([&verdict.text]) {
            prop_assert!(!line.is_empty() && line.chars().count() < 500, "{}", line);
            prop_assert!(!line.chars().any(char::is_control), "{:?}", line);
        }
        prop_assert_eq!(judge(&evidence), verdict);
    }
}
