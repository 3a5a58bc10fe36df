//! Checks `fathom advise`: its advice in situations that are built on purpose, and its trials.

use crate::support::{Kept, Served, as_arg, disk_dir, eventually, fathom, refused, run, stdout_of};
use fathom_testing::decide;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

const THROTTLED: &str = "[[disk]]\nname = 'vm1'\nimage = 'memory:64M'\nnbd = true\nfilters = ['throttle:iops-total=500']\n";

/// Returns the options `--watch` and `--try` with the shortest rounds.
const SHORT: [&str; 7] = ["--watch", "1", "--try", "--pairs", "2", "--round", "500ms"];

/// A load of random reads.
const RANDOM: [&str; 4] = ["--rw", "randread", "--iodepth", "8"];

fn advise(served: &Served, args: &[&str]) -> Value {
    let api = served.api();
    let text = stdout_of(&[&["advise", "vm1", "--server", &api, "--json"], args].concat());
    serde_json::from_str(&text).unwrap()
}

fn options(served: &Served) -> Value {
    let shown = stdout_of(&["show", "vm1", "--server", &served.api(), "--json"]);
    serde_json::from_str(&shown).unwrap()
}

/// Returns the limits of the disk's throttle.
fn limits(served: &Served) -> Value {
    options(served)["filters"][0]["options"].clone()
}

/// Starts a load, and waits for its first requests.
fn load(served: &Served, args: &[&str]) -> Kept {
    let uri = format!("nbd+unix:///vm1?socket={}", served.arg("n"));
    let bench = ["bench", "--nbd", &uri, "--runtime", "10m"];
    let load = Kept::spawn(fathom().args(bench).args(args));
    wait_for_requests(served);
    load
}

fn wait_for_requests(served: &Served) {
    eventually("requests", || {
        let stats = stdout_of(&["stats", "vm1", "--server", &served.api(), "--json"]);
        let stats: Value = serde_json::from_str(&stats).unwrap();
        let operations = stats["operations"].as_array().unwrap();
        { operations.iter() }
            .any(|one| one["op"] == "read")
            .then_some(())
    });
}

#[test]
fn forgotten_throttle_is_found_tried_and_put_back() {
    let served = Served::waiting("", THROTTLED);
    let _load = load(&served, &RANDOM);
    let text = stdout_of(&["advise", "vm1", "--server", &served.api(), "--watch", "1"]);
    let command = format!(
        "fathom set vm1 throttle iops-total= --server {}",
        served.api()
    );
    for words in [
        "limited by: throttle:iops-total=500 filter",
        "1. remove the limits of the filter throttle",
        &command,
    ] {
        assert!(text.contains(words), "{text}");
    }
    decide(|| try_to_lift(&served));
    // The best change stays until the server restarts.
    let report = advise(&served, &[&SHORT[..], &["--keep"]].concat());
    assert_eq!(report["kept"], 0, "{report}");
    assert_eq!(limits(&served), json!({}));
}

fn try_to_lift(served: &Served) {
    let report = advise(served, &SHORT);
    assert_eq!(limits(served), json!({ "iops-total": "500" }));
    let changes = report["changes"].as_array().unwrap();
    assert_eq!(changes.len(), 1, "{report}");
    assert_eq!(
        (&changes[0]["option"], &report["kept"]),
        (&json!("filters"), &Value::Null)
    );
    let trial = &changes[0]["trial"];
    assert_eq!(trial["judgement"], "better", "{report}");
    let effect = &trial["effects"]["iops"];
    assert!(effect["low"].as_f64().unwrap() > 2.0, "{report}");
    assert_eq!(effect["pairs"], 2);
}

#[test]
fn interrupted_trial_puts_the_options_back() {
    let served = Served::waiting("", THROTTLED);
    let _load = load(&served, &RANDOM);
    for signal in ["INT", "TERM"] {
        let mut advise = fathom();
        advise.args([
            "advise",
            "vm1",
            "--server",
            &served.api(),
            "--watch",
            "500ms",
        ]);
        advise.args(["--try", "--pairs", "50", "--round", "1s"]);
        let advise = advise.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut advise = Kept(advise.unwrap());
        eventually("a round with the change", || {
            (limits(&served) == json!({})).then_some(())
        });
        advise.signal(signal);
        let status = eventually("its end", || advise.0.try_wait().unwrap());
        let mut stderr = String::new();
        std::io::Read::read_to_string(&mut advise.0.stderr.take().unwrap(), &mut stderr).unwrap();
        assert_eq!(status.code(), Some(130), "{stderr}");
        assert!(
            stderr.contains("'vm1' has its original options"),
            "{stderr}"
        );
        assert_eq!(limits(&served), json!({ "iops-total": "500" }));
    }
}

/// Returns a server with a qcow2 disk of 128 GiB, whose tables take 16 MiB. The cache has 64 KiB.
fn with_tiny_cache(image: &Path) -> Served {
    let create = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "preallocation=metadata",
    ];
    let created = Command::new("qemu-img")
        .args(create)
        .arg(image)
        .arg("128G")
        .status();
    assert!(created.expect("qemu-img is installed").success());
    let disk = format!(
        "[[disk]]\nname = 'vm1'\nimage = '{}'\nformat = 'qcow2'\nmetadata-cache = '64k'\nnbd = true\n",
        as_arg(image)
    );
    Served::waiting("", &disk)
}

#[test]
fn tiny_cache_of_a_large_image_grows() {
    let dir = disk_dir();
    let image = dir.path().join("large.qcow2");
    let served = with_tiny_cache(&image);
    let _load = load(&served, &RANDOM);
    let mut report = Value::Null;
    decide(|| {
        report = advise(&served, &SHORT);
        let command = report["changes"][0]["command"].as_str();
        let command = command.unwrap_or_else(|| panic!("{report}"));
        assert!(
            command.starts_with("fathom disk change vm1 metadata-cache=16M"),
            "{report}"
        );
    });
    let trial = &report["changes"][0]["trial"];
    assert_eq!(
        (&trial["pairs"], &trial["problem"]),
        (&json!(2), &Value::Null),
        "{report}"
    );
    assert_eq!(options(&served)["changed"], Value::Null);

    // The server refuses a change after the file has been replaced.
    fs::rename(&image, dir.path().join("moved.qcow2")).unwrap();
    fs::write(&image, "another file").unwrap();
    decide(|| {
        let report = advise(&served, &SHORT);
        let trial = &report["changes"][0]["trial"];
        assert_eq!(
            (&trial["judgement"], &trial["pairs"]),
            (&json!("stopped"), &json!(0))
        );
        let problem = trial["problem"].as_str().unwrap();
        assert!(problem.contains("large.qcow2"), "{problem}");
    });
}

/// Returns a server whose disk is on another server, which takes 5 ms for each read.
fn on_remote_server() -> (Served, Served) {
    let far =
        "[[disk]]\nname = 'far'\nimage = 'memory:1G'\nnbd = true\nfilters = ['delay:read=5ms']\n";
    let far = Served::waiting("", far);
    let image = format!("nbd+unix:///far?socket={}", far.arg("n"));
    let near = format!("[[disk]]\nname = 'vm1'\nimage = '{image}'\nnbd = true\n");
    (Served::waiting("", &near), far)
}

#[test]
fn sequential_reads_from_a_remote_server_are_read_ahead() {
    let (served, _far) = on_remote_server();
    let sequential = load(&served, &["--rw", "read", "--bs", "64k", "--iodepth", "1"]);
    decide(|| {
        let trial = ["--try", "--pairs", "2", "--round", "1s"];
        let report = advise(&served, &[&["--watch", "5s"], &trial[..]].concat());
        let change = &report["changes"][0];
        let command = change["command"].as_str();
        let command = command.unwrap_or_else(|| panic!("{report}"));
        assert!(
            command.contains(r#"'filters=["readahead:size=1M"]'"#),
            "{command}"
        );
        assert_eq!(change["trial"]["judgement"], "better", "{report}");
        assert_eq!(options(&served)["filters"], json!([]));
    });
    drop(sequential);

    // No data is read ahead of random reads, which wait for the other server.
    let _random = load(&served, &RANDOM);
    decide(|| {
        let report = advise(&served, &["--watch", "5s"]);
        let reason = report["nothing"].as_str();
        let reason = reason.unwrap_or_else(|| panic!("{report}"));
        assert!(reason.contains("server of the storage"), "{reason}");
    });
}

#[test]
fn nothing_is_offered_if_nothing_is_wrong() {
    let disk = "[[disk]]\nname = 'vm1'\nimage = 'memory:64M'\nnbd = true\n";
    let served = Served::waiting("", disk);
    let api = served.api();
    let idle = advise(&served, &SHORT);
    assert_eq!(
        (&idle["changes"], &idle["limiter"]["kind"]),
        (&json!([]), &json!("idle"))
    );
    assert!(
        idle["nothing"]
            .as_str()
            .unwrap()
            .contains("had no requests"),
        "{idle}"
    );

    // A client that computes for 5 ms after each read.
    let uri = format!("nbd+unix:///vm1?socket={}", served.arg("n"));
    let mut client = Command::new("qemu-io");
    client.args(["-f", "raw", &uri]);
    client.args(["-c", "read 0 4k", "-c", "sleep 5"].repeat(5000));
    let _client = Kept::spawn(&mut client);
    wait_for_requests(&served);
    decide(|| {
        let args = ["advise", "vm1", "--server", &api, "--watch", "1", "--try"];
        let text = stdout_of(&args);
        assert!(text.contains("limited by: client: keeps "), "{text}");
        assert!(
            text.contains("nothing here will help: the disk waits for its client"),
            "{text}"
        );
    });
}

#[test]
fn wrong_arguments_and_unknown_disks_are_refused() {
    refused(
        1,
        &["advise", "no-such-disk"],
        &["no disk or server 'no-such-disk'"],
    );
    let served = Served::waiting("", THROTTLED);
    let api = served.api();
    let output = run(&["advise", "vm2", "--server", &api]);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.code() == Some(1) && stderr.contains("vm2"),
        "{stderr}"
    );
    for (args, words) in [
        (&["--keep"][..], "--try"),
        (&["--watch", "61"], "from 500ms to 60s"),
        (&["--try", "--round", "1ms"], "from 500ms to 60s"),
        (&["--try", "--pairs", "1"], "must be 2 to 50"),
    ] {
        refused(
            2,
            &[&["advise", "vm1", "--server", &api], args].concat(),
            &[words],
        );
    }
}
