//! Tests how many system calls a request costs, in all threads of the server together.

mod support;

use fathom_formats::Format;
use std::process::Command;
use support::nbd::Nbd;
use support::{Served, as_arg, convert, disk_dir, fathom, short_dir, stdout_of};

/// Returns a command that runs the server under strace(1), which counts the calls.
fn traced(report: &str) -> Command {
    let program = fathom();
    let mut strace = Command::new("strace");
    strace.args(["-f", "-c", "-U", "calls,name", "-o", report]);
    strace.arg(program.get_program());
    strace.env_remove("FATHOM_LOG").env_remove("NOTIFY_SOCKET");
    strace
}

const RANDOM_READS: [&str; 4] = ["--rw", "randread", "--iodepth", "32"];

/// Checks the system calls per request, without those at the start and the end.
///
/// The best of a few rounds counts, because the device and the load of the machine decide how many
/// requests complete together.
fn check(disk: &str, args: &[&str], at_most: f64) {
    at_most_per_request(at_most, |report, requests| {
        let mut served = Served::start_by(traced(report), disk, args);
        served.load(requests, &RANDOM_READS);
        stop(&mut served);
    });
}

/// Like [`check`], over NBD.
fn check_nbd(disk: &str, args: &[&str], at_most: f64) {
    at_most_per_request(at_most, |report, requests| {
        let mut served = Nbd::start_by(traced(report), disk, args);
        served.load(requests, &RANDOM_READS);
        stop(&mut served);
    });
}

fn stop(served: &mut Served) {
    stdout_of(&["quit", &served.api()]);
    assert_eq!(served.end().0, Some(0), "{}", served.log());
}

/// Checks the calls per request. `run` sends a number of requests to a server under strace.
fn at_most_per_request(at_most: f64, run: impl Fn(&str, u64)) {
    let mut rounds = Vec::new();
    for _ in 0..5 {
        let (calls, report) = per_request(&run);
        if calls <= at_most {
            return;
        }
        rounds.push(format!("{calls} per request\n{report}"));
    }
    panic!("more than {at_most}: {}", rounds.join("\n"));
}

fn per_request(run: impl Fn(&str, u64)) -> (f64, String) {
    const REQUESTS: u64 = 100_000;
    let dir = short_dir();
    let report = as_arg(&dir.path().join("report"));
    let count = |requests| {
        run(&report, requests);
        let text = std::fs::read_to_string(&report).unwrap();
        (total(&text), text)
    };
    let (idle, _) = count(1);
    let (busy, text) = count(REQUESTS + 1);
    ((busy - idle) / REQUESTS as f64, text)
}

/// Returns the total in strace's last line.
fn total(report: &str) -> f64 {
    let line = report
        .lines()
        .find(|line| line.trim_end().ends_with("total"));
    let line = line.unwrap_or_else(|| panic!("no total: {report}"));
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn a_null_disk_makes_a_tenth_of_a_system_call_at_most() {
    check("null:1T", &[], 0.1);
}

/// Recording a request takes only a few stores to memory.
#[test]
fn a_trace_makes_no_system_calls() {
    let dir = short_dir();
    let trace = as_arg(&dir.path().join("trace"));
    check("null:1T", &["--trace", &trace], 0.1);
}

/// A batch of 32 takes three calls to submit (the device gets a head start), two to reap, and one
/// to notify. A wake-up brings 20 completions at most. The sum is a fifth of a call for each
/// request.
///
/// On a busy machine batches are smaller, and a quarter was seen. Calls for single requests would
/// make more than one. Allocated data of an image costs the same as raw.
///
/// All cases are in a single test: two tests at a time would leave the servers no CPU to find
/// requests together.
#[test]
fn a_file_makes_half_a_system_call_at_most() {
    let dir = disk_dir();
    let raw = dir.path().join("disk.img");
    std::fs::write(&raw, vec![0xa5; 16 << 20]).unwrap();
    let args = ["--cache", "none", "--aio", "io_uring"];
    check(&as_arg(&raw), &args, 0.5);
    for format in [Format::Qcow2, Format::Qed] {
        let image = dir.path().join(format.name());
        convert(&raw, format, &image);
        check(&as_arg(&image), &["--format", format.name()], 0.5);
    }
}

/// A single call submits the data to send and the buffers to receive into, and returns the data
/// that has arrived.
#[test]
fn a_connection_makes_a_system_call_for_a_request_at_most() {
    check_nbd("memory:64M", &[], 1.0);
}
