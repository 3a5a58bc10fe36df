//! Checks jobs by their identities: a request changes or ends one job, and never a later job of the
//! same disk.

use crate::driver::with_disk;
use crate::kinds::{SIZE, qemu_img};
use crate::support::{Kept, Served, as_arg, disk_dir, eventually, refused, stdout_of};
use fathom_client::{Client, ClientError};
use serde_json::{Value, json};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

/// A speed in bytes per second at which no job ends too early.
const SLOW: &str = "64k";

fn client(served: &Served) -> Client {
    Client::connect(Path::new(&served.api())).unwrap()
}

/// Returns the jobs of a server.
fn jobs(served: &Served) -> Vec<Value> {
    let all: Value = client(served).get(&["v1", "jobs"]).send().unwrap();
    serde_json::from_value(all["jobs"].clone()).unwrap()
}

/// Returns the identity of the server's only job, and the job.
fn job(served: &Served) -> (String, Value) {
    let [job] = <[Value; 1]>::try_from(jobs(served)).unwrap();
    (job["id"].as_str().unwrap().to_owned(), job)
}

fn status_of(sent: Result<Value, ClientError>) -> u16 {
    match sent.unwrap_err() {
        ClientError::Refused { status, .. } => status,
        other => panic!("{other}"),
    }
}

/// Starts a server with an overlay of an image that has data everywhere.
fn served(dir: &Path) -> Served {
    let (base, image) = (as_arg(&dir.join("base")), as_arg(&dir.join("image")));
    std::fs::write(&base, vec![7; SIZE as usize]).unwrap();
    qemu_img(
        dir,
        &[
            "create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &image,
        ],
    );
    Served::start(&image, &["--format", "qcow2"])
}

/// Runs `work` while a guest uses the disk.
fn in_use(work: impl FnOnce(&Path, &Served)) {
    let dir = disk_dir();
    let served = served(dir.path());
    with_disk(&served.arg("s"), 1, |_| work(dir.path(), &served));
}

#[test]
fn mirror_is_hastened_and_ended_by_its_identity() {
    in_use(hasten_and_end_a_mirror);
}

fn hasten_and_end_a_mirror(dir: &Path, served: &Served) {
    let target = as_arg(&dir.join("target"));
    qemu_img(
        dir,
        &["create", "-q", "-f", "raw", &target, &SIZE.to_string()],
    );
    let start = [
        "mirror",
        "start",
        &served.api(),
        &target,
        "-O",
        "raw",
        "--speed",
        SLOW,
    ];
    stdout_of(&start);
    let (first, shown) = job(served);
    let known = json!({"kind": "mirror", "state": "running", "speed": 64 << 10});
    for (key, value) in known.as_object().unwrap() {
        assert_eq!(&shown[key], value, "{shown}");
    }
    let disk = shown["disk"].as_str().unwrap();
    assert!(first.starts_with(&format!("{disk}.mirror.")), "{first}");
    // The mirror is not ready, so that only `--force` ends it.
    refused(1, &["jobs", "end", &first], &["--force"]);
    let client = client(served);
    let place = ["v1", "jobs", &first];
    let slower: Value = client
        .patch(&place)
        .json(&json!({"speed": "32k"}))
        .send()
        .unwrap();
    assert_eq!(slower["speed"], 32 << 10);
    for bad in [
        json!({}),
        json!({"speed": "fast"}),
        json!({"speed": 1, "other": 2}),
    ] {
        assert_eq!(
            status_of(client.patch(&place).json(&bad).send()),
            400,
            "{bad}"
        );
    }
    stdout_of(&["jobs", "speed", &first, "none"]);
    eventually("the mirror is ready", || {
        (job(served).1["state"] == "ready").then_some(())
    });
    assert_eq!(job(served).1["speed"], Value::Null);
    let told = stdout_of(&["jobs", "end", &first]);
    assert!(told.contains("mirror is done"), "{told}");
    assert!(jobs(served).is_empty());
    // The identity of the first mirror does not refer to the second one.
    stdout_of(&start);
    let (second, _) = job(served);
    assert_ne!(first, second);
    assert_eq!(
        status_of(client.delete(&place).flag("force", true).send()),
        404
    );
    assert_eq!(
        status_of(client.patch(&place).json(&json!({"speed": null})).send()),
        404
    );
    assert_eq!(status_of(client.get(&place).send()), 404);
    refused(1, &["jobs", "end", &first], &["no job", &second]);
    // Without its number, the identity refers to the disk's only mirror.
    let (short, _) = second.rsplit_once('.').unwrap();
    stdout_of(&["jobs", "end", short, "--force"]);
    assert!(jobs(served).is_empty());
    // A speed of 0 means no limit.
    let api = served.api();
    stdout_of(&[
        "mirror", "start", &api, &target, "-O", "raw", "--speed", "0",
    ]);
    eventually("the mirror is ready", || {
        (job(served).1["state"] == "ready").then_some(())
    });
}

#[test]
fn mirror_that_does_not_run_yet_is_listed() {
    in_use(list_a_starting_mirror);
}

fn list_a_starting_mirror(dir: &Path, served: &Served) {
    // Connections succeed, but no server replies.
    let socket = dir.join("silent");
    let silent = UnixListener::bind(&socket).unwrap();
    let target = format!("nbd+unix:///?socket={}", as_arg(&socket));
    let mut start = Command::new(env!("CARGO_BIN_EXE_fathom"));
    start.args(["mirror", "start", &served.api(), &target, "--speed", SLOW]);
    let mut start = Kept::spawn(&mut start);
    eventually("the mirror starts", || {
        (!jobs(served).is_empty()).then_some(())
    });
    let (id, shown) = job(served);
    let known = json!({
        "kind": "mirror", "state": "starting", "phase": "starting", "target": target, "speed": 64 << 10
    });
    for (key, value) in known.as_object().unwrap() {
        assert_eq!(&shown[key], value, "{shown}");
    }
    let client = client(served);
    let place = ["v1", "jobs", &id];
    let faster = client.patch(&place).json(&json!({"speed": null}));
    assert_eq!(status_of(faster.send()), 409);
    let end = client.delete(&place).flag("force", true);
    assert_eq!(status_of(end.send()), 409);
    drop(silent);
    assert!(!start.0.wait().unwrap().success());
    assert!(jobs(served).is_empty());
}

#[test]
fn stream_is_hastened_and_a_backup_is_ended() {
    in_use(hasten_a_stream_and_end_a_backup);
}

fn hasten_a_stream_and_end_a_backup(dir: &Path, served: &Served) {
    stdout_of(&["stream", "start", &served.api(), "--speed", SLOW]);
    let (id, _) = job(served);
    assert!(id.contains(".stream."), "{id}");
    stdout_of(&["jobs", "speed", &id, "1G"]);
    eventually("the stream is done", || {
        (job(served).1["state"] == "done").then_some(())
    });
    stdout_of(&["jobs", "end", &id]);
    assert!(jobs(served).is_empty());
    let socket = format!("unix:{}", as_arg(&dir.join("backup")));
    stdout_of(&["backup", "start", &served.api(), "--nbd", &socket]);
    let (id, shown) = job(served);
    assert_eq!(
        (&shown["phase"], &shown["state"]),
        (&json!("keeping"), &json!("running"))
    );
    refused(1, &["jobs", "speed", &id, "1M"], &["a backup has no speed"]);
    let ended: Value = client(served).delete(&["v1", "jobs", &id]).send().unwrap();
    assert_eq!(ended["id"], id);
    assert!(jobs(served).is_empty());
    for unknown in ["vm1", "vm1.mirror.0", ".pull", "..."] {
        let shown = client(served).get(&["v1", "jobs", unknown]).send();
        assert_eq!(status_of(shown), 404, "{unknown}");
    }
}
