//! What limits a served disk is named, where it is built on purpose and where there is nothing: by
//! what is seen from outside of real servers and real loads. Server and load have a CPU each.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use fathom_lab::evidence::{Kind, Sampler, Watch, Watched};
use fathom_limiter::judge;
use fathom_run::evidence::{Evidence, Load};
use fathom_tests::{Place, fathom};
use serde_json::Value;

/// The load's ramp, and what a program needs to start.
const RAMP: Duration = Duration::from_millis(1500);
const WINDOW: Duration = Duration::from_secs(2);

/// What is seen, from its outside, of a disk of the server's memory under a load of `fathom bench`.
fn seen(load: &[&str]) -> Evidence {
    let place = Place::new();
    let args = ["--poll", "off", "--cpus", "0"];
    let mut server = place.serve("disk", Path::new("memory:64M"), &args);
    let mut bench = Command::new(fathom());
    bench
        .args(["bench", "--json", "--cpus", "1", "--vhost-user"])
        .arg(server.socket())
        .args(["--ramp-time", "1s", "--runtime", "4s", "--overwrite"])
        .args(load)
        .stdout(Stdio::piped());
    let bench = bench.spawn().unwrap();
    thread::sleep(RAMP);
    let processes = vec![
        Watched::new(server.process().pid(), Kind::Server),
        Watched::new(bench.id(), Kind::Load),
    ];
    let sampler = Sampler::start(Watch {
        processes,
        ..Watch::default()
    });
    thread::sleep(WINDOW);
    let (evidence, _) = sampler.unwrap().stop();
    let output = bench.wait_with_output().unwrap();
    assert!(output.status.success(), "fathom bench {load:?}");
    Evidence {
        load: told(&serde_json::from_slice(&output.stdout).unwrap()),
        ..evidence
    }
}

/// The load, as it says itself.
fn told(report: &Value) -> Load {
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{report}"));
    let seconds = number(&report["runtime"]);
    let operations = report["operations"].as_array().unwrap();
    let sum = |figure: &dyn Fn(&Value) -> f64| operations.iter().map(figure).sum::<f64>();
    let requests = sum(&|one| number(&one["ios"]));
    let spent = sum(&|one| number(&one["ios"]) * number(&one["latency"]["mean_ns"]));
    let cpu = number(&report["client_cpu_us_per_request"]) * requests / 1e6;
    Load {
        threads: 1,
        depth: number(&report["iodepth"]) as u32,
        requests: requests as u64,
        bytes: (number(&report["mb_per_s"]) * 1e6 * seconds) as u64,
        seconds,
        mean_ns: spent / requests,
        thread_cpu: vec![cpu],
        polls: false,
    }
}

/// Checks the verdict on a load. Where others use the two CPUs it may be that a thread waits for one,
/// or nothing certain; but of the same thread.
fn expect(load: &[&str], rule: &str, thread: &str) {
    let evidence = seen(load);
    let verdict = judge(&evidence);
    let said = format!("{verdict:#?}\n{evidence:#?}");
    match verdict.rule() {
        Some("run-queue") | None => assert!(verdict.text.contains(thread), "{said}"),
        other => assert_eq!(other, Some(rule), "{said}"),
    }
}

/// One after the other: they would be each other's limit.
#[test]
fn what_limits_a_served_disk_is_named() {
    // The worker copies each byte, and the load looks at none.
    let copies = ["--rw", "randread", "--bs", "256k", "--iodepth", "64"];
    expect(&copies, "thread", "I/O thread 'worker 0'");

    // Nothing is wrong: one request after the other takes its time.
    let alone = ["--rw", "randread", "--iodepth", "1"];
    expect(&alone, "latency", "");
}
