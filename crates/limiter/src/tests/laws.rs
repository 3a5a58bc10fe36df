//! Laws of the rules, tested with evidence that a machine could show.

use fathom_run::evidence::{
    Evidence, Held, IoLimit, IoLimitKind, Layer, LockWait, Pressure, Processors, ThreadRole,
    Throttling,
};
use proptest::collection::vec;
use proptest::prelude::*;

use super::{cell, thread, with};
use crate::device_part::{device_in_flight, device_share};
use crate::figures::load_in_flight;
use crate::rule::{Find, Finding};
use crate::rules::{
    RULES, cpu_cap, filter, io_cap, latency, load, lock, neighbour, pressure, run_queue, steal,
};
use crate::slices::{Side, Waiting, slices, unseen};
use crate::{Verdict, judge};

/// A number of seconds in the window of ten, or a share in tenths.
fn tenths() -> impl Strategy<Value = f64> {
    prop_oneof![3 => 0.0..10.0, 1 => 9.4..10.0, 1 => Just(0.0)]
}

prop_compose! {
    /// Threads of a guest and its server, and a load that may be known only from its disk.
    fn busy()(
        depth in 1u32..64, us in 20.0..20_000.0, kept in 0.0..1.0, part in 0.5..1.0,
        cpu in vec(tenths(), 4), waiting in vec(tenths(), 4), polls in any::<bool>(),
        polled in proptest::option::of(0.0..1.0), host in tenths(), guest in tenths(),
        steal in vec(tenths(), 2), known in any::<[bool; 3]>(),
    ) -> Evidence {
        with(cell(depth, us), |evidence| {
            let load = &mut evidence.load;
            load.requests = (load.requests as f64 * kept * part) as u64;
            load.bytes = load.requests * 4096;
            load.seconds = 10.0 * part;
            load.thread_cpu = vec![cpu[3] * part];
            load.threads = u32::from(known[0]);
            load.depth *= load.threads;
            evidence.threads.push(thread("kcryptd", ThreadRole::Kernel, 0.0));
            for (number, thread) in evidence.threads.iter_mut().enumerate() {
                thread.cpu = cpu[number];
                thread.waiting = Some((10.0 - cpu[number]) * waiting[number] / 10.0);
            }
            let worker = &mut evidence.threads[1];
            (worker.polls, worker.polled) = (polls, polled.map(|it| it * worker.cpu));
            let machine = |busy: f64, steal: f64| Processors {
                busy: vec![busy * 10.0; 2],
                steal: vec![(10.0 - busy) * steal; 2],
            };
            evidence.host = Some(machine(host, steal[0])).filter(|_| known[1]);
            evidence.guest = Some(machine(guest, steal[1])).filter(|_| known[2]);
        })
    }
}

prop_compose! {
    fn plausible()(
        evidence in busy(), reached in 0.0..3.0, size in 0.1..40.0, mean in 0.0..2.0,
        layers in vec(0.0..1.0, 3), filter in 0.0..1.2, throttled in 0u64..100, held in 0.0..8.0,
        memory in 0.0..30.0, locked in 0.0..1.5, own in 0.0..1.2, capped in 0.0..1.2,
        seen in any::<[bool; 8]>(),
        name in proptest::sample::select(vec!["throttle", "delay"]),
    ) -> Evidence {
        with(evidence, |evidence| {
            let load = evidence.load.clone();
            let device = evidence.device.as_mut().unwrap();
            device.bytes = (load.bytes as f64 * reached) as u64;
            device.requests = (load.requests as f64 * reached / size) as u64;
            device.mean_ns = load.mean_ns * mean;
            device.in_flight = device.requests as f64 * device.mean_ns / 1e10;
            device.own_bytes = seen[6].then_some((device.bytes as f64 * own) as u64);
            evidence.device = evidence.device.take().filter(|_| seen[0]);
            let used = (capped * 300.0 * evidence.load_seconds()) as u64;
            let (group, device, kind) = ("/vm1".into(), "sdb".into(), IoLimitKind::Reads);
            let limit = IoLimit { group, device, kind, allowed: 300.0, used };
            evidence.io_limit = seen[7].then_some(limit);
            let sum = layers.iter().sum::<f64>().max(1e-9);
            let names = ["guest, KVM and QEMU", "fathom: queue", "host: device"];
            let layer = |(name, part): (&str, &f64)| Layer {
                name: name.into(),
                mean_ns: load.mean_ns * part / sum,
            };
            let all = names.into_iter().zip(&layers).map(layer);
            evidence.layers = all.filter(|_| seen[1]).collect();
            let mean_ns = filter * load.mean_ns;
            let held_by = Held { filter: name.into(), requests: 1, mean_ns };
            evidence.filters = seen[2].then_some(held_by).into_iter().collect();
            let group = "/vm1".into();
            let cap = Throttling { group, periods: 100, throttled, seconds: held };
            evidence.cgroup = Some(cap).filter(|_| seen[3]);
            let pressure = Pressure { cpu: 0.0, io: 0.0, memory };
            evidence.pressure = Some(pressure).filter(|_| seen[4]);
            let seconds = load.requests as f64 * load.mean_ns / 1e9 * locked;
            let lock = LockWait { name: "mutex".into(), side: "host".into(), waits: 1, seconds };
            evidence.locks = seen[5].then_some(lock).into_iter().collect();
        })
    }
}

/// Multiplies all times by a factor, a power of two, which changes no digit of them.
fn slower(mut evidence: Evidence, factor: f64) -> Evidence {
    evidence.seconds *= factor;
    let load = &mut evidence.load;
    load.seconds *= factor;
    load.mean_ns *= factor;
    load.thread_cpu.iter_mut().for_each(|cpu| *cpu *= factor);
    for thread in &mut evidence.threads {
        thread.cpu *= factor;
        thread.waiting = thread.waiting.map(|it| it * factor);
        thread.polled = thread.polled.map(|it| it * factor);
    }
    if let Some(cap) = &mut evidence.cgroup {
        cap.seconds *= factor;
    }
    if let Some(limit) = &mut evidence.io_limit {
        limit.allowed /= factor;
    }
    if let Some(device) = &mut evidence.device {
        device.mean_ns *= factor;
    }
    if let Some(bare) = &mut evidence.bare {
        bare.mean_ns *= factor;
        bare.requests_per_second /= factor;
        bare.bytes_per_second /= factor;
    }
    let filters = evidence.filters.iter_mut().map(|one| &mut one.mean_ns);
    let layers = evidence.layers.iter_mut().map(|one| &mut one.mean_ns);
    let locks = evidence.locks.iter_mut().map(|one| &mut one.seconds);
    filters
        .chain(layers)
        .chain(locks)
        .for_each(|it| *it *= factor);
    evidence
}

/// Returns all percentages of a text, except the ratio to the bare device, which may be faster.
fn percentages(text: &str) -> Vec<f64> {
    let shares = text.split('%').zip(text.split('%').skip(1));
    let shares = shares.filter(|(_, after)| !after.starts_with(" of the bare device's rate"));
    let digits = |before: &str| {
        let start = before.rfind(|c: char| !c.is_ascii_digit() && c != '.');
        before[start.map_or(0, |at| at + 1)..].parse().unwrap()
    };
    shares.map(|(before, _)| digits(before)).collect()
}

pub fn lines(verdict: &Verdict) -> impl Iterator<Item = &String> {
    verdict.also.iter().chain([&verdict.text])
}

fn holds(find: Find, evidence: &Evidence) -> bool {
    find(evidence).is_some_and(|finding: Finding| finding.holds())
}

/// Checks that a rule which holds still holds if there is more of what it is about.
fn keeps(
    evidence: &Evidence,
    finds: &[Find],
    more: impl FnOnce(&mut Evidence),
) -> Result<(), TestCaseError> {
    let is_held = |evidence: &Evidence| finds.iter().any(|&find| holds(find, evidence));
    let more = with(evidence.clone(), more);
    prop_assert!(!is_held(evidence) || is_held(&more), "{:#?}", judge(&more));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn no_share_is_above_100_percent(evidence in plausible()) {
        let verdict = judge(&evidence);
        for line in lines(&verdict) {
            prop_assert!(percentages(line).iter().all(|&it| it <= 100.0), "{}", line);
        }
        prop_assert!(device_share(&evidence).is_none_or(|it| (0.0..=1.0).contains(&it)));
        prop_assert!((0.0..=1.0).contains(&unseen(&slices(&evidence))));
    }

    #[test]
    fn no_more_is_in_the_device_than_in_flight(evidence in plausible()) {
        if let (Some(device), Some(load)) = (device_in_flight(&evidence), load_in_flight(&evidence)) {
            prop_assert!(device <= load, "{} of {}", device, load);
        }
    }

    #[test]
    fn the_unit_of_time_changes_no_limiter(evidence in plausible(), power in -3i32..8) {
        let other = judge(&slower(evidence.clone(), 2.0_f64.powi(power)));
        prop_assert_eq!(judge(&evidence).limiter, other.limiter);
    }

    #[test]
    fn every_rule_is_invariant_under_time_scaling(evidence in plausible(), power in -3i32..8) {
        let slower = slower(evidence.clone(), 2.0_f64.powi(power));
        for rule in RULES {
            let (one, other) = ((rule.find)(&evidence), (rule.find)(&slower));
            let state = |it: &Option<Finding>| it.as_ref().map(|it| it.strength);
            prop_assert_eq!(state(&one), state(&other), "{}", rule.name);
        }
    }

    #[test]
    fn a_slower_device_has_no_smaller_share(evidence in plausible(), more in 1.0..1.5) {
        let slower = with(evidence.clone(), |evidence| {
            if let Some(device) = &mut evidence.device {
                device.mean_ns *= more;
            }
        });
        if let (Some(before), Some(after)) = (device_share(&evidence), device_share(&slower)) {
            prop_assert!(after >= before, "{} after {}", after, before);
        }
    }

    #[test]
    fn longer_waits_take_no_smaller_share(evidence in plausible(), waits in vec(0.0..0.5, 3)) {
        for side in [Side::Guest, Side::Server, Side::Both] {
            let longer: Vec<f64> = waits.iter().map(|it| it * 1.5).collect();
            let of = |waits: &[f64]| Waiting::of(&evidence, side, waits);
            if let (Some(before), Some(after)) = (of(&waits), of(&longer)) {
                prop_assert!(after.most >= before.most && after.most <= 1.0);
                prop_assert!(after.is_largest || !before.is_largest);
                prop_assert!(after.explains || !before.explains);
            }
        }
    }

    #[test]
    fn more_of_a_limit_is_still_the_limit(evidence in plausible(), more in 1.0..2.0) {
        let times = |value: &mut f64, most: f64| {
            *value = f64::min(*value * more, f64::max(most, *value));
        };
        keeps(&evidence, &[filter::holds_requests], |evidence| {
            evidence.filters.iter_mut().for_each(|one| times(&mut one.mean_ns, f64::MAX));
        })?;
        keeps(&evidence, &[cpu_cap::throttled], |evidence| {
            evidence.cgroup.iter_mut().for_each(|cap| times(&mut cap.seconds, f64::MAX));
        })?;
        keeps(&evidence, &[io_cap::used], |evidence| {
            evidence.io_limit.iter_mut().for_each(|it| it.used = (it.used as f64 * more) as u64);
        })?;
        keeps(&evidence, &[neighbour::uses_device], |evidence| {
            evidence.device.iter_mut().for_each(|it| times(&mut it.utilisation, 100.0));
        })?;
        keeps(&evidence, &[pressure::high], |evidence| {
            evidence.pressure.iter_mut().for_each(|it| times(&mut it.memory, 100.0));
        })?;
        let spent = evidence.load.requests as f64 * evidence.load.mean_ns / 1e9;
        keeps(&evidence, &[lock::waited_for], |evidence| {
            evidence.locks.iter_mut().for_each(|one| times(&mut one.seconds, spent));
        })?;
        keeps(&evidence, &[load::saturated], |evidence| {
            let most = evidence.load_seconds();
            evidence.load.thread_cpu.iter_mut().for_each(|it| times(it, most));
        })?;
        keeps(&evidence, &[steal::starved, steal::delayed], |evidence| {
            let machines = evidence.guest.iter_mut().chain(&mut evidence.host);
            for machine in machines {
                for (steal, busy) in machine.steal.iter_mut().zip(&machine.busy) {
                    times(steal, 100.0 - busy);
                }
            }
        })?;
        keeps(&evidence, &[run_queue::starved, run_queue::delayed], |evidence| {
            for thread in &mut evidence.threads {
                let most = evidence.seconds - thread.cpu;
                thread.waiting.iter_mut().for_each(|waits| times(waits, most));
            }
        })?;
    }

    #[test]
    fn latency_with_nothing_busy_is_only_said_where_nothing_is(evidence in plausible()) {
        let text = latency::bound(&evidence).map_or(String::new(), |finding| finding.text);
        if text.contains("nothing busy") {
            let host = evidence.host.iter().map(|host| host.busy.iter().sum::<f64>());
            let polled: f64 = evidence.threads.iter().filter_map(|one| one.polled).sum();
            prop_assert!(host.map(|busy| busy / 10.0 - polled).all(|busy| busy < 16.0));
            let guest = evidence.guest.iter().flat_map(|guest| &guest.busy);
            prop_assert!(guest.into_iter().all(|&busy| busy < 80.0));
        }
    }
}
