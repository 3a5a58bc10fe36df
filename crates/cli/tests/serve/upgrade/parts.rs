//! Checks that an upgrade hands over the state of a disk's parts: memory, overlays, filters,
//! traces, logs.

use super::{BLOCK, Chain, SIZE, StopAtEnd, block, fails_late, image, load, speaks};
use crate::driver::{Request, with_disk};
use crate::support::{as_arg, disk_dir, eventually, fathom, stdout_of};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

/// Upgrades the server, and changes options in the same process, under a load that checks what it
/// reads. Some upgrades fail late. Returns the number of the load's rounds.
fn rounds_of_load(chain: &mut Chain, steps: usize) -> u64 {
    let socket = chain.server.arg("s");
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let dir = disk_dir();
    let late = fails_late(dir.path());
    let mut pauses = Vec::new();
    thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        let load = scope.spawn(|| load(&socket, 2, &stop, &rounds));
        for step in 0..steps {
            let before = rounds.load(SeqCst);
            eventually("progress", || {
                assert!(!load.is_finished());
                (rounds.load(SeqCst) > before).then_some(())
            });
            match step % 4 {
                1 => chain.refused(&["--binary", &late], "locked"),
                3 => {
                    let threads = format!("iothreads={}", 1 + step / 4 % 2);
                    stdout_of(&["disk", "change", &chain.server.api(), &threads]);
                }
                _ => pauses.push(chain.upgrade(&[])["pause_ms"].as_f64().unwrap()),
            }
        }
    });
    eprintln!("{pauses:.1?} ms");
    let log = chain.server.log();
    assert_eq!(log.matches("front-end connected").count(), 1, "{log}");
    let is_bad = |line: &&str| line.contains("ERROR") || line.contains("WARN");
    let mut bad = log.lines().filter(is_bad);
    assert!(bad.all(|line| line.contains("locked")), "{log}");
    rounds.load(SeqCst)
}

/// Checks that the disk has the data of the last round, and zeroes elsewhere.
fn check_contents(chain: &Chain, rounds: u64) {
    with_disk(&chain.server.arg("s"), 1, |disk| {
        let contents = disk.contents();
        for at in (0..SIZE).step_by(BLOCK) {
            let found = &contents[at as usize..at as usize + BLOCK];
            let is_written = at % (BLOCK as u64 * 4) == 0;
            let expected = if is_written {
                block(at, rounds)
            } else {
                vec![0; BLOCK]
            };
            assert!(found == expected, "{at}");
        }
    });
}

#[test]
fn memory_goes_along() {
    let mut chain = Chain::start("memory:4M", &["--iothreads", "2"]);
    // The disk now has two pieces of memory.
    stdout_of(&["disk", "resize", &chain.server.api(), "8M"]);
    let rounds = rounds_of_load(&mut chain, 12);
    check_contents(&chain, rounds);
    let read = || with_disk(&chain.server.arg("s"), 1, |disk| disk.contents());
    let before = read();
    // A successor that does not know about such memory must not take over.
    let dir = disk_dir();
    let hello = "say({'oldest': 1, 'newest': 1})\nhear()\n";
    let old = speaks(dir.path(), "old", hello);
    chain.refused(&["--binary", &old], "by version 2");
    assert!(read() == before);
    chain.quit();
}

#[test]
fn an_overlay_goes_along() {
    for format in ["raw", "qcow2"] {
        let dir = disk_dir();
        let image = image(dir.path(), format);
        let before = fs::read(&image).unwrap();
        let filter = format!("cow:dir={}", dir.path().display());
        let args = ["--format", format, "--filter", &filter, "--iothreads", "2"];
        let mut chain = Chain::start(&image, &args);
        let rounds = rounds_of_load(&mut chain, 9);
        check_contents(&chain, rounds);
        let without = ["disk", "change", &chain.server.api(), "filters="];
        let refusal = crate::support::run(&without);
        let said = String::from_utf8_lossy(&refusal.stderr).into_owned();
        assert!(
            !refusal.status.success() && said.contains("overlay would be lost"),
            "{said}"
        );
        check_contents(&chain, rounds);
        chain.quit();
        assert!(fs::read(&image).unwrap() == before, "the image has changed");
    }
}

/// A load that is not too fast for the log and for the reader of the trace, which would miss
/// requests.
const SLOW: [&str; 4] = [
    "--filter",
    "delay:read=500us,write=500us",
    "--iothreads",
    "2",
];

/// Number of requests by operation and offset.
type Counts = BTreeMap<(String, u64), u64>;

fn counted(lines: &str, rounds: u64) {
    let mut counts = Counts::new();
    for line in lines.lines() {
        let one: Value =
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert_eq!(one["lost"], Value::Null, "{line}");
        let op = one["op"].as_str().unwrap().to_owned();
        *counts
            .entry((op, one["offset"].as_u64().unwrap()))
            .or_default() += 1;
    }
    let blocks = SIZE / (BLOCK as u64 * 4);
    assert_eq!(counts.len() as u64, 2 * blocks);
    for (request, count) in counts {
        assert_eq!(count, rounds, "{request:?}");
    }
}

#[test]
fn every_request_is_logged_once() {
    let dir = disk_dir();
    let log = as_arg(&dir.path().join("log"));
    let filter = format!("log:file={log},format=json");
    let mut chain = Chain::start("memory:8M", &[&["--filter", &filter], &SLOW[..]].concat());
    let rounds = rounds_of_load(&mut chain, 12);
    // The log stays the same file after it is renamed.
    let renamed = dir.path().join("renamed");
    fs::rename(&log, &renamed).unwrap();
    chain.upgrade(&[]);
    chain.quit();
    counted(&fs::read_to_string(&renamed).unwrap(), rounds);
    assert!(!fs::exists(&log).unwrap());
}

#[test]
fn a_trace_goes_on() {
    let dir = disk_dir();
    let (trace, printed) = (dir.path().join("trace"), dir.path().join("printed"));
    let trace = as_arg(&trace);
    let mut chain = Chain::start("memory:8M", &SLOW);
    stdout_of(&["trace", "--pid", &chain.server.api(), "--on", &trace]);
    let mut reader = fathom();
    reader
        .args(["trace", "--follow", "--json", &trace])
        .stdin(Stdio::null());
    let mut reader = reader
        .stdout(fs::File::create(&printed).unwrap())
        .spawn()
        .unwrap();
    let rounds = rounds_of_load(&mut chain, 12);
    assert_eq!(chain.ask(&["info"])["trace"], trace.as_str());
    // The trace would miss requests if there were more threads than it has room for.
    let refusal = crate::support::run(&["disk", "change", &chain.server.api(), "iothreads=3"]);
    let said = String::from_utf8_lossy(&refusal.stderr).into_owned();
    assert!(
        !refusal.status.success() && said.contains("room for 2 workers"),
        "{said}"
    );
    chain.quit();
    assert!(reader.wait().unwrap().success());
    counted(&fs::read_to_string(&printed).unwrap(), rounds);
}

/// Starts a load with 16 requests in flight.
fn bench(chain: &Chain) -> Child {
    let mut command = fathom();
    command.args([
        "bench",
        "--vhost-user",
        &chain.server.arg("s"),
        "--iodepth",
        "16",
    ]);
    command
        .args(["--runtime", "60s"])
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command.stderr(Stdio::null()).spawn().unwrap()
}

/// Requests that complete at once because queues stop are counted, and bursts do not begin again.
#[test]
fn upgrades_let_no_more_through_than_a_limit() {
    for (limit, rate, burst) in [
        ("throttle:iops-total=400", 400.0, 36.0),
        ("throttle:iops-total=400,group=g", 400.0, 36.0),
        ("throttle:iops-total=100,iops-total-max=500", 100.0, 500.0),
    ] {
        let mut chain = Chain::start("null:1G", &["--filter", limit]);
        let begun = Instant::now();
        let mut bench = bench(&chain);
        eventually("a burst", || {
            (chain.requests() as f64 >= burst).then_some(())
        });
        for step in 0..12 {
            match step % 3 {
                2 => drop(stdout_of(&[
                    "disk",
                    "change",
                    &chain.server.api(),
                    &format!("iothreads={}", 1 + step % 2),
                ])),
                _ => drop(chain.upgrade(&[])),
            }
            // By then, the limit has made up for requests that were too early.
            thread::sleep(Duration::from_millis(200));
        }
        let counted = chain.requests() as f64;
        // At worst, the requests in flight were counted too early.
        let most = burst + rate * begun.elapsed().as_secs_f64() + 17.0;
        assert!(counted <= most, "{limit}: {counted} of {most}");
        // Requests continue when the limit allows them.
        eventually("more", || (chain.requests() as f64 > counted).then_some(()));
        bench.kill().unwrap();
        bench.wait().unwrap();
        chain.quit();
    }
}

fn write(at: u64, round: u64) -> Request {
    let data = block(at, round);
    Request::Write { offset: at, data }
}

fn read(at: u64) -> Request {
    Request::Read {
        offset: at,
        len: BLOCK,
    }
}

#[test]
fn what_is_not_flushed_goes_along() {
    let dir = disk_dir();
    let image = image(dir.path(), "raw");
    let mut chain = Chain::start(
        &image,
        &["--format", "raw", "--filter", "fault:writes=lost"],
    );
    let socket = chain.server.arg("s");
    with_disk(&socket, 1, |disk| {
        assert!(
            disk.all(&[write(0, 1), write(8192, 1)])
                .iter()
                .all(Result::is_ok)
        );
        assert!(disk.all(&[Request::Flush]).iter().all(Result::is_ok));
        assert!(
            disk.all(&[write(0, 2), write(4096, 2)])
                .iter()
                .all(Result::is_ok)
        );
        for step in 0..3 {
            match step {
                1 => drop(stdout_of(&[
                    "disk",
                    "change",
                    &chain.server.api(),
                    "iothreads=2",
                ])),
                _ => drop(chain.upgrade(&[])),
            }
            let found = disk.all(&[read(0), read(4096), read(8192)]);
            let expected = [block(0, 2), block(4096, 2), block(8192, 1)];
            assert!(found.into_iter().map(Result::unwrap).eq(expected), "{step}");
        }
        assert!(
            fs::read(&image).unwrap()[..BLOCK] == block(0, 1),
            "it was written"
        );
        let without = crate::support::run(&["disk", "change", &chain.server.api(), "filters="]);
        let said = String::from_utf8_lossy(&without.stderr).into_owned();
        assert!(
            !without.status.success() && said.contains("filter 'fault' would be lost"),
            "{said}"
        );
        stdout_of(&["set", &chain.server.api(), "fault", "power-cut=yes"]);
        let found = disk.all(&[read(0), read(4096), read(8192)]);
        let expected = [block(0, 1), vec![0; BLOCK], block(8192, 1)];
        assert!(found.into_iter().map(Result::unwrap).eq(expected));
    });
    chain.quit();
}

#[test]
fn faults_are_counted_on() {
    let mut chain = Chain::start(
        "null:1M",
        &["--filter", "fault:error=EIO,op=read,count=3,after=8k"],
    );
    let mut outcomes = Vec::new();
    with_disk(&chain.server.arg("s"), 1, |disk| {
        for _ in 0..6 {
            outcomes.push(disk.all(&[read(0)])[0].is_ok());
            chain.upgrade(&[]);
        }
    });
    assert_eq!(outcomes, [true, true, false, false, false, true]);
    chain.quit();
}
