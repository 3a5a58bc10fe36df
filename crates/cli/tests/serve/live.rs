//! Checks `/v1/live`, which sends the numbers of each interval, by the API's socket and by TCP.

use crate::support::{Kept, Served, eventually, stdout_of};
use fathom_testing::Deadline;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A client of `/v1/live`: curl.
pub struct Listener {
    curl: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Listener {
    pub fn start(args: &[&str]) -> Listener {
        let mut curl = Command::new("curl")
            .args(["--silent", "--no-buffer", "--fail"])
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(curl.stdout.take().unwrap());
        Listener { curl, lines }
    }

    fn of(served: &Served, query: &str) -> Listener {
        let url = format!("http://fathom/v1/live?interval=500ms{query}");
        Listener::start(&["--unix-socket", &served.api(), &url])
    }

    /// Returns the next sample, or `None` if the server has ended the reply.
    fn next(&mut self) -> Option<Value> {
        let mut line = String::new();
        match self.lines.read_line(&mut line).unwrap() {
            0 => None,
            _ => Some(serde_json::from_str(&line).unwrap()),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = self.curl.kill();
        let _ = self.curl.wait();
    }
}

fn disk<'a>(sample: &'a Value, name: &str) -> &'a Value {
    let disks = sample["disks"].as_array().unwrap();
    let found = disks.iter().find(|disk| disk["name"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {sample}"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value}"))
}

pub fn uri(served: &Served, disk: &str) -> String {
    format!("nbd+unix:///{disk}?socket={}", served.arg("n"))
}

/// Starts a client that runs these commands.
fn qemu_io(served: &Served, disk: &str, commands: &[String]) -> Kept {
    let mut client = Command::new("qemu-io");
    client.args(["-f", "raw", &uri(served, disk)]);
    client.args(commands.iter().flat_map(|command| ["-c", command]));
    Kept::spawn(&mut client)
}

/// Returns the status of the reply, and its body.
fn get(served: &Served, place: &str) -> (String, String) {
    let output = Command::new("curl")
        .args(["-s", "--max-time", "30", "-w", "\n%{http_code}"])
        .args(["--unix-socket", &served.api()])
        .arg(format!("http://fathom{place}"))
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let (body, status) = text.rsplit_once('\n').unwrap();
    (status.to_owned(), body.to_owned())
}

/// A slow disk, a disk whose writes fail, and a disk that no client uses.
pub const THREE: &str = "[[disk]]\nname = 'slow'\nimage = 'memory:16M'\nnbd = true\nfilters = ['delay:read=30ms']\n\
    [[disk]]\nname = 'bad'\nimage = 'memory:1M'\nnbd = true\nfilters = ['fault:error=EIO,op=write']\n\
    [[disk]]\nname = 'idle'\nimage = 'memory:1M'\nnbd = true\n";

/// Starts a server with these disks. Returns the server and its TCP address.
pub fn server(of_api: &str) -> (Served, String) {
    let mut served = Served::waiting(&format!(", http = '127.0.0.1:0'{of_api}"), THREE);
    served.wait_for("metrics are at");
    let log = served.log();
    let at = log.split("metrics are at http://").nth(1).unwrap();
    let address = at.split("/metrics").next().unwrap().to_owned();
    (served, address)
}

#[test]
fn live_intervals_add_up_and_name_the_limiter() {
    let (served, address) = server("");
    let mut all = Listener::of(&served, "");
    let mut by_tcp = Listener::start(&[&format!("http://{address}/v1/live?interval=0.5")]);
    let first = all.next().unwrap();
    assert_eq!(disk(&first, "slow")["limiter"]["kind"], "idle");
    assert_eq!(disk(&first, "slow")["nbd_clients"], 0);
    let reads: Vec<_> = (0..60).map(|n| format!("read {n}k 1k")).collect();
    let load = qemu_io(&served, "slow", &reads);
    let _writes = qemu_io(&served, "bad", &["write 0 4k".into(), "write 4k 4k".into()]);
    let (mut requests, mut bytes, mut errors, mut hints) = (0, 0, 0, Vec::new());
    let deadline = Deadline::new("all requests");
    // (qemu-io also reads a little on its own.)
    while requests < 60 || errors < 2 {
        deadline.check_with(|| format!("{requests} requests, {errors} errors"));
        let sample = all.next().unwrap();
        let seconds = number(&sample["seconds"]);
        assert!((0.3..5.0).contains(&seconds), "{sample}");
        let slow = disk(&sample, "slow");
        requests += slow["all"]["requests"].as_u64().unwrap();
        bytes += slow["all"]["bytes"].as_u64().unwrap();
        errors += disk(&sample, "bad")["all"]["errors"].as_u64().unwrap();
        // (When qemu-io ends, it flushes, which nothing delays.)
        let mut operations = slow["operations"].as_array().unwrap().iter();
        let Some(read) = operations.find(|op| op["op"] == "read" && number(&op["requests"]) >= 5.0)
        else {
            continue;
        };
        let rate = number(&read["iops"]) * number(&slow["seconds"]);
        assert!((rate - number(&read["requests"])).abs() < 0.01, "{slow}");
        let half = number(&read["p50_us"]);
        // 30 ms, less the width of a bin of the histogram. On a busy machine, reads take longer.
        assert!(half >= 29e3, "{slow}");
        assert!(
            read["p99_us"].is_null() && number(&read["max_us"]) >= half,
            "{slow}"
        );
        let queue = number(&read["stages_us"]["queue"]);
        assert!(queue >= 29e3, "{slow}");
        // A single client waits for each reply.
        assert!(
            (0.1..1.5).contains(&number(&slow["mean_in_flight"])),
            "{slow}"
        );
        let buckets = slow["histogram"].as_array().unwrap().iter();
        let count = |bucket: &Value| bucket[1].as_u64().unwrap();
        let all: u64 = buckets.clone().map(count).sum();
        assert_eq!(all, slow["all"]["requests"].as_u64().unwrap());
        let of_reads = buckets.filter(|bucket| number(&bucket[0]) > 4.0 * 25e6_f64.log2());
        assert_eq!(
            of_reads.map(count).sum::<u64>(),
            read["requests"].as_u64().unwrap()
        );
        hints.push(slow["limiter"]["text"].as_str().unwrap().to_owned());
    }
    drop(load);
    assert!(hints.len() >= 2, "{hints:?}");
    let held = |hint: &&String| hint.contains("delay:read=30ms filter: ");
    assert!(
        2 * hints.iter().filter(held).count() > hints.len(),
        "{hints:?}"
    );
    // All intervals together have the numbers of the statistics.
    let stats = stdout_of(&["stats", &served.api(), "--disk", "slow", "--json"]);
    let stats: Value = serde_json::from_str(&stats).unwrap();
    let operations = stats["operations"].as_array().unwrap();
    let total = |of: fn(&Value) -> u64| operations.iter().map(of).sum::<u64>();
    let count = |op: &Value| op["stages"].as_array().unwrap().last().unwrap()["count"].as_u64();
    while requests < total(|op| op["stages"][6]["count"].as_u64().unwrap()) {
        deadline.check_with(|| format!("{requests} requests"));
        let sample = all.next().unwrap();
        requests += disk(&sample, "slow")["all"]["requests"].as_u64().unwrap();
        bytes += disk(&sample, "slow")["all"]["bytes"].as_u64().unwrap();
    }
    let counts: u64 = operations.iter().map(|op| count(op).unwrap()).sum();
    assert_eq!(
        (requests, bytes),
        (counts, total(|op| op["bytes"].as_u64().unwrap()))
    );
    // A TCP client gets the same samples.
    let sample = by_tcp.next().unwrap();
    assert_eq!(sample["disks"].as_array().unwrap().len(), 3);
    // A client may ask for one disk only. The samples of this client are from the same sampler.
    let mut one = Listener::of(&served, "&disk=bad");
    let sample = one.next().unwrap();
    assert_eq!(sample["disks"].as_array().unwrap().len(), 1);
    assert!(sample["number"].as_u64() > Some(1), "{sample}");
}

#[test]
fn guests_queues_and_workers_are_told() {
    let served = Served::start("memory:16M", &["--iothreads", "2"]);
    let load = served.start_load(1_000_000_000, &["--queues", "2", "--iodepth", "8"]);
    let load = Kept(load);
    let mut all = Listener::of(&served, "");
    let sample = eventually("both queues are used", || {
        let sample = all.next().unwrap();
        let queues = sample["disks"][0]["queues"].as_array()?.clone();
        let used = queues
            .iter()
            .filter(|queue| number(&queue["requests_per_second"]) > 100.0);
        (used.count() == 2).then_some(sample)
    });
    let one = &sample["disks"][0];
    assert_eq!(one["front_end"]["pid"], load.0.id());
    assert_eq!(one["front_end"]["vmm"], "fathom");
    let all_requests = number(&one["all"]["iops"]);
    let sum = |of: &str, what: &str| -> f64 {
        let parts = one[of].as_array().unwrap().iter();
        parts.map(|part| number(&part[what])).sum()
    };
    for of in ["queues", "workers"] {
        let rate = sum(of, "requests_per_second");
        assert!((0.8..1.25).contains(&(rate / all_requests)), "{of}: {one}");
    }
    let cpu = sum("workers", "cpu_percent");
    assert!((1.0..=200.0).contains(&cpu), "{one}");
    assert!((cpu - number(&one["cpu_percent"])).abs() < 0.01);
    assert!(number(&sample["cpu_percent"]) >= cpu * 0.8, "{sample}");
    assert!(
        number(&one["all"]["p99_us"]) >= number(&one["all"]["p50_us"]),
        "{one}"
    );
}

/// Requests samples, and reads only the start of the reply.
fn ask_and_never_read(stream: &mut (impl Write + Read)) {
    let request = "GET /v1/live?interval=0.5s HTTP/1.1\r\nHost: a\r\n\r\n";
    stream.write_all(request.as_bytes()).unwrap();
    let mut head = [0; 12];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 200");
}

#[test]
fn live_clients_that_do_not_read_are_few_and_harmless() {
    let (served, address) = server("");
    let mut silent: Vec<_> = (0..14)
        .map(|_| UnixStream::connect(served.path("c")).unwrap())
        .collect();
    silent.iter_mut().for_each(ask_and_never_read);
    let mut by_tcp = TcpStream::connect(&address).unwrap();
    ask_and_never_read(&mut by_tcp);
    // An additional client gets its samples as if the others did not exist.
    let mut reads = Listener::of(&served, "");
    let start = Instant::now();
    let numbers: Vec<_> = (0..6)
        .map(|_| reads.next().unwrap()["number"].as_u64().unwrap())
        .collect();
    let steps: Vec<_> = numbers.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(steps, [1; 5]);
    assert!(start.elapsed() < Duration::from_secs(20));
    // No more clients of this kind are accepted. The rest of the API works.
    let (status, text) = get(&served, "/v1/live");
    assert!(
        status == "503" && text.contains("16 other clients read live numbers"),
        "{text}"
    );
    assert_eq!(get(&served, "/v1/disks").0, "200");
    // Another client is accepted when these clients have gone.
    drop(silent);
    eventually("there is room", || {
        let mut one = Listener::of(&served, "");
        one.next()
    });
}

#[test]
fn few_intervals_are_measured_at_once() {
    let (served, _) = server("");
    let with = |seconds: u32| {
        let url = format!("http://fathom/v1/live?interval={seconds}s");
        let mut stream = UnixStream::connect(served.path("c")).unwrap();
        let request = format!(
            "GET {} HTTP/1.1\r\nHost: a\r\n\r\n",
            url.replace("http://fathom", "")
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut head = [0; 12];
        stream.read_exact(&mut head).unwrap();
        (stream, String::from_utf8(head.to_vec()).unwrap())
    };
    let four: Vec<_> = (10..14).map(with).collect();
    assert!(
        four.iter().all(|(_, head)| head.ends_with("200")),
        "{four:?}"
    );
    let (status, text) = get(&served, "/v1/live?interval=20s");
    assert!(
        status == "503" && text.contains("10s, 11s, 12s, 13s"),
        "{text}"
    );
    assert!(with(13).1.ends_with("200"));
    drop(four);
    eventually("the four are gone", || {
        with(20).1.ends_with("200").then_some(())
    });
}

#[test]
fn what_is_asked_for_in_vain_is_said_so() {
    let (served, _) = server("");
    for (query, status, words) in [
        ("interval=0.4s", "400", "from 0.5s to 60s"),
        ("interval=61s", "400", "from 0.5s to 60s"),
        ("interval=often", "400", "is not a time like"),
        ("interval=", "400", "is not a time like"),
        ("often=1", "400", "unknown key 'often'"),
        ("disk=nothing", "404", "nothing"),
    ] {
        let (got, text) = get(&served, &format!("/v1/live?{query}"));
        assert_eq!(got, status, "{query}: {text}");
        assert!(text.contains(words), "{query}: {text}");
    }
}

#[test]
fn live_clients_reconnect_after_an_upgrade_with_right_counts() {
    let (served, address) = server("");
    let reads: Vec<_> = (0..1000).map(|n| format!("read {n}k 1k")).collect();
    let _load = qemu_io(&served, "slow", &reads);
    let mut before = Listener::of(&served, "");
    let server_of = |sample: &Value| sample["pid"].as_u64().unwrap();
    let old = server_of(&before.next().unwrap());
    served.upgrade();
    // The reply of the old server ends.
    let deadline = Deadline::new("the end of the old server's intervals");
    while before.next().is_some() {
        deadline.check();
    }
    let mut after = Listener::start(&[&format!("http://{address}/v1/live?interval=0.5s")]);
    let samples: Vec<_> = (0..3).map(|_| after.next().unwrap()).collect();
    for sample in &samples {
        assert_ne!(server_of(sample), old);
        let slow = disk(sample, "slow");
        // The rate is still one read in 30 ms. The rate does not include the requests before the
        // upgrade.
        assert!(number(&slow["all"]["iops"]) < 60.0, "{slow}");
        assert_eq!(slow["restarted"], false);
    }
    assert!(
        samples
            .iter()
            .any(|sample| number(&disk(sample, "slow")["all"]["iops"]) > 5.0)
    );
}
