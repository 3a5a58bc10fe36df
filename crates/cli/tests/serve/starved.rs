//! Checks a server that gets hardly any CPU time.

use crate::support::{Kept, Served, eventually, fathom};
use serde_json::Value;
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time for which the server gets hardly any CPU time.
const STARVED: Duration = Duration::from_secs(15);

/// Sets the scheduling policy and the CPUs of all threads of a process. Threads that they start
/// inherit both.
fn schedule(pid: u32, policy: libc::c_int, cpus: &libc::cpu_set_t) {
    for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let task = task.unwrap().file_name().into_string().unwrap();
        let task = task.parse().unwrap();
        let parameters = libc::sched_param { sched_priority: 0 };
        let size = size_of::<libc::cpu_set_t>();
        // SAFETY: both calls read what the references point to, and no more.
        let done = unsafe {
            libc::sched_setscheduler(task, policy, &parameters)
                + libc::sched_setaffinity(task, size, cpus)
        };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    }
}

/// Returns the CPUs that this process may use, and the first of them alone.
fn cpus() -> (libc::cpu_set_t, libc::cpu_set_t) {
    // SAFETY: sched_getaffinity(2) fills a set that is large enough, and the macros stay within it.
    unsafe {
        let [mut all, mut first]: [libc::cpu_set_t; 2] = std::mem::zeroed();
        let size = size_of::<libc::cpu_set_t>();
        assert_eq!(libc::sched_getaffinity(0, size, &mut all), 0);
        let cpu = (0..size * 8).find(|cpu| libc::CPU_ISSET(*cpu, &all));
        libc::CPU_SET(cpu.unwrap(), &mut first);
        (all, first)
    }
}

/// A thread that gets no CPU time may stay in the middle of a write to an eventfd for long. A write
/// that does not return does not mean that the eventfd is full.
#[test]
fn server_without_cpu_time_keeps_its_queues() {
    let served = Served::start("null:64M", &[]);
    let pid = served.child.id();
    let mut bench = fathom();
    let socket = served.arg("s");
    bench.args(["bench", "--vhost-user", &socket, "--rw", "randread"]);
    bench.args(["--bs", "4k", "--iodepth", "8", "--runtime", "20s", "--json"]);
    let bench = bench.stdout(Stdio::piped()).stderr(Stdio::piped());
    let bench = bench.spawn().unwrap();
    let answered = || {
        let stats = crate::support::stdout_of(&["stats", &served.api(), "--json"]);
        let stats: Value = serde_json::from_str(&stats).unwrap();
        stats["operations"]
            .as_array()
            .is_some_and(|all| !all.is_empty())
    };
    eventually("requests", || answered().then_some(()));
    let (all, first) = cpus();
    let hog = Command::new("sh")
        .args(["-c", "while :; do :; done"])
        .spawn();
    let hog = Kept(hog.unwrap());
    schedule(hog.0.id(), libc::SCHED_OTHER, &first);
    // On one CPU, a thread that a signal wakes runs before the thread that has sent the signal.
    schedule(bench.id(), libc::SCHED_OTHER, &first);
    schedule(pid, libc::SCHED_IDLE, &first);
    let end = Instant::now() + STARVED;
    std::thread::sleep(end.saturating_duration_since(Instant::now()));
    drop(hog);
    schedule(pid, libc::SCHED_OTHER, &all);
    let output = bench.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\nserver:\n{}", served.log());
    assert!(
        !served.log().contains("a queue is stopped"),
        "{}",
        served.log()
    );
}
