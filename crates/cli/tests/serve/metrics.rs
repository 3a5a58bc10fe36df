//! Checks the metrics, with curl and with Prometheus.

use crate::support::prometheus::{Prometheus, curl, program};
use crate::support::{Kept, Served, disk_dir, eventually, short_dir, stdout_of};
use crate::tenants;
use fathom_trace::SlowRequest;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};

/// A line of a page of metrics.
#[derive(Clone, Debug, PartialEq)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

/// The HTTP header by which a client requests OpenMetrics.
const OPEN_METRICS: &str = "Accept: application/openmetrics-text";

/// A page of metrics.
#[derive(Debug)]
struct Page(Vec<Sample>);

impl Page {
    fn parse(text: &str) -> Page {
        assert!(text.ends_with("# EOF\n"), "{text}");
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        // Removes exemplars.
        let lines = lines.map(|line| line.split(" # ").next().unwrap_or(line));
        Page(lines.map(sample).collect())
    }

    /// Gets the page from the API's socket.
    fn of(served: &Served) -> Page {
        Page::parse(&curl(&[
            "--unix-socket",
            &served.api(),
            "-H",
            OPEN_METRICS,
            "http://fathom/metrics",
        ]))
    }

    /// Returns the value of the only sample with this name and these labels.
    fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let found: Vec<_> = { self.0.iter() }
            .filter(|one| {
                let has = |(label, value): &(&str, &str)| {
                    one.labels.get(*label).is_some_and(|is| is == value)
                };
                one.name == name && labels.iter().all(has)
            })
            .collect();
        assert_eq!(found.len(), 1, "{name} {labels:?}: {found:?}");
        found[0].value
    }
}

fn sample(line: &str) -> Sample {
    let (series, value) = line.rsplit_once(' ').unwrap();
    let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
    let labels = labels.strip_suffix('}').unwrap();
    let pairs = labels.split_terminator("\",").map(|pair| {
        let (label, value) = pair.split_once("=\"").unwrap();
        (label.to_owned(), value.trim_end_matches('"').to_owned())
    });
    Sample {
        name: name.to_owned(),
        labels: pairs.collect(),
        value: value.parse().unwrap(),
    }
}

pub fn qemu_io(uri: &str, commands: &[&str]) {
    let mut qemu_io = Command::new("qemu-io");
    qemu_io.args(["-f", "raw", "-d", "unmap", uri]);
    qemu_io.args(commands.iter().flat_map(|command| ["-c", command]));
    // Ignores the status, because some of the commands are meant to fail.
    qemu_io.stdout(Stdio::null()).stderr(Stdio::null());
    qemu_io.status().expect("qemu-io is installed");
}

/// Starts a server with NBD, and with metrics by TCP. `more` defines its disks. Returns the server
/// and the address of the metrics.
pub fn server(more: &str) -> (Served, String) {
    let mut served = Served::waiting(", http = '127.0.0.1:0'", more);
    served.wait_for("metrics are at");
    let log = served.log();
    let at = log.split("metrics are at http://").nth(1).unwrap();
    let address = at.split("/metrics").next().unwrap().to_owned();
    (served, address)
}

pub fn uri(served: &Served, disk: &str) -> String {
    format!("nbd+unix:///{disk}?socket={}", served.arg("n"))
}

const THREE: &str = "[[disk]]\nname = 'a'\nimage = 'memory:1M'\nnbd = true\n\
    [[disk]]\nname = 'b'\nimage = 'memory:1M'\nnbd = true\nfilters = ['fault:error=EIO,op=write']\n\
    [[disk]]\nname = 'c'\nimage = 'memory:1M'\nnbd = true\nfilters = ['delay:read=30ms']\n";

#[test]
fn what_was_done_is_what_is_told() {
    let (served, address) = server(THREE);
    let all = [
        "read 0 4k",
        "read 0 8k",
        "write 0 64k",
        "flush",
        "discard 0 4k",
    ];
    for disk in ["a", "b", "c"] {
        qemu_io(&uri(&served, disk), &all);
    }
    let page = Page::of(&served);
    let of = |name, more: &[(&'static str, &'static str)]| page.value(name, more);
    assert_eq!(
        of("fathom_requests_total", &[("disk", "a"), ("op", "write")]),
        1.0
    );
    assert_eq!(
        of(
            "fathom_request_data_bytes_total",
            &[("disk", "a"), ("op", "write")]
        ),
        65536.0
    );
    assert_eq!(
        of(
            "fathom_request_data_bytes_total",
            &[("disk", "b"), ("op", "write")]
        ),
        0.0
    );
    let failed = [("disk", "b"), ("op", "write"), ("error", "EIO")];
    assert_eq!(of("fathom_request_errors_total", &failed), 1.0);
    // (qemu-io also reads a little on its own.)
    let reads = of("fathom_requests_total", &[("disk", "c"), ("op", "read")]);
    assert!(reads >= 2.0);
    let total = of(
        "fathom_request_duration_seconds_sum",
        &[("disk", "c"), ("op", "read")],
    );
    let held = [("disk", "c"), ("op", "read"), ("stage", "queue")];
    let held = of("fathom_stage_duration_seconds_sum", &held);
    assert!(held >= 0.03 * reads && total >= held, "{held} of {total}");
    let below = |le| {
        let labels = [("disk", "c"), ("op", "read"), ("le", le)];
        page.value("fathom_request_duration_seconds_bucket", &labels)
    };
    assert_eq!((below("0.02"), below("+Inf")), (0.0, reads));
    assert_eq!(
        of("fathom_nbd_client_connects_total", &[("disk", "a")]),
        1.0
    );
    assert_eq!(of("fathom_requests_in_flight", &[("disk", "a")]), 0.0);
    assert!(of("fathom_worker_cpu_seconds_total", &[("disk", "a")]) > 0.0);
    assert!(of("fathom_process_memory_bytes", &[]) > 1e6);
    // A TCP client gets the same metrics, and nothing else.
    let url = format!("http://{address}/metrics");
    let by_tcp = Page::parse(&curl(&["-H", OPEN_METRICS, &url]));
    let names = |page: &Page| -> Vec<_> { page.0.iter().map(|one| one.name.clone()).collect() };
    assert_eq!(names(&by_tcp), names(&page));
    for (method, place, status) in [
        ("GET", "/v1/disks", "404"),
        ("POST", "/v1/server/quit", "403"),
        ("POST", "/metrics", "403"),
    ] {
        let url = format!("http://{address}{place}");
        let args = [
            "-s",
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
            "-X",
            method,
            &url,
        ];
        let output = Command::new("curl").args(args).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), status, "{place}");
    }
}

#[test]
fn what_an_image_takes_and_gives_back_is_told() {
    let dir = disk_dir();
    let image = dir.path().join("image").display().to_string();
    stdout_of(&["img", "create", "-q", "-f", "qcow2", &image, "64M"]);
    let disk = format!("[[disk]]\nname = 'a'\nimage = '{image}'\nformat = 'qcow2'\n");
    let (served, _) = server(&disk);
    let value = |name: &str| {
        let name = format!("fathom_image_{name}_total");
        Page::of(&served).value(&name, &[("disk", "a")])
    };
    assert_eq!(value("clusters_allocated"), 0.0);
    let do_it = |what: &[&str]| qemu_io(&uri(&served, "a"), what);
    do_it(&["write 0 1M", "flush"]);
    // 16 clusters of data, and the clusters of the tables that name them.
    let allocated = value("clusters_allocated");
    assert!((17.0..=20.0).contains(&allocated), "{allocated}");
    do_it(&["write 0 1M", "read 0 1M"]);
    assert_eq!(value("clusters_allocated"), allocated);
    assert_eq!(value("clusters_freed"), 0.0);
    do_it(&["discard 0 512k", "flush"]);
    assert_eq!(value("clusters_freed"), 8.0);
    // The image is opened for use by each client, with an empty cache.
    let reads = value("table_reads");
    do_it(&["read 0 4k", "read 4k 4k"]);
    assert_eq!(value("table_reads"), reads + 1.0);
}

#[test]
fn a_guests_queues_are_told() {
    let served = Served::start("memory:16M", &["--iothreads", "2"]);
    let load = served.start_load(1_000_000_000, &["--queues", "2", "--iodepth", "4"]);
    let _load = Kept(load);
    let page = eventually("both queues are used", || {
        let page = Page::of(&served);
        let queue = |n: &str| {
            let queue = |one: &&Sample| {
                one.name == "fathom_queue_requests_total" && one.labels["queue"] == n
            };
            page.0.iter().find(queue).map_or(0.0, |one| one.value)
        };
        (queue("0") > 100.0 && queue("1") > 100.0).then_some(page)
    });
    assert_eq!(page.value("fathom_front_end_connected", &[]), 1.0);
    assert_eq!(page.value("fathom_front_end_connects_total", &[]), 1.0);
    for queue in ["0", "1"] {
        let of = |name| page.value(name, &[("queue", queue)]);
        assert!(of("fathom_queue_size") >= 4.0);
        assert!(of("fathom_queue_requests_in_flight") <= 4.0);
    }
    let guest = page
        .0
        .iter()
        .find(|one| one.name == "fathom_guest_info")
        .unwrap();
    let pid = _load.0.id().to_string();
    assert_eq!(
        (&*guest.labels["pid"], &*guest.labels["vmm"]),
        (&*pid, "fathom")
    );
    // A batch contains the requests that a worker takes at once: here, at most the four in flight.
    for worker in ["0", "1"] {
        let batches = page.value("fathom_worker_batch_requests_count", &[("worker", worker)]);
        assert!(batches > 0.0);
        let of_four = [("worker", worker), ("le", "4.0")];
        assert_eq!(
            page.value("fathom_worker_batch_requests_bucket", &of_four),
            batches
        );
    }
}

/// Checks that no counter decreases at an upgrade. Otherwise, Prometheus would assume a restart,
/// and count everything again.
fn only_grows(served: &Served) {
    let before = Page::of(served);
    for _ in 0..2 {
        served.upgrade();
    }
    let after = Page::of(served);
    let counted = |one: &&Sample| {
        let families = ["fathom_request", "fathom_stage", "fathom_worker"];
        let counts = ["_total", "_bucket", "_count"];
        families.iter().any(|family| one.name.starts_with(family))
            && counts.iter().any(|end| one.name.ends_with(end))
    };
    let old: Vec<_> = before.0.iter().filter(counted).collect();
    assert!(old.len() > 200);
    for one in old {
        let is_it = |now: &&Sample| now.name == one.name && now.labels == one.labels;
        let now = after.0.iter().find(is_it);
        let now = now.unwrap_or_else(|| panic!("{one:?} is gone"));
        assert!(now.value >= one.value, "{one:?} is {now:?}");
    }
}

#[test]
fn what_was_counted_only_grows_whoever_goes_on() {
    let (served, address) = server(THREE);
    for disk in ["a", "b", "c"] {
        qemu_io(&uri(&served, disk), &["read 0 4k", "write 0 4k"]);
    }
    only_grows(&served);
    // The successor has the same address.
    let url = format!("http://{address}/metrics");
    Page::parse(&curl(&["-H", OPEN_METRICS, &url]));
}

#[test]
fn all_tenants_tell_what_they_have() {
    let disks = [("a", "memory:1M", ""), ("b", "memory:1M", "")];
    let served = tenants::start(short_dir(), &disks);
    for disk in ["a", "b"] {
        let socket = tenants::socket(&served, disk);
        stdout_of(&["bench", "--vhost-user", &socket, "--number-ios", "200"]);
    }
    let page = Page::of(&served);
    for disk in ["a", "b"] {
        assert_eq!(
            page.value("fathom_requests_total", &[("disk", disk), ("op", "read")]),
            200.0
        );
    }
    let processes = page
        .0
        .iter()
        .filter(|one| one.name == "fathom_process_memory_bytes");
    assert_eq!(processes.count(), 3);
    only_grows(&served);
}

#[test]
fn slow_requests_are_kept_and_buckets_say_which() {
    let (served, address) = server(THREE);
    qemu_io(&uri(&served, "a"), &["write 0 64k", "read 0 4k"]);
    qemu_io(&uri(&served, "b"), &["write 4096 4k"]);
    qemu_io(&uri(&served, "c"), &["read 8192 4k", "write 0 4k"]);
    let api = served.api();
    let slow = |disk: &str, more: &[&str]| {
        let args = [&["slow", &api, "--disk", disk, "--json"], more].concat();
        let all: Vec<SlowRequest> = serde_json::from_str(&stdout_of(&args)).unwrap();
        all
    };
    // The delay of a filter is in the stage `queue`.
    let of_c = slow("c", &[]);
    let held = { of_c.iter() }.find(|one| one.offset == 8192).unwrap();
    assert_eq!(
        (&*held.op, held.len, &*held.longest),
        ("read", 4096, "queue")
    );
    assert!(held.total_ns >= 30_000_000 && held.stages["queue"] >= 30_000_000);
    assert!(of_c.is_sorted_by(|a, b| a.total_ns >= b.total_ns));
    let last = slow("c", &["--last", "-n", "2"]);
    assert!(last.len() == 2 && last[0].time_ms >= last[1].time_ms);
    let of_b = slow("b", &[]);
    assert!(
        of_b.iter()
            .any(|one| one.op == "write" && one.error == libc::EIO)
    );
    let table = stdout_of(&["slow", &api, "--disk", "b"]);
    assert!(
        table.contains("write 4096 at 4096, queue 1: input/output error"),
        "{table}"
    );
    // The successor has the same slow requests.
    served.upgrade();
    let ids = |all: &[SlowRequest]| -> Vec<_> { all.iter().map(|one| one.id.clone()).collect() };
    assert_eq!(ids(&slow("c", &[])), ids(&of_c));
    // The bucket of the slowest request names this request, in classic and in native histograms.
    for (series, features) in [
        ("fathom_request_duration_seconds_bucket", "exemplar-storage"),
        (
            "fathom_request_duration_seconds",
            "exemplar-storage,native-histograms",
        ),
    ] {
        let dir = short_dir();
        let features = format!("--enable-feature={features}");
        let prometheus = Prometheus::start(dir.path(), &address, &[&features]);
        assert_eq!(prometheus.query("up"), [1.0]);
        let url = format!("http://{}/api/v1/query_exemplars", prometheus.at);
        let find = || {
            let query = format!("query={series}{{disk='c',op='read'}}");
            let data = [&*query, "start=0", "end=9999999999"].map(|one| ["--data-urlencode", one]);
            let answer = curl(&[&["--get"], &data.concat()[..], &[&*url]].concat());
            let answer: Value = serde_json::from_str(&answer).unwrap();
            let all = answer["data"][0]["exemplars"].as_array()?.clone();
            all.into_iter()
                .find(|one| one["labels"]["slow"] == *of_c[0].id)
        };
        let found = eventually("the exemplar", find);
        assert_eq!(found["labels"]["stage"], "queue");
        let value: f64 = found["value"].as_str().unwrap().parse().unwrap();
        assert!(
            (value * 1e9 - of_c[0].total_ns as f64).abs() < 1e3,
            "{found}"
        );
    }
}

#[test]
fn prometheus_takes_it_in() {
    let (served, address) = server(THREE);
    for _ in 0..20 {
        qemu_io(&uri(&served, "c"), &["read 0 4k"; 3]);
    }
    let reads = Page::of(&served).value("fathom_requests_total", &[("disk", "c"), ("op", "read")]);
    let dir = short_dir();
    let classic = Prometheus::start(dir.path(), &address, &[]);
    let of_reads = "{disk='c',op='read'}";
    assert_eq!(classic.query("up"), [1.0]);
    assert_eq!(
        classic.query(&format!("fathom_requests_total{of_reads}")),
        [reads]
    );
    let quantile = |of: &str| format!("histogram_quantile(0.5, {of}{of_reads})");
    let half = classic.query(&quantile("fathom_request_duration_seconds_bucket"))[0];
    assert!((0.02..=0.05).contains(&half), "{half}");
    // With protobuf, Prometheus gets native histograms, which are more exact.
    let dir = short_dir();
    let native = Prometheus::start(
        dir.path(),
        &address,
        &["--enable-feature=native-histograms"],
    );
    let count = native.query(&format!(
        "histogram_count(fathom_request_duration_seconds{of_reads})"
    ));
    assert_eq!(count, [reads]);
    let half = native.query(&quantile("fathom_request_duration_seconds"))[0];
    let mean = "histogram_sum(fathom_request_duration_seconds{disk='c',op='read'}) / \
                histogram_count(fathom_request_duration_seconds{disk='c',op='read'})";
    let mean = native.query(mean)[0];
    assert!(
        (0.029..0.045).contains(&half) && mean > 0.03,
        "{half} {mean}"
    );
    // promtool accepts the names of the metrics, and the format for clients that do not ask for
    // one.
    let url = format!("http://{address}/metrics");
    let head = curl(&["-D", "/dev/stdout", "-o", "/dev/null", &url]);
    let kind = "content-type: text/plain; version=0.0.4";
    assert!(head.to_lowercase().contains(kind), "{head}");
    let page = curl(&["-H", "Accept:", &url]);
    assert!(!page.contains("# EOF"), "{page}");
    fs::write(dir.path().join("page"), page).unwrap();
    let checked = Command::new(program("promtool"))
        .args(["check", "metrics"])
        .stdin(fs::File::open(dir.path().join("page")).unwrap())
        .output()
        .expect("promtool is there after `make setup`");
    let said = String::from_utf8_lossy(&checked.stderr).into_owned();
    assert!(checked.status.success() && said.is_empty(), "{said}");
}

#[test]
fn how_long_a_limit_has_held_requests_back_is_told() {
    let served = Served::start("memory:16M", &["--filter", "throttle:iops-total=50"]);
    served.load(100, &["--iodepth", "8"]);
    let page = Page::of(&served);
    let held = page.value(
        "fathom_filter_held_seconds_total",
        &[("filter", "throttle")],
    );
    // All but the first requests wait 1/50 s each, one after the other.
    let took = page.value("fathom_request_duration_seconds_sum", &[("op", "read")]);
    assert!(held > 1.5 && held <= took, "{held} of {took}");
}
