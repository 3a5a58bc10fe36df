//! Checks `fathom serve --filter`, `fathom filters` and `fathom set`.

use crate::support::{Served, disk_dir, refused, stdout_of};
use fathom_client::Client;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn set(served: &Served, args: &[&str]) -> String {
    stdout_of(&[&["set", &served.api()], args].concat())
}

fn json_of(args: &[&str]) -> Value {
    serde_json::from_str(&stdout_of(args)).unwrap()
}

/// Runs `fathom bench`, and returns its results.
fn bench(served: &Served, args: &[&str]) -> Value {
    let socket = served.arg("s");
    let common = ["bench", "--vhost-user", &socket, "--json"];
    json_of(&[&common, args].concat())
}

fn stage<'a>(stats: &'a Value, op: &str, name: &str) -> &'a Value {
    let find = |list: &'a Value, key: &str, value: &str| {
        let list = list.as_array().unwrap();
        list.iter().find(|entry| entry[key] == value).unwrap()
    };
    find(
        &find(&stats["operations"], "op", op)["stages"],
        "stage",
        name,
    )
}

#[test]
fn filters_are_listed_with_their_options() {
    let text = stdout_of(&["filters"]);
    let listed = json_of(&["filters", "--json"]);
    let listed = listed.as_array().unwrap();
    let names = [
        "delay",
        "throttle",
        "fault",
        "cow",
        "readonly",
        "pause",
        "log",
        "readahead",
    ];
    assert_eq!(listed.iter().map(|f| &f["name"]).collect::<Vec<_>>(), names);
    for filter in listed {
        let name = filter["name"].as_str().unwrap();
        let one = stdout_of(&["filters", name]);
        assert!(text.contains(&one), "{name}");
        for option in filter["options"].as_array().unwrap() {
            let name = option["name"].as_str().unwrap();
            assert!(one.contains(&format!("  {name}=")), "{one}");
            assert!(!option["what"].as_str().unwrap().is_empty());
        }
    }
    refused(1, &["filters", "nonsense"], &["nonsense", "delay"]);
}

#[test]
fn what_is_no_filter_is_refused_in_one_line() {
    let serve = |filter: &str, status, words: &[&str]| {
        let args = [
            "serve",
            "null:1G",
            "--vhost-user",
            "/tmp/not-made",
            "--filter",
            filter,
        ];
        refused(status, &args, words);
    };
    serve("nonsense", 2, &["nonsense", "throttle"]);
    serve("delay:read", 2, &["KEY=VALUE"]);
    serve("delay:reed=1ms", 2, &["reed", "read"]);
    serve("delay:read=soon", 2, &["delay: read", "soon"]);
    serve("fault:power-cut=yes", 2, &["fathom set"]);
    serve("cow", 1, &["cow", "files"]);
    serve("log:file=/no/such/dir/log", 1, &["/no/such/dir/log"]);
}

#[test]
fn options_are_changed_while_serving_all_or_none() {
    let filters = [
        "--filter",
        "delay:read=1ms",
        "--filter",
        "pause",
        "--filter",
        "delay",
    ];
    let served = Served::start("null:1G", &filters);
    let control = served.api();
    served.load(10, &[]);
    assert_eq!(
        set(&served, &["delay#2", "write=2ms", "read=3ms"]),
        "delay:read=3ms,write=2ms\n"
    );
    assert_eq!(set(&served, &["delay#1", "read="]), "delay\n");
    let shown = json_of(&["set", &control, "pause", "frozen=no", "--json"]);
    assert_eq!(shown["options"]["frozen"], "no");
    let info = stdout_of(&["info", &control]);
    let lines: Vec<_> = info.lines().filter(|l| l.starts_with("filter:")).collect();
    let shown = ["delay", "pause:frozen=no", "delay:read=3ms,write=2ms"];
    assert_eq!(lines, shown.map(|filter| format!("filter:     {filter}")));
    for (args, words) in [
        (["delay", "read=1ms"], ["several", "delay#2"]),
        (["delay#3", "read=1ms"], ["delay#3", "pause"]),
        (["throttle", "iops-total=1"], ["throttle", "pause"]),
        (["pause", "frozen=maybe"], ["frozen", "maybe"]),
        (["pause", "thawed=yes"], ["thawed", "frozen"]),
    ] {
        refused(1, &[&["set", &control][..], &args].concat(), &words);
    }
    refused(
        1,
        &["set", &control, "delay#2", "read=1s", "write=x"],
        &["write"],
    );
    refused(
        1,
        &["set", &control, "delay#2", "read=1s", "read=2s"],
        &["twice"],
    );
    refused(2, &["set", &control, "delay#2", "read"], &["OPTION=VALUE"]);
    let info = json_of(&["info", &control, "--json"]);
    assert_eq!(info["filters"][2]["options"]["read"], "3ms");
}

#[test]
fn a_throttle_delivers_its_rate() {
    let served = Served::start("null:1G", &["--filter", "throttle:iops-total=300"]);
    // The rate is that of the wall clock, which no machine exceeds. A busy machine may be slower,
    // but not in each round.
    let mut rounds = Vec::new();
    while !rounds.iter().any(|iops| *iops > 150.0) {
        let load = ["--iodepth", "32", "--runtime", "1", "--bs", "4k"];
        let iops = bench(&served, &load)["iops"].as_f64().unwrap();
        rounds.push(iops);
        // The rate is more accurate in fact, as tools/bench/filters.py measures.
        assert!(iops < 360.0 && rounds.len() < 10, "{rounds:?}");
    }
    let stats = json_of(&["stats", &served.api(), "--json"]);
    let median = |name| stage(&stats, "read", name)["p50_ns"].as_f64().unwrap();
    assert!(median("queue") > 0.8 * median("total"));
}

/// The latencies that were recorded of one disk delay another disk.
#[test]
fn a_slow_disk_is_replayed_by_its_statistics() {
    // Delays every other request. The delay that a busy machine adds is short in comparison.
    let slow = Served::start("null:1G", &["--inject", "storage=100ms"]);
    slow.load(20, &["--iodepth", "1"]);
    let dir = disk_dir();
    let file = dir.path().join("stats.json");
    std::fs::write(&file, stdout_of(&["stats", &slow.api(), "--json"])).unwrap();
    let replay = Served::start("null:1G", &["--filter", "delay"]);
    let histogram = format!("histogram={}", file.display());
    set(&replay, &["delay", &histogram, "seed=3"]);
    replay.load(60, &["--iodepth", "1"]);
    let mean = |served: &Served, name| {
        let stats = json_of(&["stats", &served.api(), "--json"]);
        stage(&stats, "read", name)["mean_ns"].as_f64().unwrap()
    };
    let (recorded, replayed) = (mean(&slow, "device"), mean(&replay, "queue"));
    let ratio = replayed / recorded;
    assert!((0.5..2.0).contains(&ratio), "{recorded} {replayed}");
}

/// Starts a server for NBD clients, on the socket `n`. Returns the server and the URI of its disk.
fn by_nbd(disk: &str, filters: &[&str]) -> (Served, String) {
    let dir = crate::support::short_dir();
    let socket = dir.path().join("n");
    let mut command = crate::support::fathom();
    command.args(["serve", disk, "--nbd"]);
    command.arg(format!("unix:{}", socket.display()));
    command.arg("--api").arg(dir.path().join("c"));
    filters.iter().for_each(|filter| {
        command.args(["--filter", filter]);
    });
    let mut served = Served::spawn(command, dir);
    served.wait_for("NBD clients connect");
    (served, format!("nbd+unix:///?socket={}", socket.display()))
}

fn qemu_io(uri: &str, commands: &[&str]) -> Command {
    let mut qemu_io = Command::new("qemu-io");
    // By default, qemu-io makes every write durable at once.
    qemu_io.args(["-t", "writeback", "-f", "raw", uri]);
    commands.iter().for_each(|command| {
        qemu_io.args(["-c", command]);
    });
    qemu_io
}

#[test]
fn reads_sent_together_are_delayed_together() {
    let (served, uri) = by_nbd("memory:1M", &["delay:read=500ms"]);
    let read = |n: usize| {
        let reads: Vec<_> = (0..n).map(|n| format!("aio_read {n}k 4k")).collect();
        let reads = reads.iter().map(String::as_str).chain(["aio_flush"]);
        let output = qemu_io(&uri, &reads.collect::<Vec<_>>()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(text.matches("read 4096/4096").count(), n, "{text}");
        let stats = json_of(&["stats", &served.api(), "--json"]);
        stage(&stats, "read", "queue")["max_ns"].as_f64().unwrap()
    };
    // The server's own measurement does not include the time that the program takes to start.
    let alone = read(1);
    assert!(alone >= 500e6, "{alone}");
    // If the server delayed one read after the other, the last one would wait for all of them.
    let longest = read(15);
    assert!(longest < 7.0 * alone, "{longest} after {alone}");
}

/// Neither a disconnecting client nor the end of the server waits for requests that hang.
#[test]
fn a_client_leaves_whatever_its_requests_wait_for() {
    for filter in [
        "fault:hang=yes,op=read",
        "delay:read=1000s",
        "throttle:bps-total=1",
    ] {
        let (mut served, uri) = by_nbd("memory:1M", &[filter]);
        let reads = ["aio_read 0 4k", "aio_read 64k 4k", "aio_flush"];
        let mut client = qemu_io(&uri, &reads).stdout(Stdio::null()).spawn().unwrap();
        crate::support::eventually("a read is in flight", || {
            let stats = json_of(&["stats", &served.api(), "--json"]);
            (stats["in_flight"] != 0).then_some(())
        });
        client.kill().unwrap();
        client.wait().unwrap();
        // The server serves other clients.
        let output = qemu_io(&uri, &["length"]).output().unwrap();
        assert!(output.status.success(), "{filter}");
        assert_eq!(served.terminate().0, Some(0), "{filter}");
    }
}

/// When the server is killed, the image has the data that was flushed, and nothing else.
#[test]
fn what_is_not_flushed_is_lost_with_the_server() {
    let dir = disk_dir();
    let image = dir.path().join("image");
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let (mut served, uri) = by_nbd(image.to_str().unwrap(), &["fault:writes=lost"]);
    // qemu-io flushes when it ends, so the server must be killed before.
    let writes = ["write -P 1 0 64k", "flush", "write -P 2 32k 64k"];
    let then = ["read -P 2 32k 64k", "sleep 600000"];
    let mut client = qemu_io(&uri, &[&writes[..], &then].concat());
    let mut client = client.stdout(Stdio::null()).spawn().unwrap();
    crate::support::eventually("the read", || {
        let stats = stdout_of(&["stats", &served.api()]);
        stats.contains("read ").then_some(())
    });
    served.child.kill().unwrap();
    served.child.wait().unwrap();
    client.kill().unwrap();
    client.wait().unwrap();
    let bytes = std::fs::read(image).unwrap();
    assert!(bytes[..64 << 10].iter().all(|byte| *byte == 1));
    assert!(bytes[64 << 10..].iter().all(|byte| *byte == 0));
}

#[test]
fn front_ends_wait_before_they_are_served() {
    let served = Served::start("null:1G", &["--filter", "delay:connect=300ms"]);
    let start = Instant::now();
    served.load(1, &[]);
    // The front-end never waits for a shorter time, however slow the machine is.
    assert!(start.elapsed() >= Duration::from_millis(300));
}

#[test]
fn what_is_written_goes_to_the_overlay() {
    let dir = disk_dir();
    let image = dir.path().join("image");
    std::fs::write(&image, vec![0x5a; 1 << 20]).unwrap();
    let overlays = dir.path().join("overlays");
    std::fs::create_dir(&overlays).unwrap();
    let filter = format!("cow:dir={}", overlays.display());
    let path = image.to_str().unwrap();
    for format in ["raw", "qcow2"] {
        let converted = dir.path().join("qcow2");
        let disk = match format {
            "raw" => path,
            _ => {
                crate::support::convert(&image, fathom_formats::Format::Qcow2, &converted);
                converted.to_str().unwrap()
            }
        };
        let before = std::fs::read(disk).unwrap();
        let args = ["--filter", &filter, "--format", format];
        let mut served = Served::start(disk, &args);
        served.load(500, &["--rw", "randwrite", "--verify"]);
        refused(1, &["resize", &served.api()], &["cow"]);
        assert_eq!(std::fs::read_dir(&overlays).unwrap().count(), 0);
        assert_eq!(served.terminate().0, Some(0));
        assert!(std::fs::read(disk).unwrap() == before, "{format}");
    }
    let refusals: [(&[&str], &str); 2] = [
        (&["--filter", "cow", "--offset", "512"], "--offset"),
        (&["--filter", "cow:dir=/no/such/dir"], "/no/such/dir"),
    ];
    for (args, word) in refusals {
        let serve = ["serve", path, "--vhost-user", "/tmp/not-made"];
        refused(1, &[&serve[..], args].concat(), &[word]);
    }
}

/// Counts the errors that a filter causes, by operation.
#[test]
fn errors_are_counted() {
    let filter = "fault:op=read,error=EIO,probability=0.3";
    let mut served = Served::start("memory:1M", &["--filter", filter]);
    let wrong = |stats: &Value, op: &str| {
        let ops = stats["operations"].as_array().unwrap();
        let op = ops.iter().find(|entry| entry["op"] == op).unwrap();
        op["errors"].as_u64().unwrap()
    };
    let load = [
        "--rw",
        "randrw",
        "--number-ios",
        "600",
        "--continue-on-error",
    ];
    let socket = served.arg("s");
    let seen =
        crate::support::run(&[&["bench", "--vhost-user", &socket, "--json"], &load[..]].concat());
    let seen: Value = serde_json::from_slice(&seen.stdout).unwrap();
    let errors = seen["errors"].as_u64().unwrap();
    assert!(errors > 0);
    // The load gets its last replies before the server counts them.
    crate::support::eventually("the count", || {
        let stats = json_of(&["stats", &served.api(), "--json"]);
        (wrong(&stats, "read") == errors && wrong(&stats, "write") == 0).then_some(())
    });
    let line = format!("answered with an error: {errors} read\n");
    let text = stdout_of(&["stats", &served.api()]);
    assert!(text.contains(&line), "{text}");
    let (_, last) = served.terminate();
    assert!(last.contains(&line), "{last}");
}

/// A request that changes several filters changes all of them or none.
#[test]
fn change_of_filters_that_fails_changes_none() {
    let before = ["delay:read=1ms", "throttle:iops-total=1000000"];
    let filters = before.map(|filter| ["--filter", filter]).concat();
    let served = Served::start("null:1G", &filters);
    let client = Client::connect(Path::new(&served.api())).unwrap();
    let listed: Value = client.get(&["v1", "disks"]).send().unwrap();
    let mut options = listed["disks"][0]["options"].clone();
    let name = options["name"].as_str().unwrap().to_owned();
    let place = ["v1", "disks", &name];
    let mut with = |delay: &str, throttle: &str| {
        options["filters"] = json!([delay, throttle]);
        client.put(&place).json(&options).send::<Value>()
    };
    // The group of a throttle filter cannot be changed.
    let refused = with("delay:read=5ms", "throttle:group=all,iops-total=1000000");
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("group"), "{refused}");
    let filters = |shown: &Value| shown["options"]["filters"].clone();
    let shown: Value = client.get(&place).send().unwrap();
    assert_eq!(filters(&shown), json!(before));
    let changed = with("delay:read=5ms", before[1]).unwrap();
    assert_eq!(filters(&changed), json!(["delay:read=5ms", before[1]]));
}
