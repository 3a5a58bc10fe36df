//! Tests loads of several hosts that begin together.

use super::nbd;
use crate::support::certificates::Certificates;
use crate::support::{Kept, Served, eventually, fathom, refused, run, short_dir, stdout_of};
use serde_json::Value;
use std::fs::File;
use std::process::{Command, Stdio};

/// A host with an agent and a disk, whose reads take a given number of milliseconds.
struct Host {
    served: Served,
    agent: Kept,
    address: String,
    _dir: tempfile::TempDir,
}

/// Starts an agent that waits for clients and loads `uri`. Also returns the agent's address.
fn agent(certificates: &Certificates, uri: &str) -> (Kept, String, tempfile::TempDir) {
    let dir = short_dir();
    let log = dir.path().join("log");
    let mut agent = fathom();
    agent.args(["bench", "--serve", "127.0.0.1:0", "--nbd", uri]);
    agent.args(["--certificates", &certificates.path("server")]);
    agent
        .stdout(Stdio::null())
        .stderr(File::create(&log).unwrap());
    let agent = Kept(agent.spawn().unwrap());
    let address = eventually("it waits", || {
        let said = std::fs::read_to_string(&log).unwrap();
        let at = said.split("by TLS at ").nth(1)?.split_once('\n')?.0;
        Some(at.to_owned())
    });
    (agent, address, dir)
}

impl Host {
    fn start(certificates: &Certificates, ms: u32) -> Host {
        let disk = format!(
            "[[disk]]\nname = 'd'\nimage = 'memory:16M'\nnbd = true\nfilters = ['delay:read={ms}ms']\n"
        );
        let served = Served::waiting("", &disk);
        let (agent, address, dir) = agent(certificates, &nbd(&served, "d"));
        Host {
            served,
            agent,
            address,
            _dir: dir,
        }
    }

    /// Returns the number of reads that the disk has completed.
    fn reads(&self) -> u64 {
        let said = stdout_of(&["stats", &self.served.api(), "--json"]);
        let summary: Value = serde_json::from_str(&said).unwrap();
        let ops = summary["operations"].as_array().unwrap();
        let read = ops.iter().find(|op| op["op"] == "read");
        read.map_or(0, |read| read["stages"][6]["count"].as_u64().unwrap())
    }
}

fn bench(certificates: &Certificates, hosts: &[&Host], args: &[&str]) -> Command {
    let all: Vec<_> = hosts.iter().map(|host| host.address.clone()).collect();
    let mut bench = fathom();
    bench.args([
        "bench",
        "--client",
        &all.join(","),
        "--certificates",
        &certificates.path("client"),
    ]);
    bench.args(args);
    bench
}

#[test]
fn loads_begin_together_and_are_merged() {
    let certificates = Certificates::new();
    let [quick, slow] = [1, 40].map(|ms| Host::start(&certificates, ms));
    let load = [
        "--rw",
        "randread",
        "--iodepth",
        "4",
        "--number-ios",
        "400",
        "--json",
    ];
    let output = bench(&certificates, &[&quick, &slow], &load)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    let read = &told["operations"][0];
    assert_eq!(
        (&read["op"], read["ios"].as_u64()),
        (&"read".into(), Some(800))
    );
    assert_eq!((quick.reads(), slow.reads()), (400, 400));
    // Half of the reads were slow: the median lies between both hosts, and p90 is the slow host's.
    let of = |name: &str| read[name].as_f64().unwrap();
    assert!(of("p90_ns") >= 39e6 && of("p50_ns") <= 42e6, "{read}");
    let mean = |index: usize| {
        let host = &told["hosts"][index]["operations"][0];
        host["latency"]["mean_ns"].as_f64().unwrap()
    };
    let middle = f64::midpoint(mean(0), mean(1));
    assert!((of("mean_ns") - middle).abs() <= 0.03 * middle, "{told}");
    let rate = |of: &Value| of["iops"].as_f64().unwrap();
    let rates = told["hosts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|host| rate(&host["report"]));
    assert!((rate(&told) - rates.sum::<f64>()).abs() < 1.0);
}

#[test]
fn a_load_that_one_host_cannot_have_begins_nowhere() {
    let certificates = Certificates::new();
    let [one, other] = [1, 1].map(|ms| Host::start(&certificates, ms));
    let long = ["--rw", "randread", "--runtime", "1h"];
    let mut busy = bench(&certificates, &[&other], &long);
    let busy = Kept(
        busy.stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    eventually("it is busy", || (other.reads() > 0).then_some(()));
    let both = format!("{},{}", one.address, other.address);
    let client = certificates.path("client");
    let ask = ["bench", "--client", &both, "--certificates", &client];
    refused(
        1,
        &ask,
        &[
            &other.address,
            "another load is running on this host",
            "no load was started",
        ],
    );
    assert_eq!(one.reads(), 0);
    // After its client is killed, the agent stops the load and accepts another client.
    drop(busy);
    eventually("it is free", || {
        run(&[&ask[..], &["--number-ios", "8"]].concat())
            .status
            .success()
            .then_some(())
    });
    // Invalid options are rejected by the side that knows them.
    let wrong = ["--bs", "100"];
    refused(
        1,
        &[&ask[..], &wrong].concat(),
        &["--bs must be", "no load was started"],
    );
    for (args, words) in [
        (vec!["--cpus", "0"], "with --serve"),
        (
            vec!["--verify", "--verify-state", "/tmp/no"],
            "with --serve",
        ),
    ] {
        refused(1, &[&ask[..], &args].concat(), &[words]);
    }
    // The agent has ended, or does not know the client.
    drop(other.agent);
    refused(1, &ask, &[&other.address, "no load was started"]);
    let stranger = certificates.path("stranger");
    refused(
        1,
        &[
            "bench",
            "--client",
            &one.address,
            "--certificates",
            &stranger,
        ],
        &[&one.address],
    );
    let output = run(&[
        "bench",
        "--client",
        &one.address,
        "--certificates",
        &client,
        "--nbd",
        "nbd://h/e",
    ]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_load_ends_early_and_without_a_host_that_dies() {
    let certificates = Certificates::new();
    let [one, other] = [1, 1].map(|ms| Host::start(&certificates, ms));
    let long = ["--rw", "randread", "--runtime", "1h", "--json"];
    let begin = || {
        let before = one.reads();
        let mut load = bench(&certificates, &[&one, &other], &long);
        let load = load
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The first second is not measured, so wait for its end.
        eventually("it runs", || (one.reads() > before + 1200).then_some(()));
        load
    };
    let load = begin();
    let pid = load.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-INT", &pid])
            .status()
            .unwrap()
            .success()
    );
    let output = load.wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told["hosts"].as_array().unwrap().len(), 2);
    assert!(told["iops"].as_f64().unwrap() > 1.0);
    assert!(told["began_within_ms"].as_f64().unwrap() > 0.0, "{told}");

    let load = begin();
    let pid = load.id().to_string();
    let gone = other.address.clone();
    drop(other);
    assert!(
        Command::new("kill")
            .args(["-INT", &pid])
            .status()
            .unwrap()
            .success()
    );
    let output = load.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains(&gone) && said.contains("1 hosts have no figures"),
        "{said}"
    );
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told["failed"][0]["host"], *gone);
    assert_eq!(told["hosts"][0]["host"], *one.address);
}

/// fio adds up the hosts' requests, and the test compares these sums.
#[test]
fn fio_has_its_hosts_begin_together_too() {
    let dir = crate::support::disk_dir();
    let servers: Vec<_> = (0..2)
        .map(|_| {
            let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let port = free.local_addr().unwrap().port();
            drop(free);
            let server = Kept::spawn(Command::new("fio").arg(format!("--server=127.0.0.1,{port}")));
            let at = format!("127.0.0.1:{port}");
            eventually("it waits", || std::net::TcpStream::connect(&at).ok());
            (server, at)
        })
        .collect();
    let job = dir.path().join("job.fio");
    let text = format!(
        "[global]\nioengine=psync\nsize=1M\nloops=4\ndirectory={}\n[one]\nrw=read\n[two]\nrw=write\n",
        dir.path().display()
    );
    std::fs::write(&job, text).unwrap();
    let hosts = format!("{},{}", servers[0].1, servers[1].1);
    let job = crate::support::as_arg(&job);
    let bench = ["bench", "--fio", &job, "--client", &hosts];
    let told: Value =
        serde_json::from_str(&stdout_of(&[&bench[..], &["--json"]].concat())).unwrap();
    assert_eq!(told["hosts"].as_array().unwrap().len(), 4);
    for (index, op) in ["read", "write"].iter().enumerate() {
        let all = &told["operations"][index];
        assert_eq!(
            (&all["op"], all["ios"].as_u64()),
            (&(*op).into(), Some(2 * 4 * 256)),
            "{told}"
        );
        assert!(all["p99_ns"].as_f64().unwrap() <= all["max_ns"].as_f64().unwrap());
    }
    let said = stdout_of(&bench);
    assert!(
        said.contains(&format!("{} one", servers[0].1)) && said.contains("all hosts"),
        "{said}"
    );
    for (args, words) in [
        (["bench", "--fio", "/no/such", "--client", &hosts], "fio"),
        (["bench", "--fio", &job, "--client", "127.0.0.1:1"], "fio"),
    ] {
        let output = run(&args);
        assert_eq!(output.status.code(), Some(1));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            said.starts_with("fathom: fio") && said.lines().count() == 1 && said.contains(words),
            "{said}"
        );
    }
    assert_eq!(run(&["bench", "--client", &hosts]).status.code(), Some(2));
}

/// A shared limit counts the requests of both disks: each disk gets the part that the other leaves.
#[test]
fn a_neighbour_that_is_noisy_is_seen() {
    let certificates = Certificates::new();
    let limit = "filters = ['throttle:iops-total=1000,group=g']\n";
    let disk = |name: &str| {
        format!("[[disk]]\nname = '{name}'\nimage = 'memory:16M'\nnbd = true\n{limit}")
    };
    let served = Served::waiting("", &[disk("quiet"), disk("loud")].concat());
    let agents = ["quiet", "loud"].map(|disk| agent(&certificates, &nbd(&served, disk)));
    let client = certificates.path("client");
    let bench = [
        "bench",
        "--client",
        &agents[0].1,
        "--certificates",
        &client,
        "--rw",
        "randread",
    ];
    let noise = [
        "--iodepth",
        "4",
        "--runtime",
        "2s",
        "--noise",
        &agents[1].1,
        "--rounds",
        "2",
    ];
    let told = stdout_of(&[&bench[..], &noise, &["--json"]].concat());
    let told: Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["rounds"].as_array().unwrap().len(), 2);
    let iops = &told["operations"][0]["iops"];
    let of = |name: &str| iops[name].as_f64().unwrap();
    assert!(
        of("median") < 0.8 && of("beside") < 0.8 * of("alone"),
        "{told}"
    );
    assert!(
        told["operations"][0]["p50"]["median"].as_f64().unwrap() > 1.2,
        "{told}"
    );
    for (args, words) in [
        (["--noise", &*agents[0].1], "in both --client and --noise"),
        (["--noise", "127.0.0.1:1"], "no load was started"),
    ] {
        refused(1, &[&bench[..], &args].concat(), &[words]);
    }
}
