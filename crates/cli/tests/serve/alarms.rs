//! Checks `--alarm`: when alarms are raised and cleared, and which stage of requests they name.

use crate::support::{Kept, Served, eventually, fathom, refused, stdout_of};
use serde_json::Value;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

/// Starts a client that writes the server's events to the file `events`.
pub fn events(served: &Served) -> Kept {
    let file = File::create(served.path("events")).unwrap();
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--no-buffer", "--unix-socket", &served.api()]);
    curl.arg("http://fathom/v1/events").stdout(file);
    Kept(
        curl.stdin(Stdio::null())
            .spawn()
            .expect("curl is installed"),
    )
}

/// Waits for the first event of this kind about this alarm, and returns it.
fn event(path: &Path, kind: &str, alarm: &str) -> Value {
    eventually(kind, || {
        let text = fs::read_to_string(path).unwrap();
        let lines = text
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok());
        { lines }.find(|line| line["event"] == kind && line["alarm"] == alarm)
    })
}

fn info(served: &Served) -> Value {
    let info = stdout_of(&["info", &served.api(), "--json"]);
    serde_json::from_str(&info).unwrap()
}

#[test]
fn alarm_of_a_percentile_names_the_slowest_stage() {
    let served = Served::start(
        "memory:16M",
        &[
            "--filter",
            "delay:read=30ms",
            "--alarm",
            "read:p90=10ms",
            "--alarm",
            "write:p90=10ms",
        ],
    );
    let _events = events(&served);
    let load = served.start_load(1_000_000_000, &["--iodepth", "32"]);
    let load = Kept(load);
    let raised = event(&served.path("events"), "alarm", "read:p90=10ms");
    assert_eq!(raised["stage"], "queue", "{raised}");
    assert!(
        raised["text"]
            .as_str()
            .unwrap()
            .starts_with("p90 of read is "),
        "{raised}"
    );
    let slowest = &raised["requests"][0];
    assert_eq!(
        (&slowest["op"], &slowest["longest"]),
        (&"read".into(), &"queue".into())
    );
    assert!(slowest["total_ns"].as_u64().unwrap() >= 30_000_000);
    let info = info(&served);
    assert_eq!(info["alarms"][0]["raised"], true, "{info}");
    assert_eq!(info["alarms"][1]["times"], 0, "{info}");
    assert!(
        served
            .log()
            .contains("alarm read:p90=10ms raised: p90 of read is ")
    );
    // The alarm is cleared when requests are no longer delayed.
    drop(load);
    stdout_of(&["set", &served.api(), "delay", "read=0s"]);
    let _load = Kept(served.start_load(1_000_000_000, &["--iodepth", "32"]));
    event(&served.path("events"), "alarm-over", "read:p90=10ms");
}

#[test]
fn a_request_that_does_not_end_is_told_while_it_has_not() {
    let served = Served::start(
        "memory:16M",
        &["--filter", "delay:read=4s", "--alarm", "older=500ms"],
    );
    let _events = events(&served);
    let mut load = served.start_load(1, &[]);
    let raised = event(&served.path("events"), "alarm", "older=500ms");
    assert!(load.try_wait().unwrap().is_none(), "it has ended");
    assert_eq!(raised["stage"], "queue", "{raised}");
    assert!(
        raised["text"]
            .as_str()
            .unwrap()
            .starts_with("a read request is in flight for "),
        "{raised}"
    );
    assert_eq!(raised["requests"][0]["op"], "read");
    assert!(load.wait().unwrap().success());
    event(&served.path("events"), "alarm-over", "older=500ms");
    assert_eq!(info(&served)["alarms"][0]["times"], 1);
}

#[test]
fn percentile_is_raised_by_a_disk_that_stalls() {
    let disk = ["--filter", "delay:read=10m", "--alarm", "read:p99=100ms"];
    let more = ["--alarm", "write:p99=100ms", "--alarm", "p50=100ms"];
    let served = Served::start("memory:16M", &[disk, more].concat());
    let _events = events(&served);
    let _load = Kept(served.start_load(1, &[]));
    for alarm in ["read:p99=100ms", "p50=100ms"] {
        let raised = event(&served.path("events"), "alarm", alarm);
        assert_eq!(raised["stage"], "queue", "{raised}");
        let text = raised["text"].as_str().unwrap();
        assert!(
            text.contains("0 of 0 completed requests took longer; in flight for longer: 1"),
            "{text}"
        );
        assert_eq!(raised["requests"][0]["op"], "read");
    }
    let info = info(&served);
    assert_eq!(info["alarms"][1]["times"], 0, "no write waits: {info}");
}

#[test]
fn window_of_an_alarm_begins_with_the_alarm() {
    let served = Served::start("memory:16M", &["--filter", "delay:read=300ms"]);
    served.load(300, &["--iodepth", "32"]);
    stdout_of(&["set", &served.api(), "delay", "read=0s"]);
    let _events = events(&served);
    let alarms = r#"alarms=["read:p90=250ms", "p50=100ns"]"#;
    stdout_of(&["disk", "change", &served.api(), alarms]);
    // The new requests are so few that the earlier slow ones would raise the p90 alarm, if they
    // counted.
    served.load(2000, &[]);
    event(&served.path("events"), "alarm", "p50=100ns");
    let alarm = &info(&served)["alarms"][0];
    assert_eq!(alarm["times"], 0, "of requests before it: {alarm}");
}

#[test]
fn what_is_no_alarm_is_refused() {
    for alarm in ["p98=5ms", "fast", "p99=0s"] {
        let args = [
            "serve",
            "memory:1M",
            "--vhost-user",
            "/nowhere/s",
            "--alarm",
            alarm,
        ];
        refused(2, &args, &["--alarm", "p99=5ms"]);
    }
    let output = fathom().args(["serve", "--help"]).output().unwrap();
    assert!(
        String::from_utf8(output.stdout)
            .unwrap()
            .contains("--alarm")
    );
}
