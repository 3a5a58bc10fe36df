//! What a disk's parts have kept goes along: memory, overlays, filters' state, traces, logs.

use super::Chain;
use crate::support::{eventually, fathom, stdout_of};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A load of so many requests at once, for as long as it is not ended.
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

/// What goes at once when queues stop is counted, and bursts do not begin anew.
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
            // What has gone before its time is waited for by then.
            thread::sleep(Duration::from_millis(200));
        }
        let counted = chain.requests() as f64;
        // What is in flight has been counted before its time at worst.
        let most = burst + rate * begun.elapsed().as_secs_f64() + 17.0;
        assert!(counted <= most, "{limit}: {counted} of {most}");
        // It goes on, when it is its turn.
        eventually("more", || (chain.requests() as f64 > counted).then_some(()));
        bench.kill().unwrap();
        bench.wait().unwrap();
        chain.quit();
    }
}
