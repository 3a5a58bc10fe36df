//! Measures how fast a run is analysed. Writes a simulated run of a million requests (or as many as
//! given) and analyses it. Prints events and requests per second, and the peak memory.
//!
//! `cargo run --release -p fathom-report --example analyse [REQUESTS [DEPTH]]`

#[path = "../tests/support/mod.rs"]
#[allow(dead_code, reason = "tests need more of it")]
mod support;

use std::time::Instant;

use fathom_report::{Options, analyse};
use support::sim::Plan;
use support::{Simulated, Watches};

fn main() {
    let number = |n: usize, default: u64| {
        let arg = std::env::args().nth(n);
        arg.map_or(default, |arg| arg.parse().expect("a number"))
    };
    let (requests, depth) = (number(1, 1_000_000), number(2, 32));
    let directory = std::env::args().nth(3);
    if let Some(directory) = directory {
        measure(directory.as_ref(), requests);
        return;
    }
    let simulated = Simulated::new(Plan::new(1, depth, requests), Watches::default());
    let events: usize = simulated
        .files
        .iter()
        .map(|(_, _, events)| events.len())
        .sum();
    // Analyse in a separate process, so that the simulation's memory is not measured.
    let mut again = std::process::Command::new(std::env::current_exe().expect("this program"));
    again.args([requests.to_string(), depth.to_string()]);
    again.arg(simulated.dir.path());
    again.env("EVENTS", events.to_string());
    let status = again.status().expect("this program runs");
    assert!(status.success());
}

fn measure(directory: &std::path::Path, requests: u64) {
    let events: f64 = std::env::var("EVENTS").map_or(0.0, |n| n.parse().expect("a number"));
    let start = Instant::now();
    let analysis = analyse(directory, &Options::default()).expect("a run directory");
    let seconds = start.elapsed().as_secs_f64();
    let exact = analysis.exact.expect("a breakdown");
    println!(
        "{requests} requests, {events} events in {seconds:.2} s: {:.0} requests/s, {:.0} events/s",
        requests as f64 / seconds,
        events / seconds
    );
    println!(
        "joined {}, peak of memory {} KiB",
        exact.truth.joined,
        peak_kib()
    );
}

fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let words = line.and_then(|line| line.split_whitespace().nth(1));
    words.and_then(|word| word.parse().ok()).unwrap_or(0)
}
