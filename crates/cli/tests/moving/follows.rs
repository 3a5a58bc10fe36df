//! Tests post-copy: the guest resumes at once, and the blocks that it accesses are copied first.

use crate::pair::{Pair, SIZE, changes, ends_well, pull, qemu_img, wait_for_phase};
use crate::support::{Kept, Served, as_arg, eventually, fathom, refused, short_dir, stdout_of};
use std::fs;
use std::process::{Child, Stdio};
use std::time::Duration;

/// Slow enough for the guest to be ahead of the copying.
const SLOWLY: [&str; 3] = ["--pull-post-copy", "--pull-speed", "8M"];

fn follower(pair: &Pair, args: &[&str]) -> Served {
    let own = pair.target_args();
    let own: Vec<_> = own.iter().map(String::as_str).collect();
    Served::start(&pair.arg("to"), &[&own[..], args].concat())
}

/// Starts a guest that records its writes in `state`, at either server, and verifies what it reads.
fn knowing(served: &Served, state: &str, args: &[&str]) -> Child {
    let mut bench = fathom();
    bench.args(["bench", "--vhost-user", &served.arg("s")]);
    bench.args([
        "--bs",
        "4k",
        "--iodepth",
        "8",
        "--verify",
        "--verify-state",
        state,
    ]);
    bench
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    bench.spawn().unwrap()
}

/// Writes all over the disk while it is at the source.
fn written(source: &Served, state: &str) {
    let args = ["--rw", "randwrite", "--number-ios", "6000"];
    ends_well(knowing(source, state, &args));
}

const BOTH: [&str; 4] = ["--rw", "randrw", "--rwmixtrim", "3"];

#[test]
fn a_guest_goes_on_at_once_and_its_disk_comes_after_it() {
    let pair = Pair::new("qcow2", "raw");
    let source = pair.source();
    let state = pair.arg("state");
    written(&source, &state);
    let target = follower(&pair, &SLOWLY);
    wait_for_phase(&target, "ready");
    assert!(pull(&target)["copied"] == 0, "{}", pull(&target));
    let args = [&BOTH[..], &["--runtime", "4s", "--randseed", "7"]].concat();
    let guest = knowing(&target, &state, &args);
    wait_for_phase(&target, "arriving");
    assert!(
        pull(&target)["left"].as_u64().unwrap() > SIZE / 4,
        "{}",
        pull(&target)
    );
    ends_well(guest);
    wait_for_phase(&target, "done");
    assert_eq!(pull(&target)["left"], 0);
    // The source is no longer needed.
    drop(source);
    ends_well(knowing(&target, &state, &["--verify-only"]));
    drop(target);
    // The source is not needed either when the target is restarted with the same command.
    let target = follower(&pair, &SLOWLY);
    assert!(pull(&target).is_null());
    ends_well(knowing(&target, &state, &["--verify-only"]));
}

/// If no guest changes the disk, its contents stay the same.
#[test]
fn the_rest_comes_as_it_is_and_holes_stay_holes() {
    use std::os::unix::fs::MetadataExt;
    let pair = Pair::new("qed", "raw");
    let mut source = pair.source();
    let load = changes(&source);
    let mut target = follower(&pair, &["--pull-post-copy"]);
    wait_for_phase(&target, "ready");
    drop(load);
    let begin = ["--rw", "read", "--bs", "64k", "--number-ios", "40"];
    target.load(40, &begin[..4]);
    wait_for_phase(&target, "done");
    source.terminate();
    target.terminate();
    pair.check_same();
    let blocks = pair.path("to").metadata().unwrap().blocks();
    assert!(blocks * 512 < SIZE, "{blocks}");
}

/// The target is killed at any moment under a guest that resumes when it is back.
///
/// No block that the guest has written is overwritten with a copy.
#[test]
fn the_server_here_may_be_killed_while_the_disk_follows() {
    let pair = Pair::new("raw", "raw");
    let source = pair.source();
    let state = pair.arg("state");
    written(&source, &state);
    let dir = short_dir();
    let (socket, api) = (as_arg(&dir.path().join("s")), as_arg(&dir.path().join("c")));
    let start = || {
        let mut serve = fathom();
        serve.args([
            "serve",
            &pair.arg("to"),
            "--vhost-user",
            &socket,
            "--api",
            &api,
        ]);
        serve.args(pair.target_args()).args(SLOWLY);
        Kept::spawn(&mut serve)
    };
    let mut server = start();
    let phase = || {
        let listed = stdout_of(&["list", "--json"]);
        let listed: Vec<serde_json::Value> = serde_json::from_str(&listed).unwrap();
        let own = listed
            .into_iter()
            .find(|disk| disk["vhost_user"] == socket.as_str());
        own.map(|disk| disk["pull"]["phase"].to_string())
    };
    eventually("it may come", || (phase()? == "\"ready\"").then_some(()));
    let mut guest = fathom();
    guest.args([
        "bench",
        "--vhost-user",
        &socket,
        "--verify",
        "--verify-state",
        &state,
    ]);
    guest
        .args(BOTH)
        .args(["--bs", "4k", "--iodepth", "8", "--reconnect=60s"]);
    guest.args(["--runtime", "9s", "--fsync", "50"]);
    guest.stdout(Stdio::null()).stderr(Stdio::piped());
    let guest = guest.spawn().unwrap();
    for round in 0..12u64 {
        std::thread::sleep(Duration::from_millis(150 + 61 * round));
        drop(server);
        server = start();
    }
    ends_well(guest);
    // A server with nothing left to copy reports no copying.
    eventually("incomplete", || match phase()?.as_str() {
        "\"done\"" | "null" => Some(()),
        _ => None,
    });
    drop(source);
    let mut verify = fathom();
    verify.args([
        "bench",
        "--vhost-user",
        &socket,
        "--verify",
        "--verify-only",
    ]);
    verify
        .args(["--bs", "4k", "--verify-state", &state])
        .stdout(Stdio::null());
    ends_well(verify.stderr(Stdio::piped()).spawn().unwrap());
    drop(server);
}

/// Without the source, the guest waits for blocks that are not copied yet. The guest resumes when
/// the source is back.
#[test]
fn a_guest_waits_for_the_other_server_and_loses_nothing() {
    let pair = Pair::new("raw", "raw");
    let mut source = pair.source();
    let state = pair.arg("state");
    written(&source, &state);
    let target = follower(&pair, &["--pull-post-copy", "--pull-speed", "1M"]);
    wait_for_phase(&target, "ready");
    let args = [&BOTH[..], &["--runtime", "6s", "--timeout", "60s"]].concat();
    let guest = knowing(&target, &state, &args);
    wait_for_phase(&target, "arriving");
    source.signal("KILL");
    source.end();
    eventually("it says why", || {
        pull(&target)["problem"].is_string().then_some(())
    });
    let left = || pull(&target)["left"].as_u64().unwrap();
    let before = left();
    std::thread::sleep(Duration::from_secs(1));
    assert!(before > 0 && left() == before);
    let source = pair.source();
    eventually("it goes on", || (left() < before).then_some(()));
    ends_well(guest);
    drop((source, target));
}

/// The source can be upgraded. The target, which records that it has taken the disk over,
/// reconnects.
#[test]
fn source_is_upgraded_while_its_disk_follows_the_guest() {
    let pair = Pair::new("raw", "raw");
    let source = pair.source();
    let state = pair.arg("state");
    written(&source, &state);
    let target = follower(&pair, &["--pull-post-copy", "--pull-speed", "4M"]);
    wait_for_phase(&target, "ready");
    // A move that has only begun is not interrupted by an upgrade.
    refused(1, &["upgrade", &source.api()], &["taking the disk over"]);
    let args = [&BOTH[..], &["--runtime", "4s", "--timeout", "60s"]].concat();
    let guest = knowing(&target, &state, &args);
    wait_for_phase(&target, "arriving");
    let left = || pull(&target)["left"].as_u64().unwrap();
    source.upgrade();
    let before = left();
    assert!(before > 0);
    eventually("it goes on", || (left() < before).then_some(()));
    source.upgrade();
    ends_well(guest);
    wait_for_phase(&target, "done");
    drop(source);
    ends_well(knowing(&target, &state, &["--verify-only"]));
}

/// After a restart, the target serves the blocks that it has, with or without the source.
#[test]
fn what_is_here_needs_nobody() {
    let pair = Pair::new("raw", "raw");
    let source = pair.source();
    let slowly = ["--pull-post-copy", "--pull-speed", "64k"];
    let mut target = follower(&pair, &slowly);
    wait_for_phase(&target, "ready");
    let some = ["--rw", "write", "--bs", "64k", "--size", "2M"];
    target.load(32, &some);
    drop(source);
    target.signal("KILL");
    target.end();
    let target = follower(&pair, &slowly);
    wait_for_phase(&target, "arriving");
    target.load(320, &["--rw", "randrw", "--bs", "4k", "--size", "2M"]);
    // The image has data there: that a block is a hole may be known here already.
    let mut waits = target.start_load(1, &["--rw", "read", "--offset", "50M", "--timeout", "60s"]);
    std::thread::sleep(Duration::from_millis(500));
    assert!(waits.try_wait().unwrap().is_none());
    let source = pair.source();
    assert!(waits.wait().unwrap().success());
    drop((source, target));
}

/// A guest can disconnect while the source is away: its waiting requests fail.
#[test]
fn a_guest_may_leave_while_the_other_server_is_away() {
    let pair = Pair::new("raw", "raw");
    let source = pair.source();
    let mut target = follower(&pair, &["--pull-post-copy", "--pull-speed", "64k"]);
    wait_for_phase(&target, "ready");
    let guest = Kept(target.start_load(1_000_000, &["--rw", "read", "--bs", "1M"]));
    wait_for_phase(&target, "arriving");
    drop(source);
    eventually("it says why", || {
        pull(&target)["problem"].is_string().then_some(())
    });
    drop(guest);
    eventually("it has left", || {
        target
            .log()
            .contains("front-end disconnected")
            .then_some(())
    });
    let (status, _) = target.terminate();
    assert_eq!(status, Some(0));
    // An incomplete disk is not served without its source.
    let socket = target.arg("s");
    let alone = ["serve", &pair.arg("to"), "--vhost-user", &socket];
    refused(1, &alone, &["incomplete", "--pull"]);
    // The server does not copy the rest of the disk from another source.
    let other = [&alone[..], &["--pull", "nbd://localhost:1/x"]].concat();
    refused(1, &other, &["its guest has run here"]);
}

#[test]
fn what_cannot_follow_is_refused() {
    let pair = Pair::new("raw", "qcow2");
    let source = pair.source();
    let dir = short_dir();
    let socket = as_arg(&dir.path().join("s"));
    let (to, uri) = (pair.arg("to"), pair.uri());
    let serve = ["serve", &to, "--vhost-user", &socket, "--pull-post-copy"];
    refused(2, &serve, &["--pull"]);
    let pulled = [&serve[..], &["--pull", &uri]].concat();
    let tables = [&pulled[..], &["--format", "qcow2"]].concat();
    refused(
        1,
        &tables,
        &["--pull-post-copy: applies only to raw images"],
    );
    let raw = pair.arg("raw");
    qemu_img(&["create", &raw, &SIZE.to_string()]);
    let nbd = format!("unix:{}", as_arg(&dir.path().join("n")));
    let moves = [
        "serve",
        &raw,
        "--vhost-user",
        &socket,
        "--pull",
        &uri,
        "--pull-post-copy",
    ];
    let moves = [&moves[..], &["--nbd", &nbd, "--nbd-move"]].concat();
    refused(1, &moves, &["--nbd-move"]);
    drop(source);
    assert!(fs::exists(&raw).unwrap());
}
