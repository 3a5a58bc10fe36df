//! Tests the breakdown of requests that a server forwards to a server on another host.

use crate::support::{Served, eventually, refused, stdout_of};
use fathom_testing::{decide, outrank_other_programs};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

const MS: u64 = 1_000_000;

/// The delays, by where they occur.
const OUT: Duration = Duration::from_millis(10);
const BACK: Duration = Duration::from_millis(20);
const FILTER: u64 = 15 * MS;
/// Delay of every other request.
const STORAGE: u64 = 25 * MS;

/// Starts a link that delays data by a different time in each direction. Returns its address.
fn link(to: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(to).unwrap());
            for socket in [&client, &server] {
                socket.set_nodelay(true).unwrap();
            }
            let clone = |socket: &TcpStream| socket.try_clone().unwrap();
            carry(clone(&client), clone(&server), OUT);
            carry(server, client, BACK);
        }
    });
    at
}

fn carry(mut from: TcpStream, mut to: TcpStream, delay: Duration) {
    let (sender, due) = channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || receive(&mut from, &sender, delay));
    thread::spawn(move || {
        for (at, bytes) in due {
            thread::sleep(at.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                return;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Write);
    });
}

fn receive(from: &mut TcpStream, sender: &Sender<(Instant, Vec<u8>)>, delay: Duration) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(n) = from.read(&mut buffer) {
        let sent = sender.send((Instant::now() + delay, buffer[..n].to_vec()));
        if n == 0 || sent.is_err() {
            return;
        }
    }
}

/// A server on the far side of the link, and a server on this side.
struct Two {
    remote: Served,
    near: Served,
}

impl Two {
    fn start() -> Two {
        let args = [
            "--nbd=tcp:127.0.0.1:0",
            "--filter=delay:read=15ms",
            "--inject=storage=25ms",
        ];
        let mut remote = Served::start("memory:64M", &args);
        const WORDS: &str = "NBD clients connect to tcp:";
        remote.wait_for(WORDS);
        let log = remote.log();
        let at = log.split(WORDS).nth(1).unwrap();
        let at = at.split_whitespace().next().unwrap().parse().unwrap();
        let near = Served::start(&format!("nbd://{}/", link(at)), &[]);
        Two { remote, near }
    }

    /// Records on both sides, the remote one for longer. Returns the two run directories.
    fn record(&self) -> [String; 2] {
        let runs = [self.near.arg("near.run"), self.near.arg("remote.run")];
        let of = |served: &Served, seconds, run: &str| {
            let args = [
                "breakdown",
                "--server",
                &served.api(),
                "--seconds",
                seconds,
                "--output",
            ];
            stdout_of(&[&args[..], &[run]].concat());
        };
        thread::scope(|scope| {
            scope.spawn(|| of(&self.remote, "14", &runs[1]));
            eventually("it is recorded there", || {
                let dir = std::path::Path::new(&runs[1]).join("layers");
                dir.exists().then_some(())
            });
            scope.spawn(|| of(&self.near, "13", &runs[0]));
            // A request takes about 58 ms.
            self.near.load(170, &["--rw", "randread", "--bs", "4k"]);
        });
        runs
    }
}

fn joined(args: &[&str]) -> Value {
    let args = [&["breakdown", "--json", "--join"], args].concat();
    let runs: Value = serde_json::from_str(&stdout_of(&args)).unwrap();
    runs
}

/// Returns the figure of a layer in ns.
fn layer(run: &Value, name: &str, figure: &str) -> u64 {
    let layers = run["exact"]["layers"].as_array().unwrap();
    let row = layers.iter().find(|row| row["layer"] == name);
    let row = row.unwrap_or_else(|| panic!("{name} in {layers:?}"));
    row["time"][figure].as_u64().unwrap()
}

fn is_within_a_twentieth(found: u64, truth: u64) {
    let off = found.abs_diff(truth);
    assert!(off <= truth / 20, "{found} ns instead of {truth}");
}

#[test]
fn each_delay_is_found_in_its_layer() {
    outrank_other_programs();
    decide(find_each_delay);
}

fn find_each_delay() {
    let two = Two::start();
    let [near, remote] = two.record();
    let output = two.near.arg("joined.run");
    let run = joined(&[&near, &remote, "--output", &output]);
    let truth = &run["exact"]["truth"];
    assert!(truth["joined"].as_u64().unwrap() >= 150, "{truth}");
    for fault in [
        "unmatched",
        "ambiguous",
        "incomplete",
        "inconsistent",
        "violations",
    ] {
        assert_eq!(truth[fault], 0, "{fault}: {truth}");
    }
    // The sum of both directions is exact. The values of the two directions are only as exact as
    // the clocks.
    let [out, back] = ["network_out", "network_back"].map(|name| layer(&run, name, "p50"));
    let both = (OUT + BACK).as_nanos() as u64;
    is_within_a_twentieth(out + back, both);
    let error = truth["remote_clock_error_ns"].as_u64().unwrap();
    assert!((both / 3..both * 6 / 10).contains(&error), "{truth}");
    let off = out.abs_diff(OUT.as_nanos() as u64);
    assert!(off <= error + both / 20, "{off} of {error}");
    is_within_a_twentieth(layer(&run, "remote_queue", "p50"), FILTER);
    is_within_a_twentieth(layer(&run, "remote_device", "p90"), STORAGE);
    assert!(layer(&run, "remote_device", "p50") < STORAGE * 21 / 20);
    // The layers add up to the total.
    let layers = run["exact"]["layers"].as_array().unwrap();
    let mean = |row: &Value| row["time"]["mean"].as_f64().unwrap();
    let sum: f64 = layers.iter().map(mean).sum();
    let total = run["exact"]["total"]["mean"].as_f64().unwrap();
    assert!((sum - total).abs() < 10.0, "{sum} of {total}");
    // The report names these layers.
    let told = stdout_of(&["report", &output]);
    for words in [
        "the network, there and back",
        "remote server: filters",
        "remote host",
    ] {
        assert!(told.contains(words), "{words}: {told}");
    }
    // The report of the near server alone says how to get the rest.
    let alone = stdout_of(&["report", &near]);
    let words = alone.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("fathom breakdown --server"), "{alone}");
}

#[test]
fn what_does_not_belong_together_is_not_joined() {
    let served = Served::start("memory:64M", &[]);
    let other = Served::start("memory:64M", &[]);
    let record = |served: &Served| {
        let dir = served.arg("a.run");
        let args = [
            "breakdown",
            "--server",
            &served.api(),
            "--seconds",
            "1",
            "--output",
            &dir,
        ];
        thread::scope(|scope| {
            scope.spawn(|| stdout_of(&args));
            served.load(2000, &["--rw", "randread", "--bs", "4k"]);
        });
        dir
    };
    let [first, second] = [&served, &other].map(record);
    let out = served.arg("j.run");
    let run = joined(&[&first, &second, "--output", &out]);
    let problems = run["problems"].to_string();
    assert!(problems.contains("remote is left out"), "{problems}");
    let again = ["breakdown", "--join", &first, &second, "--output", &out];
    refused(1, &again, &["already contains a run"]);
    let third = served.arg("k.run");
    let twice = [
        "breakdown",
        "--join",
        &first,
        &second,
        &second,
        "--output",
        &third,
    ];
    refused(1, &twice, &["a second run of the same kind"]);
    let joined = ["breakdown", "--join", &out, &second, "--output", &third];
    refused(1, &joined, &["not the run of a host"]);
    refused(
        1,
        &["breakdown", "--server", "no-such-disk"],
        &["no-such-disk"],
    );
}
