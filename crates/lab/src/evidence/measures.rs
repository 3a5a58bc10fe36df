//! The figures that every cell has in addition to those of its experiment: what was busy, for how
//! long, and the cost of a request.

use fathom_run::evidence::{Evidence, ThreadRole};
use fathom_run::{Better, Measure, Unit};

/// Roles of threads whose cost is a separate figure.
const ROLES: [(ThreadRole, &str); 6] = [
    (ThreadRole::Vcpu, "cpu.vcpu"),
    (ThreadRole::Main, "cpu.main-loop"),
    (ThreadRole::Io, "cpu.io-threads"),
    (ThreadRole::Pool, "cpu.pool"),
    (ThreadRole::Load, "cpu.load"),
    (ThreadRole::Kernel, "cpu.kernel-threads"),
];

/// Converts evidence to figures. Missing evidence has no figure.
pub fn measures(evidence: &Evidence) -> Vec<Measure> {
    let mut measures = Vec::new();
    guest(evidence, &mut measures);
    host(evidence, &mut measures);
    counts(evidence, &mut measures);
    if let Some(device) = &evidence.device {
        let mut tell = |name: &str, unit, value| {
            measures.push(Measure::new(name, unit, value, Better::Neither));
        };
        tell("device.busy", Unit::Percent, device.utilisation);
        tell("device.in-flight", Unit::Count, device.in_flight);
        if device.requests > 0 {
            tell("device.latency", Unit::Nanoseconds, device.mean_ns);
        }
    }
    measures
}

fn guest(evidence: &Evidence, measures: &mut Vec<Measure>) {
    let Some(guest) = &evidence.guest else {
        return;
    };
    let mut percent = |name: String, value| {
        measures.push(Measure::new(name, Unit::Percent, value, Better::Lower));
    };
    for (number, busy) in guest.busy.iter().enumerate() {
        percent(format!("guest.vcpu{number}"), *busy);
    }
    let busy: f64 = guest.busy.iter().sum();
    percent("guest.busy".into(), busy);
    percent("guest.steal".into(), guest.steal.iter().sum());
    let megabytes = evidence.load.bytes as f64 / evidence.load_seconds() / 1e6;
    if megabytes > 0.0 && megabytes.is_finite() {
        let per = busy / megabytes;
        let (name, unit) = ("guest.busy-per-mb", Unit::PercentPerMegabyte);
        measures.push(Measure::new(name, unit, per, Better::Lower));
    }
}

fn host(evidence: &Evidence, measures: &mut Vec<Measure>) {
    let requests = evidence.load.requests;
    let mut cost = |name: &str, seconds: f64| {
        if requests > 0 && seconds > 0.0 {
            let micros = seconds * 1e6 / requests as f64;
            let unit = Unit::CpuMicrosecondsPerRequest;
            measures.push(Measure::new(name, unit, micros, Better::Lower).of(requests));
        }
    };
    for (role, name) in ROLES {
        let threads = evidence.threads.iter().filter(|one| one.role == role);
        cost(name, threads.map(|one| one.cpu).sum());
    }
    let Some(host) = &evidence.host else {
        return;
    };
    let busy: f64 = host.busy.iter().sum();
    cost("cpu.host", busy / 100.0 * evidence.seconds);
    let mean = busy / host.busy.len().max(1) as f64;
    measures.push(Measure::new(
        "host.busy",
        Unit::Percent,
        mean,
        Better::Lower,
    ));
}

/// Adds the counts per request.
fn counts(evidence: &Evidence, measures: &mut Vec<Measure>) {
    let requests = evidence.load.requests;
    if requests == 0 {
        return;
    }
    let seen = evidence.crossings.unwrap_or_default();
    let instructions = evidence.instructions.unwrap_or_default();
    let told = [
        ("kicks", seen.kicks),
        ("interrupts", seen.interrupts),
        ("exits", seen.exits),
        ("calls", seen.calls),
        ("instructions.guest", instructions.guest),
        ("instructions.server", instructions.server),
    ];
    measures.extend(told.into_iter().filter_map(|(name, count)| {
        let each = count? as f64 / requests as f64;
        Some(Measure::new(name, Unit::PerRequest, each, Better::Lower).of(requests))
    }));
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_run::evidence::{Crossings, DeviceTime, Instructions, Load, Processors, ThreadTime};

    fn value(measures: &[Measure], name: &str) -> f64 {
        let found = measures.iter().find(|measure| measure.name == name);
        found
            .unwrap_or_else(|| panic!("no {name}: {measures:?}"))
            .value
    }

    #[test]
    fn costs_are_per_request_and_the_talks_column_is_there() {
        let thread = |role, cpu| ThreadTime {
            role,
            cpu,
            ..ThreadTime::default()
        };
        let evidence = Evidence {
            seconds: 2.0,
            load: Load {
                requests: 1000,
                bytes: 8_000_000,
                ..Load::default()
            },
            guest: Some(Processors {
                busy: vec![60.0, 20.0],
                steal: vec![1.0, 2.0],
            }),
            host: Some(Processors {
                busy: vec![100.0, 50.0],
                steal: vec![0.0, 0.0],
            }),
            threads: vec![
                thread(ThreadRole::Io, 0.5),
                thread(ThreadRole::Io, 0.25),
                thread(ThreadRole::Vcpu, 1.5),
            ],
            device: Some(DeviceTime {
                requests: 1000,
                utilisation: 70.0,
                in_flight: 0.7,
                mean_ns: 1400.0,
                ..DeviceTime::default()
            }),
            crossings: Some(Crossings {
                interrupts: Some(500),
                ..Crossings::default()
            }),
            instructions: Some(Instructions {
                guest: None,
                server: Some(4_000_000),
            }),
            ..Evidence::default()
        };
        let measures = measures(&evidence);
        for (name, wanted) in [
            ("guest.vcpu1", 20.0),
            ("guest.busy", 80.0),
            ("guest.steal", 3.0),
            // 80 % at 4 MB/s.
            ("guest.busy-per-mb", 20.0),
            ("cpu.io-threads", 750.0),
            ("cpu.vcpu", 1500.0),
            // The sum of 1.5 CPUs for two seconds.
            ("cpu.host", 3000.0),
            ("host.busy", 75.0),
            ("device.busy", 70.0),
            ("device.latency", 1400.0),
            ("interrupts", 0.5),
            ("instructions.server", 4000.0),
        ] {
            let found = value(&measures, name);
            assert!((found - wanted).abs() < 1e-9, "{name}: {found}");
        }
        let is_unseen = |measure: &Measure| {
            ["cpu.load", "exits", "instructions.guest"].contains(&&*measure.name)
        };
        assert!(!measures.iter().any(is_unseen));
    }

    #[test]
    fn what_was_not_seen_is_not_told() {
        assert_eq!(measures(&Evidence::default()), []);
    }
}
