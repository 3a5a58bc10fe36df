//! The experiment `network`, small: what goes through between programs, containers and guests.

mod support;

use fathom_run::Cell;
use fathom_run::evidence::ThreadRole;
use support::value;

fn run(settings: &[(&str, &str)]) -> Vec<Cell> {
    support::run("network", settings)
}

/// The rate says how much went through, and both sides have worked for it.
fn is_plausible(cell: &Cell, runtime: f64) {
    let settings = &cell.planned.settings;
    let load = &cell.evidence.as_ref().unwrap().load;
    let (name, rate, sides) = match settings["test"].as_str() {
        "throughput" => ("throughput", 1e6, "cpu-per-gb"),
        _ => ("packets", 64.0, "cpu-per-packet"),
    };
    let bytes = value(cell, name) * rate * load.seconds;
    assert!((bytes / load.bytes as f64 - 1.0).abs() < 1e-6, "{cell:?}");
    // Emulated, a second may be longer; it is never shorter.
    assert!(load.seconds > runtime * 0.9, "{settings:?}: {load:?}");
    for side in ["sender", "receiver"] {
        let cpu = value(cell, &format!("{side}.{sides}"));
        assert!(cpu > 0.0, "{settings:?}: {side} {cpu}");
    }
}

#[test]
fn programs_and_containers_reach_each_other() {
    let settings = [
        ("technology", "bare,container"),
        ("threads", "1,2"),
        ("runtime", "1s"),
    ];
    let cells = run(&settings);
    assert_eq!(cells.len(), 8);
    for cell in &cells {
        is_plausible(cell, 1.0);
        // iperf3 itself is seen on both sides.
        let evidence = cell.evidence.as_ref().unwrap();
        let works = |role| {
            let mut threads = evidence.threads.iter().filter(|one| one.role == role);
            threads.any(|one| one.name == "iperf3" && one.cpu > 0.0)
        };
        assert!(
            works(ThreadRole::Load) && works(ThreadRole::Main),
            "{evidence:?}"
        );
        assert_eq!(
            evidence.load.threads.to_string(),
            cell.planned.settings["threads"]
        );
    }
}

#[test]
fn a_container_is_held_to_its_limit() {
    let settings = [
        ("technology", "container"),
        ("test", "throughput"),
        ("threads", "1"),
        ("runtime", "1s"),
        ("cpus", "0.2"),
        ("memory", "1G"),
    ];
    let cells = run(&settings);
    let evidence = cells[0].evidence.as_ref().unwrap();
    let limiter = fathom_limiter::judge(evidence).limiter.unwrap();
    assert_eq!(limiter.rule, fathom_limiter::CPU_CAP, "{evidence:?}");
}

#[test]
fn guests_reach_each_other_and_count_their_own_cpus() {
    for net in ["tap", "user"] {
        let settings = [
            ("technology", "tcg"),
            ("test", "throughput"),
            ("threads", "1"),
            ("runtime", "2s"),
            ("net", net),
        ];
        let cells = run(&settings);
        is_plausible(&cells[0], 2.0);
        let evidence = cells[0].evidence.as_ref().unwrap();
        let guests = if net == "tap" { 2 } else { 1 };
        assert_eq!(evidence.guest.as_ref().unwrap().busy.len(), guests);
        let vcpus = { evidence.threads.iter() }.filter_map(|one| one.vcpu);
        let mut vcpus: Vec<u32> = vcpus.collect();
        vcpus.sort_unstable();
        assert_eq!(vcpus, Vec::from_iter(0..guests as u32));
        assert!(evidence.crossings.unwrap().interrupts.unwrap() > 0);
    }
}
