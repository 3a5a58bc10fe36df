//! Tests disks on a Ceph cluster (`make test-cluster`). Each test starts a cluster, whose OSDs take
//! memory.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fathom_lab::Server;
use fathom_testing::Deadline;
use fathom_tests::ceph::Cluster;
use fathom_tests::{Ended, Place, fathom, run, run_command};

#[path = "cluster/backups.rs"]
mod backups;
#[path = "cluster/base.rs"]
mod base;
#[path = "cluster/img.rs"]
mod img;
#[path = "cluster/limits.rs"]
mod limits;
#[path = "cluster/neighbours.rs"]
mod neighbours;

const GIB: u64 = 1 << 30;
const STEP: Duration = Duration::from_secs(120);
const QUEUES: &[&str] = &["--queues", "2"];

/// Starts `fathom bench`, which writes, reads back and verifies. The state that it verifies is in a
/// file.
fn bench(server: &Server, state: &Path, more: &[&str]) -> Child {
    let mut command = Command::new(fathom());
    command.args([
        "bench",
        "--bs=4k",
        "--iodepth=16",
        "--ramp-time=0s",
        "--verify",
        "--vhost-user",
    ]);
    command
        .arg(server.socket())
        .arg("--verify-state")
        .arg(state)
        .args(more);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("fathom has been built")
}

fn done(child: Child) -> String {
    let output = child.wait_with_output().expect("a child");
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    said.into_owned()
}

/// Writes at random for `time`.
fn write_for(server: &Server, state: &Path, time: &str) -> String {
    done(bench(
        server,
        state,
        &["--rw=randrw", "--queues=2", &format!("--runtime={time}")],
    ))
}

/// Verifies everything that was written.
fn check(server: &Server, state: &Path) {
    done(bench(server, state, &["--verify-only"]));
}

/// Like `check`, on a cluster that may be busy for longer than a front-end's timeout.
///
/// Until the cluster has recovered, the image cannot be locked.
fn check_when_let_in(server: &Server, state: &Path) {
    wait("a server that lets its front-end in", || {
        let child = bench(server, state, &["--verify-only"]);
        let output = child.wait_with_output().expect("a child");
        let said = String::from_utf8_lossy(&output.stderr);
        let waits =
            said.contains("no reply within") || said.contains("the server closed the connection");
        assert!(output.status.success() || waits, "{said}");
        output.status.success()
    });
}

fn serve(place: &Place, cluster: &Cluster, name: &str, args: &[&str]) -> Server {
    place.serve(name, Path::new(&cluster.image(name)), args)
}

fn qemu_img(args: &[&str]) -> String {
    let mut command = Command::new("qemu-img");
    command.args(args);
    let ended = run_command(command, STEP);
    assert_eq!(
        ended.code,
        Some(0),
        "{args:?}: {}{}",
        ended.stdout,
        ended.stderr
    );
    ended.stdout
}

fn refused(disk: &str, args: &[&str]) -> Ended {
    run(
        &[&["serve", disk, "--vhost-user", "/tmp/no.sock"], args].concat(),
        STEP,
    )
}

/// Creates an image on the cluster with QEMU. If the format is not raw, the RBD image has the
/// length of the image file.
fn create(place: &Place, cluster: &Cluster, name: &str, format: &str) {
    let file = place.path(name);
    qemu_img(&["create", "-q", "-f", format, file.to_str().unwrap(), "64M"]);
    cluster.rbd(&[
        "import",
        "--no-progress",
        file.to_str().unwrap(),
        &format!("rbd/{name}"),
    ]);
}

#[test]
fn images_of_all_formats_keep_what_is_written() {
    let (place, cluster) = (Place::new(), Cluster::start(1, GIB));
    for format in ["raw", "qcow2", "qed"] {
        create(&place, &cluster, format, format);
        let state = place.path(&format!("{format}.state"));
        for (round, cache) in ["none", "writeback", "writethrough"].iter().enumerate() {
            let args = ["--format", format, "--cache", cache, "--iothreads", "2"];
            let server = serve(&place, &cluster, format, &[QUEUES, &args].concat());
            if round > 0 {
                check(&server, &state);
            }
            std::fs::remove_file(&state).ok();
            write_for(&server, &state, "2s");
            server.stop().unwrap();
        }
        let qemus = cluster.for_qemu(format);
        if format != "raw" {
            qemu_img(&["check", "-q", "-f", format, &qemus]);
            refused(&cluster.image(format), &[]).refused_with(&["--format", format]);
        }
        // QEMU reads the same bytes.
        let copy = place.path(&format!("{format}.copy"));
        let to = copy.to_str().unwrap();
        qemu_img(&["convert", "-f", format, "-O", "raw", &qemus, to]);
        let server = place.serve(&format!("{format}-copy"), &copy, QUEUES);
        check(&server, &state);
        server.stop().unwrap();
    }
}

#[test]
fn clients_are_told_where_there_is_data() {
    let (place, cluster) = (Place::new(), Cluster::start(1, GIB));
    cluster.rbd(&["create", "--size", "256M", "rbd/a"]);
    let socket = place.sockets().join("nbd");
    let address = format!("unix:{}", socket.display());
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let server = serve(
        &place,
        &cluster,
        "a",
        &[QUEUES, &["--nbd", &address]].concat(),
    );
    let writes = [
        "-c",
        "write -P 1 20M 1M",
        "-c",
        "write -z 100M 8M",
        "-c",
        "write -P 2 200M 4k",
    ];
    let mut command = Command::new("qemu-io");
    command.args(["-f", "raw"]).args(writes).arg(&uri);
    assert_eq!(run_command(command, STEP).code, Some(0));
    let map = qemu_img(&["map", "--output=json", "-f", "raw", &uri]);
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let is_data = |at: u64| {
        let extents = map.as_array().unwrap().iter();
        let found = extents
            .rev()
            .find(|extent| extent["start"].as_u64().unwrap() <= at);
        found.unwrap()["data"].as_bool().unwrap()
    };
    const MIB: u64 = 1 << 20;
    assert!(is_data(20 * MIB) && is_data(200 * MIB), "{map}");
    assert!(
        !is_data(0) && !is_data(60 * MIB) && !is_data(255 * MIB),
        "{map}"
    );
    // A copy follows this map.
    let copy = place.path("copy");
    qemu_img(&[
        "convert",
        "-f",
        "raw",
        "-O",
        "raw",
        &uri,
        copy.to_str().unwrap(),
    ]);
    let mine = cluster.for_qemu("a");
    drop(server.stop().unwrap());
    qemu_img(&[
        "compare",
        "-q",
        "-f",
        "raw",
        "-F",
        "raw",
        copy.to_str().unwrap(),
        &mine,
    ]);
}

#[test]
fn an_image_names_what_is_beside_it_and_nothing_else() {
    let (place, cluster) = (Place::new(), Cluster::start(1, GIB));
    create(&place, &cluster, "base", "qed");
    let state = place.path("state");
    let base = serve(
        &place,
        &cluster,
        "base",
        &[QUEUES, &["--format", "qed"]].concat(),
    );
    write_for(&base, &state, "2s");
    base.stop().unwrap();
    for (name, backing, is_found) in [
        ("near", "rbd:rbd/base", true),
        ("far", "rbd:other/base", false),
        ("host", "/etc/hostname", false),
    ] {
        let overlay = place.path(name);
        let overlay = overlay.to_str().unwrap();
        let names = ["-F", "qed", "-b", backing, overlay, "64M"];
        qemu_img(&[&["create", "-u", "-q", "-f", "qcow2"], &names[..]].concat());
        cluster.rbd(&["import", "--no-progress", overlay, &format!("rbd/{name}")]);
        let format = ["--format", "qcow2"];
        if is_found {
            let server = serve(&place, &cluster, name, &[QUEUES, &format].concat());
            check(&server, &state);
            server.stop().unwrap();
        } else {
            refused(&cluster.image(name), &format).refused_with(&[backing, "in the same place"]);
        }
    }
}

#[test]
fn who_uses_an_image_has_it_alone() {
    let (place, cluster) = (Place::new(), Cluster::start(1, GIB));
    cluster.rbd(&["create", "--size", "64M", "rbd/a"]);
    let server = serve(&place, &cluster, "a", QUEUES);
    let state = place.path("state");
    let load = bench(
        &server,
        &state,
        &["--rw=randwrite", "--queues=2", "--runtime=8s"],
    );
    wait("the server's lock", || {
        cluster.rbd(&["lock", "ls", "rbd/a"]).contains("auto")
    });
    // QEMU cannot write to the locked image,
    let mut command = Command::new("qemu-io");
    command
        .args(["-f", "raw", "-c", "write -P 1 0 4k"])
        .arg(cluster.for_qemu("a"));
    let written = run_command(command, STEP);
    assert!(
        written.stdout.contains("Read-only file system"),
        "{written:?}"
    );
    // and another Fathom cannot either, but may wait for the lock.
    let mut other = place.serve("b", Path::new(&cluster.image("a")), QUEUES);
    let failed = bench(
        &other,
        &place.path("none"),
        &["--rw=randwrite", "--runtime=1s"],
    );
    assert!(!failed.wait_with_output().unwrap().status.success());
    said(&mut other, "has locked the image");
    done(load);
    // The other server can lock the image as soon as the first one has released it.
    server.stop().unwrap();
    check(&other, &state);
    // A client that breaks the lock excludes its owner: the owner's writes fail, and its log says
    // why.
    let load = bench(
        &other,
        &place.path("none"),
        &["--rw=randwrite", "--runtime=60s"],
    );
    wait("the other client's lock", || {
        cluster.rbd(&["lock", "ls", "rbd/a"]).contains("client.")
    });
    let locks = cluster.rbd(&["lock", "ls", "--format", "json", "rbd/a"]);
    let locks: serde_json::Value = serde_json::from_str(&locks).unwrap();
    let (id, locker) = (
        locks[0]["id"].as_str().unwrap(),
        locks[0]["locker"].as_str().unwrap(),
    );
    cluster.ceph(&[
        "osd",
        "blocklist",
        "add",
        locks[0]["address"].as_str().unwrap(),
    ]);
    cluster.rbd(&["lock", "rm", "rbd/a", id, locker]);
    assert!(!load.wait_with_output().unwrap().status.success());
    said(&mut other, "excluded it from the cluster");
    other.stop().unwrap();
}

/// Tests readers that start before another server locks the image, and readers that start later.
#[test]
fn who_reads_an_image_goes_by_who_has_it_now() {
    let (place, cluster) = (Place::new(), Cluster::start(1, GIB));
    cluster.rbd(&["create", "--size", "64M", "rbd/a"]);
    let reader = |name| {
        let args = [QUEUES, &["--readonly"]].concat();
        place.serve(name, Path::new(&cluster.image("a")), &args)
    };
    let early = reader("early");
    let writer = serve(&place, &cluster, "a", QUEUES);
    let state = place.path("state");
    let load = bench(
        &writer,
        &state,
        &["--rw=randwrite", "--queues=2", "--runtime=10s"],
    );
    wait("the server's lock", || {
        cluster.rbd(&["lock", "ls", "rbd/a"]).contains("auto")
    });
    let mut readers = [early, reader("late")];
    for reader in &mut readers {
        let failed = bench(
            reader,
            &place.path("none"),
            &["--rw=randread", "--runtime=1s"],
        );
        assert!(!failed.wait_with_output().unwrap().status.success());
        said(reader, "has locked the image");
    }
    done(load);
    wait("the end of the server's lock", || {
        !cluster.rbd(&["lock", "ls", "rbd/a"]).contains("auto")
    });
    for reader in &readers {
        check(reader, &state);
    }
    // The server keeps reading this image, even if the name then belongs to another one.
    let [mut early, late] = readers;
    cluster.rbd(&["rename", "rbd/a", "rbd/elsewhere"]);
    check(&early, &state);
    said(&mut early, "was removed or renamed");
    cluster.rbd(&["create", "--size", "64M", "rbd/a"]);
    check(&early, &state);
    said(&mut early, "was replaced by another image");
    for server in [early, late, writer] {
        server.stop().unwrap();
    }
}

/// The image grows when it allocates, and servers started before must see the new length.
#[test]
fn an_image_that_one_server_has_made_longer_is_read_by_another() {
    let (place, cluster) = (Place::new(), Cluster::start(1, GIB));
    create(&place, &cluster, "i", "qcow2");
    let args = [QUEUES, &["--format", "qcow2"]].concat();
    let there = place.serve("there", Path::new(&cluster.image("i")), &args);
    let here = place.serve("here", Path::new(&cluster.image("i")), &args);
    let state = place.path("state");
    let is_free = || !cluster.rbd(&["lock", "ls", "rbd/i"]).contains("auto");
    // Servers that only read it must see the new length as well, also as a backing image.
    let reading = [&args[..], &["--readonly"]].concat();
    let reader = place.serve("reader", Path::new(&cluster.image("i")), &reading);
    let above = cluster.image("above");
    let make = [
        "img",
        "create",
        "-f",
        "qcow2",
        "-b",
        "rbd:rbd/i",
        "-F",
        "qcow2",
    ];
    let made = run(&[&make[..], &[&above]].concat(), STEP);
    assert_eq!(made.code, Some(0), "{made:?}");
    let above = place.serve("above", Path::new(&above), &args);
    write_for(&here, &state, "2s");
    wait("an image that nobody has locked", is_free);
    for server in [&reader, &above] {
        check(server, &state);
    }
    check(&there, &state);
    // A write at the other server is seen here, too.
    let state = place.path("state-there");
    write_for(&there, &state, "4s");
    wait("an image that nobody has locked", is_free);
    check(&here, &state);
    wait("an image that nobody has locked", is_free);
    check(&above, &state);
    above.stop().unwrap();
    reader.stop().unwrap();
    here.stop().unwrap();
    there.stop().unwrap();
    qemu_img(&["check", "-q", "-f", "qcow2", &cluster.for_qemu("i")]);
}

#[test]
fn a_server_that_was_killed_leaves_the_image_to_another() {
    let (place, cluster) = (Place::new(), Cluster::start(1, GIB));
    cluster.rbd(&["create", "--size", "64M", "rbd/a"]);
    let mut server = serve(&place, &cluster, "a", QUEUES);
    let state = place.path("state");
    write_for(&server, &state, "2s");
    let mut load = bench(
        &server,
        &place.path("none"),
        &["--rw=randread", "--runtime=60s"],
    );
    wait("the server's lock", || {
        cluster.rbd(&["lock", "ls", "rbd/a"]).contains("auto")
    });
    server.process().kill().unwrap();
    load.wait().unwrap();
    let other = place.serve("b", Path::new(&cluster.image("a")), QUEUES);
    // The lock is denied while the cluster considers the killed server alive.
    let check = |state: &Path| bench(&other, state, &["--verify-only"]).wait_with_output();
    wait("a server that lets its front-end in", || {
        check(&state).unwrap().status.success()
    });
    assert!(
        cluster
            .ceph(&["osd", "blocklist", "ls"])
            .contains("127.0.0.1")
    );
    other.stop().unwrap();
}

#[test]
fn a_cluster_that_loses_osds_and_its_monitor_loses_nothing() {
    let (place, mut cluster) = (Place::new(), Cluster::start(2, GIB));
    cluster.rbd(&["create", "--size", "64M", "rbd/a"]);
    cluster.wait_until_clean();
    let server = serve(&place, &cluster, "a", QUEUES);
    let state = place.path("state");
    let load = bench(
        &server,
        &state,
        &["--rw=randrw", "--queues=2", "--runtime=45s"],
    );
    std::thread::sleep(Duration::from_secs(3));
    cluster.kill_osd(1);
    std::thread::sleep(Duration::from_secs(3));
    cluster.ceph(&["osd", "down", "1"]);
    std::thread::sleep(Duration::from_secs(3));
    cluster.start_osd(1);
    cluster.wait_until_clean();
    // Requests need no monitor while the cluster does not change.
    cluster.kill_monitor();
    std::thread::sleep(Duration::from_secs(5));
    cluster.start_monitor();
    let said = done(load);
    assert!(said.contains("and right"), "{said}");
    // The other copy has the same data.
    cluster.wait_until_clean();
    cluster.kill_osd(0);
    cluster.ceph(&["osd", "down", "0"]);
    check_when_let_in(&server, &state);
    server.stop().unwrap();
}

#[test]
fn a_size_that_others_give_it_and_a_snapshot() {
    let (place, cluster) = (Place::new(), Cluster::start(1, GIB));
    cluster.rbd(&["create", "--size", "64M", "rbd/a"]);
    let args = [QUEUES, &["--readonly"]].concat();
    let mut reader = place.serve("reader", Path::new(&cluster.image("a")), &args);
    let mut server = serve(&place, &cluster, "a", QUEUES);
    let state = place.path("state");
    write_for(&server, &state, "2s");
    cluster.rbd(&["snap", "create", "rbd/a@before"]);
    cluster.rbd(&["resize", "--size", "80M", "--no-progress", "rbd/a"]);
    said(&mut server, "resized to 80 MiB");
    let after = place.path("after");
    write_for(&server, &after, "2s");
    // A server that only reads the image, and is idle, notices the change when it is used.
    wait("the end of the server's lock", || {
        !cluster.rbd(&["lock", "ls", "rbd/a"]).contains("auto")
    });
    done(bench(
        &reader,
        &place.path("none"),
        &["--rw=randread", "--runtime=1s"],
    ));
    said(&mut reader, "resized to 80 MiB");
    check(&reader, &after);
    reader.stop().unwrap();
    let snapshot = cluster.image("a").replace('?', "@before?");
    refused(&snapshot, &[]).refused_with(&["--readonly"]);
    let before = place.serve("before", Path::new(&snapshot), &args);
    check(&before, &state);
    before.stop().unwrap();
    server.stop().unwrap();
}

#[test]
fn what_is_not_there_is_said() {
    let cluster = Cluster::start(1, GIB);
    let image = cluster.image("nothing");
    refused(&image, &[]).refused_with(&["cannot open the image", "no such file"]);
    let pool = image.replace("rbd:rbd/", "rbd:nowhere/");
    refused(&pool, &[]).refused_with(&["cannot open its pool"]);
    let user = format!("{image}&user=nobody");
    refused(&user, &[]).refused_with(&["cannot connect to the cluster"]);
    refused("rbd:rbd/a?conf=/nowhere", &[]).refused_with(&["/nowhere", "?conf=FILE"]);
    refused("rbd:rbd", &[]).refused_with(&["rbd:POOL"]);
    cluster.rbd(&["create", "--size", "0", "rbd/empty"]);
    refused(&cluster.image("empty"), &[]).refused_with(&["512 bytes"]);
}

/// Waits until the server's log contains these words. A front-end may see the effect before.
fn said(server: &mut Server, words: &str) {
    let what = format!("'{words}' in the log");
    wait(&what, || server.process().log().contains(words));
}

/// Waits until `is_so` is true, checking ten times per second.
///
/// Most checks run a command of Ceph, which takes CPU time from the cluster.
fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Deadline::new(what);
    while !is_so() {
        deadline.check();
        std::thread::sleep(Duration::from_millis(100));
    }
}
