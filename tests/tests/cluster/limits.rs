//! Tests limits that a cluster or its owner sets to a disk.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use fathom_tests::Place;
use fathom_tests::ceph::Cluster;

use super::{GIB, QUEUES, bench, check, done, refused, serve, wait, write_for};

/// Writes wait until the pool has space again. The writes fail only after the server's timeout.
#[test]
fn a_pool_that_is_full_holds_up_writes() {
    let (place, cluster) = (Place::new(), Cluster::start(1, GIB));
    cluster.rbd(&["create", "--size", "64M", "rbd/a"]);
    let quota =
        |bytes: &str| cluster.ceph(&["osd", "pool", "set-quota", "rbd", "max_bytes", bytes]);
    let is_full = || {
        cluster
            .ceph(&["osd", "pool", "ls", "detail"])
            .contains("full_quota")
    };
    let server = serve(&place, &cluster, "a", QUEUES);
    let state = place.path("state");
    let mut writes = bench(&server, &state, &["--rw=randwrite", "--runtime=40s"]);
    quota("4096");
    wait("a full pool", is_full);
    std::thread::sleep(Duration::from_secs(6));
    assert!(writes.try_wait().unwrap().is_none(), "it was too late");
    quota("0");
    wait("room in the pool", || !is_full());
    let said = done(writes);
    let row = said.lines().find(|line| line.starts_with("write "));
    let longest = row.and_then(|row| row.split_whitespace().last());
    let longest: f64 = longest
        .and_then(|text| text.parse().ok())
        .expect("a latency");
    assert!(longest > 2e6, "they were not held up: {said}");
    check(&server, &state);
    server.stop().unwrap();
    let args = [QUEUES, &["--server-timeout", "3s"]].concat();
    let server = place.serve("short", Path::new(&cluster.image("a")), &args);
    let lost = place.path("lost");
    let writes = bench(&server, &lost, &["--rw=randwrite", "--runtime=60s"]);
    quota("4096");
    let ended = writes.wait_with_output().unwrap();
    assert!(!ended.status.success());
    quota("0");
    server.stop().unwrap();
}

/// `rbd rm` does not remove the image while a guest uses it, but may do so afterwards.
#[test]
fn an_image_in_use_is_not_removed() {
    let (place, cluster) = (Place::new(), Cluster::start(1, GIB));
    cluster.rbd(&["create", "--size", "64M", "rbd/a"]);
    let server = serve(&place, &cluster, "a", QUEUES);
    let state = place.path("state");
    write_for(&server, &state, "1s");
    let removed = || cluster.try_rbd(&["rm", "--no-progress", "rbd/a"]).code == Some(0);
    assert!(!removed());
    check(&server, &state);
    server.stop().unwrap();
    wait("the removal of the image", removed);
    refused(&cluster.image("a"), &[]).refused_with(&["cannot open the image", "no such file"]);
}

/// A user with the rights that disks need, on one pool only.
#[test]
fn a_user_of_its_own_is_enough() {
    let (place, cluster) = (Place::new(), Cluster::start(1, GIB));
    cluster.rbd(&["create", "--size", "64M", "rbd/a"]);
    let caps = ["mon", "profile rbd", "osd", "profile rbd pool=rbd"];
    let key = cluster.ceph(&[&["auth", "get-or-create", "client.host7"][..], &caps].concat());
    let keyring = cluster.conf().with_file_name("keyring");
    let mut keyring = OpenOptions::new().append(true).open(keyring).unwrap();
    keyring.write_all(key.as_bytes()).unwrap();
    let image = format!("{}&user=host7", cluster.image("a"));
    let server = place.serve("a", Path::new(&image), QUEUES);
    let state = place.path("state");
    write_for(&server, &state, "1s");
    check(&server, &state);
    server.stop().unwrap();
    // A user that may only read.
    let caps = [
        "mon",
        "profile rbd-read-only",
        "osd",
        "profile rbd-read-only",
    ];
    let key = cluster.ceph(&[&["auth", "get-or-create", "client.reader"][..], &caps].concat());
    keyring.write_all(key.as_bytes()).unwrap();
    let image = format!("{}&user=reader", cluster.image("a"));
    refused(&image, &[]).refused_with(&["cannot"]);
    let args = [QUEUES, &["--readonly"]].concat();
    let server = place.serve("reader", Path::new(&image), &args);
    check(&server, &state);
    server.stop().unwrap();
}
