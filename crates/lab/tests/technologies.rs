//! The experiment `technologies`, small: the same work everywhere, and the limiter is named.

mod support;

use fathom_lab::instance::check_cpu;
use fathom_run::Cell;
use fathom_run::evidence::ThreadRole;
use support::value;

fn run(settings: &[(&str, &str)]) -> Vec<Cell> {
    let small = [("size", "16M"), ("runtime", "1s"), ("threads", "2")];
    support::run("technologies", &[&small, settings].concat())
}

/// Reads of the file in a container, of a loop device, and of a guest's disk all reach the same
/// device, and the evidence has the CPU time of the threads that do the work.
#[test]
fn all_do_the_same_work_on_the_same_device() {
    let uml = if check_cpu().is_ok() { ",uml" } else { "" };
    let technologies = format!("bare,container,container-device,tcg{uml}");
    let settings = [
        ("technology", &*technologies),
        ("test", "iops"),
        ("op", "read"),
    ];
    let cells = run(&settings);
    assert!(cells.len() >= 4);
    for cell in &cells {
        let settings = &cell.planned.settings;
        let evidence = cell.evidence.as_ref().unwrap();
        let load = &evidence.load;
        assert!(load.seconds > 0.9 && load.bytes == load.requests * 4096);
        let rate = value(cell, "throughput") * 1e6 / 4096.0;
        assert!((rate / value(cell, "iops") - 1.0).abs() < 0.02, "{cell:?}");
        assert!(value(cell, "cpu") > 0.0);
        let bare = evidence.bare.as_ref().unwrap();
        assert!(bare.requests_per_second > 0.0);
        let threads = &evidence.threads;
        let works = |role| threads.iter().any(|one| one.role == role && one.cpu > 0.0);
        let role = match settings["technology"].as_str() {
            "tcg" => ThreadRole::Vcpu,
            _ => ThreadRole::Load,
        };
        assert!(works(role), "{settings:?}: {threads:?}");
        if settings["technology"] == "bare" {
            let own = load.requests as f64 / load.seconds;
            assert!((bare.requests_per_second / own - 1.0).abs() < 1e-9);
        }
        // User-mode Linux reads through the page cache, which the cell reports as a problem.
        if let Some(device) = &evidence.device {
            let said = !cell.problems.is_empty();
            assert_eq!(said, value(cell, "cached") > 10.0, "{device:?}");
            assert!(!said || settings["technology"] == "uml", "{cell:?}");
        }
    }
}

#[test]
fn a_cap_is_what_limits_a_container_and_not_this_machine() {
    let settings = [
        ("technology", "bare,container"),
        ("test", "throughput"),
        ("op", "read"),
        ("cpus", "0.02"),
    ];
    let cells = run(&settings);
    let limiter = |technology: &str| {
        let mut cells = cells.iter();
        let cell = cells.find(|one| one.planned.settings["technology"] == technology);
        fathom_limiter::judge(cell.unwrap().evidence.as_ref().unwrap()).rule()
    };
    assert_eq!(limiter("container"), Some(fathom_limiter::CPU_CAP));
    assert_ne!(limiter("bare"), Some(fathom_limiter::CPU_CAP));
}
