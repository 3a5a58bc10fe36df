//! Tests moves of disks in which nothing fails.

use crate::pair::{Pair, changes, ends_well, guest, listed, pull, wait_for_phase};
use crate::support::{Served, eventually, refused, stdout_of};
use fathom_client::Client;
use serde_json::{Value, json};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

#[test]
fn a_disk_comes_with_all_that_was_changed_meanwhile() {
    for (from, to) in [
        ("raw", "raw"),
        ("qcow2", "raw"),
        ("raw", "qcow2"),
        ("qed", "qed"),
    ] {
        let pair = Pair::new(from, to);
        let mut source = pair.source();
        let load = changes(&source);
        let mut target = pair.target();
        wait_for_phase(&target, "ready");
        // The guest stops at the source and resumes at the target.
        drop(load);
        ends_well(guest(&target));
        wait_for_phase(&target, "done");
        assert_eq!(pull(&target)["left"], 0);
        source.terminate();
        target.terminate();
        pair.check_same();
    }
}

#[test]
fn holes_stay_holes() {
    let pair = Pair::new("raw", "raw");
    let source = pair.source();
    let target = pair.target();
    wait_for_phase(&target, "ready");
    drop((source, target));
    pair.check_same();
    let blocks = |name: &str| pair.path(name).metadata().unwrap().blocks();
    assert!(blocks("to") < blocks("from") + (8 << 20) / 512);
}

#[test]
fn a_guest_waits_until_it_has_left_where_it_was() {
    let pair = Pair::new("raw", "raw");
    let source = pair.source();
    let load = changes(&source);
    let target = pair.target();
    let early = guest(&target);
    eventually("it says why", || {
        let problem = pull(&target)["problem"].to_string();
        problem
            .contains("the disk's guest is running here")
            .then_some(())
    });
    std::thread::sleep(Duration::from_millis(300));
    let stats = stdout_of(&["stats", &target.api(), "--json"]);
    let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
    assert_eq!(
        stats["operations"].as_array().expect("operations").len(),
        0,
        "{stats}"
    );
    drop(load);
    ends_well(early);
    wait_for_phase(&target, "done");
    drop((source, target));
    pair.check_same();
}

#[test]
fn a_guest_that_goes_away_again_leaves_the_disk_where_it_is() {
    let pair = Pair::new("raw", "raw");
    let source = pair.source();
    let load = changes(&source);
    let target = pair.target();
    let mut early = guest(&target);
    eventually("it waits", || {
        pull(&target)["problem"].is_string().then_some(())
    });
    early.kill().unwrap();
    early.wait().unwrap();
    eventually("nobody wants it", || {
        target
            .log()
            .contains("front-end disconnected")
            .then_some(())
    });
    drop(load);
    // A guest connects to the source again and changes the disk once more.
    source.load(500, &["--rw", "randwrite"]);
    wait_for_phase(&target, "ready");
    ends_well(guest(&target));
    wait_for_phase(&target, "done");
    drop((source, target));
    pair.check_same();
}

#[test]
fn moved_disk_is_refused_to_guests_also_after_an_upgrade() {
    let pair = Pair::new("raw", "raw");
    let source = pair.source();
    let target = pair.target();
    ends_well(guest(&target));
    wait_for_phase(&target, "done");
    let socket = source.arg("s");
    let bench = ["bench", "--vhost-user", &socket, "--number-ios", "1"];
    refused(1, &bench, &["failed"]);
    eventually("it says why", || {
        let log = source.log();
        log.contains("the disk has moved to another server")
            .then_some(())
    });
    eventually("the other one has left", || {
        let connections = listed(&source)["nbd"]["connections"].clone();
        connections.as_array()?.is_empty().then_some(())
    });
    source.upgrade();
    refused(1, &bench, &["failed"]);
    drop(target);
}

#[test]
fn the_speed_is_bounded() {
    let pair = Pair::new("raw", "raw");
    let _source = pair.source();
    let args = pair.target_args();
    let mut args: Vec<_> = args.iter().map(String::as_str).collect();
    args.extend(["--pull-speed", "4M"]);
    let begin = std::time::Instant::now();
    let target = crate::support::Served::start(&pair.arg("to"), &args);
    wait_for_phase(&target, "ready");
    let copied = pull(&target)["copied"].as_u64().unwrap() as f64;
    // Some data is in flight when the disk is ready.
    assert!(copied > 10e6);
    let rate = (copied - 10e6) / begin.elapsed().as_secs_f64();
    assert!(rate < 6.0 * 1024.0 * 1024.0, "{rate}");
}

#[test]
fn the_speed_is_changed_while_the_disk_comes() {
    let pair = Pair::new("raw", "raw");
    let _source = pair.source();
    let args = pair.target_args();
    let mut args: Vec<_> = args.iter().map(String::as_str).collect();
    args.extend(["--pull-speed", "64k"]);
    let target = Served::start(&pair.arg("to"), &args);
    let client = Client::connect(Path::new(&target.api())).unwrap();
    let jobs: Value = client.get(&["v1", "jobs"]).send().unwrap();
    let job = &jobs["jobs"][0];
    assert_eq!(job["kind"], "pull");
    assert_eq!(job["speed"], 64 << 10);
    let change = client.patch(&["v1", "jobs", job["id"].as_str().unwrap()]);
    let job: Value = change.json(&json!({"speed": null})).send().unwrap();
    assert_eq!(job["speed"], Value::Null);
    wait_for_phase(&target, "ready");
}

#[test]
fn target_ends_in_time_although_the_source_does_not_answer() {
    let pair = Pair::new("raw", "raw");
    let source = pair.source();
    let own = pair.target_args();
    let own: Vec<_> = own.iter().map(String::as_str).collect();
    // The timeout is shorter than the time for which the target waits for a reply of the source.
    let slowly = ["--pull-speed", "2M", "--stop-timeout", "5s"];
    let slowly = [&own[..], &slowly].concat();
    let mut target = Served::start(&pair.arg("to"), &slowly);
    // `fathom list` would also query the source, which is stopped.
    let api = target.api();
    let copied = || {
        let info = stdout_of(&["info", &api, "--json"]);
        let info: serde_json::Value = serde_json::from_str(&info).unwrap();
        info["pull"]["copied"].as_u64().unwrap_or_default()
    };
    eventually("something is copied", || (copied() > 0).then_some(()));
    source.signal("STOP");
    eventually("nothing is copied any more", || {
        let before = copied();
        std::thread::sleep(Duration::from_millis(700));
        (copied() == before).then_some(())
    });
    assert_eq!(target.terminate().0, Some(0), "{}", target.log());
    assert!(!target.log().contains("abandoned"), "{}", target.log());
    source.signal("CONT");
}
