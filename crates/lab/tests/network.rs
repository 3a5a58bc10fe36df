//! The experiment `network`, small: what goes through between programs, containers and guests.

mod support;

use fathom_run::Cell;
use fathom_run::evidence::ThreadRole;
use support::value;

fn run(settings: &[(&str, &str)]) -> Vec<Cell> {
    support::run("network", settings)
}

/// Runs the experiment for this number of seconds. Repeats it with a longer time if a side's CPU
/// time is less than one tick of the clock of CPU time.
fn run_until_both_work(settings: &[(&str, &str)], seconds: u32) -> (Vec<Cell>, f64) {
    let mut runtime = seconds;
    loop {
        let text = format!("{runtime}s");
        let cells = run(&[settings, &[("runtime", &text)]].concat());
        let have_worked = cells
            .iter()
            .all(|cell| costs(cell).iter().all(|cpu| *cpu > 0.0));
        if have_worked || runtime >= 16 * seconds {
            return (cells, f64::from(runtime));
        }
        runtime *= 4;
    }
}

/// Returns the CPU time of the sender and of the receiver, per gigabyte or packet.
fn costs(cell: &Cell) -> [f64; 2] {
    let unit = match cell.planned.settings["test"].as_str() {
        "throughput" => "cpu-per-gb",
        _ => "cpu-per-packet",
    };
    ["sender", "receiver"].map(|side| value(cell, &format!("{side}.{unit}")))
}

/// The rate says how much went through, and both sides have worked for it.
fn is_plausible(cell: &Cell, runtime: f64) {
    let settings = &cell.planned.settings;
    let load = &cell.evidence.as_ref().unwrap().load;
    let (name, rate) = match settings["test"].as_str() {
        "throughput" => ("throughput", 1e6),
        _ => ("packets", 64.0),
    };
    let bytes = value(cell, name) * rate * load.seconds;
    assert!((bytes / load.bytes as f64 - 1.0).abs() < 1e-6, "{cell:?}");
    // Emulated, a second may be longer; it is never shorter.
    assert!(load.seconds > runtime * 0.9, "{settings:?}: {load:?}");
    let costs = costs(cell);
    assert!(
        costs.iter().all(|cpu| *cpu > 0.0),
        "{settings:?}: {costs:?}"
    );
}

#[test]
fn programs_and_containers_reach_each_other() {
    let settings = [("technology", "bare,container"), ("threads", "1,2")];
    let (cells, runtime) = run_until_both_work(&settings, 1);
    assert_eq!(cells.len(), 8);
    for cell in &cells {
        is_plausible(cell, runtime);
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
            ("net", net),
        ];
        let (cells, runtime) = run_until_both_work(&settings, 2);
        is_plausible(&cells[0], runtime);
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
