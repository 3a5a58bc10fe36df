//! Checks the rules, alerts and dashboard of packaging/ with a real Prometheus, on a server whose
//! disks are busy, slow and broken.

use crate::metrics::{server, uri};
use crate::support::prometheus::{Prometheus, curl, program, value};
use crate::support::{Kept, Served, as_arg, disk_dir, eventually, fathom, short_dir, stdout_of};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Returns the path of a file in packaging/.
fn packaged(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../packaging")
        .join(name)
}

fn rules() -> Vec<String> {
    let files = ["fathom.rules.yml", "fathom.alerts.yml"];
    let paths = files.map(|file| packaged("prometheus").join(file));
    { paths.iter() }
        .map(|path| as_arg(&path.canonicalize().unwrap()))
        .collect()
}

#[test]
fn rules_are_sound_and_alerts_fire_when_they_are_to() {
    for (args, what) in [
        (["check", "rules"], rules()),
        (
            ["test", "rules"],
            vec![as_arg(&packaged("prometheus/tests.yml"))],
        ),
    ] {
        let output = Command::new(program("promtool"))
            .args(args)
            .args(what)
            .output()
            .expect("promtool is there after `make setup`");
        let said =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
    }
    let tests = fs::read_to_string(packaged("prometheus/tests.yml")).unwrap();
    let alerts = fs::read_to_string(packaged("prometheus/fathom.alerts.yml")).unwrap();
    let names = alerts.lines().filter_map(|line| line.split_once("alert: "));
    for (_, alert) in names {
        assert!(tests.contains(alert), "{alert} has no test");
    }
}

/// A server with disks of all kinds that metrics distinguish, and with a load on each.
struct Busy {
    address: String,
    /// Loads, which end before their server.
    _loads: Vec<Kept>,
    _served: Served,
    /// The server from which one of the disks is pulled.
    _far: Served,
    _dirs: [TempDir; 2],
}

impl Busy {
    fn start() -> Busy {
        let (sockets, images) = (short_dir(), disk_dir());
        let (socket, image) = (sockets.path().join("s"), images.path().join("image"));
        let (socket, image) = (as_arg(&socket), as_arg(&image));
        stdout_of(&["img", "create", "-q", "-f", "qcow2", &image, "64M"]);
        let path = |name: &str| as_arg(&sockets.path().join(name));
        let (nbd, record, comes) = (path("n"), path("record"), path("comes"));
        let listen = format!("unix:{nbd}");
        let mounted = path("mounted");
        fs::write(&mounted, "").unwrap();
        let far = Served::start("memory:16M", &["--nbd", &listen, "--nbd-move"]);
        let (served, address) = server(&format!(
            "[pool.p]\nthreads = 1\n\
             [[disk]]\nname = 'file'\nimage = '{image}'\nformat = 'qcow2'\nvhost-user = '{socket}'\nalarms = ['older=10s']\n\
             [[disk]]\nname = 'slow'\nimage = 'memory:16M'\nfilters = ['delay:read=30ms,write=30ms', 'throttle:iops-total=100000']\n\
             alarms = ['read:p50=1ms']\n\
             [[disk]]\nname = 'broken'\nimage = 'memory:16M'\nfilters = ['fault:error=EIO,op=write']\n\
             [[disk]]\nname = 'pooled'\nimage = 'memory:16M'\npool = 'p'\nfuse = '{mounted}'\n\
             [[disk]]\nname = 'comes'\nimage = 'memory:16M'\nvhost-user = '{comes}'\n\
             pull = 'nbd+unix:///?socket={nbd}'\npull-record = '{record}'\n"
        ));
        let vhost_user = load(&["--vhost-user", &socket, "--iodepth", "8"]);
        let by_nbd = ["slow", "broken", "pooled"]
            .map(|disk| load(&["--nbd", &uri(&served, disk), "--iodepth", "4"]));
        Busy {
            address,
            _loads: by_nbd.into_iter().chain([vhost_user]).collect(),
            _served: served,
            _far: far,
            _dirs: [sockets, images],
        }
    }
}

/// Starts a load that reads and writes until it is dropped.
fn load(where_to: &[&str]) -> Kept {
    let mut bench = fathom();
    bench.args(["bench", "--rw", "randrw", "--overwrite", "--fsync", "64"]);
    bench.args(["--continue-on-error", "--runtime", "1h"]);
    bench.args(where_to);
    Kept(bench.stdout(Stdio::null()).spawn().expect("fathom bench"))
}

#[test]
fn a_server_that_is_watched_has_its_values_and_its_alerts() {
    let busy = Busy::start();
    for feature in ["exemplar-storage", "native-histograms"] {
        let dir = short_dir();
        let feature = format!("--enable-feature={feature}");
        let prometheus = Prometheus::with_rules(dir.path(), &busy.address, &rules(), &[&*feature]);
        values(&prometheus);
        for (alert, disk) in [
            ("FathomErrors", "broken"),
            ("FathomAlarmRaised", "slow"),
            // (This alert takes minutes to fire.)
            ("FathomHeldBack", "slow"),
        ] {
            prometheus.query(&format!("ALERTS{{alertname='{alert}',disk='{disk}'}}"));
        }
        let firing = "ALERTS{alertstate='firing',alertname=~'FathomErrors|FathomAlarmRaised'}";
        eventually("two alerts fire, and for these disks alone", || {
            let found = prometheus.ask(firing)?;
            let mut disks: Vec<_> = { found.iter() }
                .map(|one| one["metric"]["disk"].as_str().unwrap().to_owned())
                .collect();
            disks.sort();
            (disks == ["broken", "slow"]).then_some(())
        });
    }
}

/// Checks that each recording rule has recorded something, and that the values known beforehand are
/// right.
fn values(prometheus: &Prometheus) {
    let text = fs::read_to_string(packaged("prometheus/fathom.rules.yml")).unwrap();
    let names: Vec<_> = { text.lines() }
        .filter_map(|line| Some(line.split_once("record: ")?.1))
        .collect();
    assert!(names.len() > 10);
    for name in names {
        prometheus.query(name);
    }
    let held = "disk_op_stage:fathom_stage_duration_seconds:mean5m\
                {disk='slow',op='read',stage='queue'}";
    let held = prometheus.query(held)[0];
    assert!((0.03..1.0).contains(&held), "{held}");
    let half = "disk_op:fathom_request_duration_seconds:p50_5m{disk='slow',op='read'}";
    let half = prometheus.query(half)[0];
    assert!((0.02..1.0).contains(&half), "{half}");
    let shares = "sum without (stage) (disk_stage:fathom_stage_seconds:share5m)";
    let found = eventually("shares of all four disks", || {
        prometheus.ask(shares).filter(|found| found.len() == 4)
    });
    for share in found.iter().map(value) {
        assert!((0.999..1.001).contains(&share), "{found:?}");
    }
}

/// Queries of the dashboard that may find nothing: the title of the panel, a part of the query, and
/// the reason.
const MAY_BE_EMPTY: &[(&str, &str, &str)] = &[
    (HINTS, "stage=~\"map\"", "the disks here have no tables"),
    (
        HINTS,
        "wake|finish|notify",
        "how fast the machine is decides",
    ),
    (HINTS, "worker_cpu", "how busy the machine is decides"),
    (HINTS, "queue_size", "the load leaves room in its queue"),
    (HINTS, "< 0.5 and", "the load asks all the time"),
];

const HINTS: &str = "What holds it back";

#[test]
fn each_query_of_the_dashboard_finds_something() {
    let busy = Busy::start();
    let dir = short_dir();
    let prometheus = Prometheus::start(
        dir.path(),
        &busy.address,
        &["--enable-feature=exemplar-storage"],
    );
    let text = fs::read_to_string(packaged("grafana/fathom.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let mut queries = Vec::new();
    collect(&dashboard, "", &mut queries);
    assert!(queries.len() > 50, "{}", queries.len());
    for (panel, query) in &queries {
        let excused =
            |(title, part, _): &&(&str, &str, &str)| title == panel && query.contains(part);
        let answer = || prometheus.ask(&substituted(query));
        if MAY_BE_EMPTY.iter().any(|one| excused(&one)) {
            answer();
            continue;
        }
        eventually(&format!("{panel}: {query}"), || {
            // A division of zero by zero yields NaN.
            let found = answer()?.iter().map(value).any(|value| !value.is_nan());
            found.then_some(())
        });
    }
    for (title, part, why) in MAY_BE_EMPTY {
        let meant = |(panel, query): &(String, String)| panel == title && query.contains(part);
        assert!(queries.iter().any(meant), "{title}, {part} ({why}) is gone");
    }
}

/// Collects all queries in a part of the dashboard, with the titles of their panels.
fn collect(value: &Value, title: &str, to: &mut Vec<(String, String)>) {
    match value {
        Value::Object(fields) => {
            let own = fields.get("title").or(fields.get("name"));
            let title = own.and_then(Value::as_str).unwrap_or(title);
            if let Some(Value::String(query)) = fields.get("expr") {
                to.push((title.to_owned(), query.clone()));
            }
            fields.values().for_each(|field| collect(field, title, to));
        }
        Value::Array(all) => all.iter().for_each(|one| collect(one, title, to)),
        _ => {}
    }
}

/// Replaces variables as Grafana does when all values are selected.
fn substituted(query: &str) -> String {
    let variables = [
        ("$__rate_interval", "30s"),
        ("$__range", "1m"),
        ("$instance", ".+"),
        ("$disk", ".+"),
        ("$op", ".+"),
    ];
    let query = { variables.iter() }.fold(query.to_owned(), |query, (name, value)| {
        query.replace(name, value)
    });
    assert!(!query.contains('$'), "{query}");
    query
}

/// Returns the table that docs/metrics.md should have for this page: names as in samples, and all
/// labels except those of a histogram's buckets.
fn table(page: &str) -> String {
    let mut out = "| metric | type | labels | |\n|---|---|---|---|\n".to_owned();
    let mut lines = page.lines().peekable();
    while let Some(line) = lines.next() {
        let Some((name, help)) = line
            .strip_prefix("# HELP ")
            .and_then(|rest| rest.split_once(' '))
        else {
            continue;
        };
        let kind = lines.next().unwrap().rsplit_once(' ').unwrap().1;
        let name = match kind {
            "counter" => format!("{name}_total"),
            "info" => format!("{name}_info"),
            _ => name.to_owned(),
        };
        let mut labels = BTreeSet::new();
        while let Some(sample) = lines.next_if(|line| !line.starts_with("# HELP ")) {
            let pairs = sample.split_once('{').map_or("", |(_, rest)| rest);
            let pairs = pairs.split_once('}').map_or("", |(pairs, _)| pairs);
            let names = pairs.split("\",").filter_map(|pair| pair.split_once("=\""));
            labels.extend(names.map(|(label, _)| label).filter(|label| *label != "le"));
        }
        let labels: Vec<_> = labels.into_iter().collect();
        let labels = labels.join(", ");
        writeln!(out, "| `{name}` | {kind} | {labels} | {help} |").unwrap();
    }
    out
}

#[test]
fn documentation_has_all_metrics() {
    let doc = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    let doc = fs::read_to_string(doc).unwrap();
    let busy = Busy::start();
    let url = format!("http://{}/metrics", busy.address);
    let started = Instant::now();
    loop {
        let table = table(&curl(&["-H", "Accept: application/openmetrics-text", &url]));
        if doc.contains(&table) {
            return;
        }
        // By then, everything has happened that the page can show.
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "docs/metrics.md should have this table:\n{table}"
        );
        sleep(Duration::from_millis(100));
    }
}
