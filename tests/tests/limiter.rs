//! What limits a served disk is named, where it is built on purpose and where there is nothing: by
//! what is seen from outside of real servers and real loads. Server and load have a CPU each.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use fathom_lab::evidence::{Kind, Sampler, Watch, Watched};
use fathom_lab::work::{Shape, Worked};
use fathom_limiter::judge;
use fathom_run::evidence::{Evidence, Load, ThreadTime};
use fathom_tests::{Place, fathom};
use serde_json::Value;

/// The load's ramp, and what a program needs to start.
const RAMP: Duration = Duration::from_millis(1500);
const WINDOW: Duration = Duration::from_secs(2);

/// Where a served disk can be reached.
struct Sockets {
    vhost_user: PathBuf,
    nbd: PathBuf,
}

/// What is seen, from its outside, of a disk of the server's memory under a load.
fn seen(load: impl Fn(&Sockets) -> Command, told: fn(&str) -> Load) -> Evidence {
    let place = Place::new();
    let nbd = place.path("nbd.sock");
    let listen = format!("unix:{}", nbd.display());
    let args = ["--poll", "off", "--cpus", "0", "--nbd", &listen];
    let mut server = place.serve("disk", Path::new("memory:64M"), &args);
    let sockets = Sockets {
        vhost_user: server.socket().to_owned(),
        nbd,
    };
    let mut load = load(&sockets);
    let load = load.stdout(Stdio::piped()).spawn().unwrap();
    thread::sleep(RAMP);
    let processes = vec![
        Watched::new(server.process().pid(), Kind::Server),
        Watched::new(load.id(), Kind::Load),
    ];
    let sampler = Sampler::start(Watch {
        processes,
        ..Watch::default()
    });
    thread::sleep(WINDOW);
    let (evidence, _) = sampler.unwrap().stop();
    let output = load.wait_with_output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}");
    Evidence {
        load: told(&said),
        ..evidence
    }
}

/// `fathom bench` as front-end.
fn bench(sockets: &Sockets, args: &[&str]) -> Command {
    let mut bench = Command::new(fathom());
    bench
        .args(["bench", "--json", "--cpus", "1", "--vhost-user"])
        .arg(&sockets.vhost_user)
        .args(["--ramp-time", "1s", "--runtime", "4s"])
        .args(args);
    bench
}

/// What it says of itself.
fn told_by_bench(report: &str) -> Load {
    let report: Value = serde_json::from_str(report).unwrap();
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{report}"));
    let seconds = number(&report["runtime"]);
    let operations = report["operations"].as_array().unwrap();
    let sum = |figure: &dyn Fn(&Value) -> f64| operations.iter().map(figure).sum::<f64>();
    let requests = sum(&|one| number(&one["ios"]));
    let spent = sum(&|one| number(&one["ios"]) * number(&one["latency"]["mean_ns"]));
    Load {
        threads: number(&report["queues"]) as u32,
        depth: number(&report["iodepth"]) as u32,
        requests: requests as u64,
        bytes: (number(&report["mb_per_s"]) * 1e6 * seconds) as u64,
        seconds,
        mean_ns: spent / requests,
        thread_cpu: Vec::new(),
        polls: false,
    }
}

/// fio as NBD client, which makes a checksum of all that it writes.
fn checksums(sockets: &Sockets) -> Command {
    let uri = format!("nbd+unix:///?socket={}", sockets.nbd.display());
    let mut fio = Command::new("fio");
    fio.args(["--name=load", "--ioengine=nbd", "--output-format=json"])
        .arg(format!("--uri={uri}"))
        .args(["--rw=randwrite", "--bs=64k", "--iodepth=32", "--size=64M"])
        .args(["--verify=sha512", "--do_verify=0", "--verify_state_save=0"])
        .args(["--time_based", "--ramp_time=1s", "--runtime=4s"])
        .args(["--thread", "--cpus_allowed=1"]);
    fio
}

fn told_by_fio(report: &str) -> Load {
    let shape = Shape {
        threads: 1,
        depth: 32,
    };
    Worked::of_fio(report, shape).unwrap().load
}

/// Checks the verdict on a load. Where others use the two CPUs it may be that some thread waits for one,
/// and has been seen to; or nothing certain of the same thread.
fn expect(evidence: &Evidence, rule: &str, thread: &str) {
    let verdict = judge(evidence);
    eprintln!("{verdict}");
    let said = format!("{verdict:#?}\n{evidence:#?}");
    let has_waited = |one: &ThreadTime| {
        verdict.text.contains(&format!("'{}'", one.name))
            && one
                .waiting
                .is_some_and(|waited| waited > 0.05 * evidence.seconds)
    };
    match verdict.rule() {
        Some("run-queue") => assert!(evidence.threads.iter().any(has_waited), "{said}"),
        None => assert!(verdict.text.contains(thread), "{said}"),
        other => assert_eq!(other, Some(rule), "{said}"),
    }
}

/// One after the other: they would be each other's limit.
#[test]
fn what_limits_a_served_disk_is_named() {
    // The worker copies each byte, and the load looks at none. It has one queue while the load's
    // threads refill the others.
    let copies = [
        "--rw",
        "randread",
        "--bs",
        "256k",
        "--iodepth",
        "16",
        "--queues",
        "4",
    ];
    let evidence = seen(|sockets| bench(sockets, &copies), told_by_bench);
    expect(&evidence, "thread", "I/O thread 'worker 0'");

    // The load makes much of what the worker only copies.
    let evidence = seen(checksums, told_by_fio);
    expect(&evidence, "load-thread", "load");

    // Nothing is wrong: one request after the other takes its time.
    let alone = ["--rw", "randread", "--iodepth", "1"];
    let evidence = seen(|sockets| bench(sockets, &alone), told_by_bench);
    expect(&evidence, "latency", "");
}
