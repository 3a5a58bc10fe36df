//! Tests commands that examine a disk, on a disk of an NBD server.

use crate::bitmap::Server;
use crate::place::{MIB, Place};
use crate::support::{eventually, listens, refused, run, stdout_of};
use crate::{qemu_img, qemu_json};
use std::path::Path;
use std::process::{Command, Stdio};

/// Starts QEMU's NBD server for a disk with data, holes and zeroes.
fn server(place: &Place) -> (Server, String) {
    let writes = ["write -P 1 1M 1M", "write -P 2 3M 100k", "write -z 4M 64k"];
    let image = place.image("image", "qcow2", &[], &writes);
    let socket = place.path("s");
    let args = ["-r", "-t", "-e", "9", "-x", "disk", "-f", "qcow2", "-k"];
    let server = Command::new("qemu-nbd")
        .args([&args[..], &[&socket, &image]].concat())
        .stdin(Stdio::null())
        .spawn();
    let server = Server(server.expect("qemu-nbd is installed by `make setup`"));
    eventually("a server", || listens(Path::new(&socket)).then_some(()));
    (server, format!("nbd+unix:///disk?socket={socket}"))
}

#[test]
fn an_export_is_looked_at_as_by_qemu_img() {
    let place = Place::new();
    let (_server, uri) = server(&place);
    let commands: [&[&str]; 7] = [
        &["info"],
        &["info", "--backing-chain"],
        &["map"],
        &["map", "--start-offset=1536k", "--max-length=2M"],
        &["measure", "-O", "qcow2"],
        &["measure", "-O", "qcow2", "-o", "cluster_size=512k"],
        &["measure", "-O", "raw"],
    ];
    for command in commands {
        let mine = stdout_of(&[&["img"], command, &[&uri]].concat());
        assert_eq!(mine, qemu_img(&[command, &[&uri]].concat()), "{command:?}");
        let json = [command, &["--output=json", &uri]].concat();
        let mine = stdout_of(&[&["img"], &json[..]].concat());
        let mine: serde_json::Value = serde_json::from_str(&mine).unwrap();
        assert_eq!(mine, qemu_json(&json), "{command:?}");
    }
    // An NBD disk has nothing to check, but its server must be reachable.
    let checked = run(&["img", "check", &uri]);
    assert_eq!(checked.status.code(), Some(63), "{checked:?}");
    let away = place.path("away");
    let nobody = format!("nbd+unix:///disk?socket={away}");
    for command in ["info", "map", "check", "measure"] {
        refused(1, &["img", command, &nobody], &[&away, "cannot connect"]);
        let args = ["img", command, "-f", "qcow2", &uri];
        refused(1, &args, &["a raw disk"]);
    }
    refused(
        1,
        &["img", "measure", "-l", "s", &uri],
        &["no internal snapshots"],
    );
}

/// If a server reports no block status, its whole disk is one extent.
#[test]
fn an_export_is_one_part_if_nobody_says_more() {
    let place = Place::new();
    let socket = place.path("s");
    let args = ["-f", "-U", &socket, "--no-sr", "memory", "3G"];
    let server = Command::new("nbdkit")
        .args(args)
        .stderr(Stdio::null())
        .spawn();
    let _server = Server(server.expect("nbdkit is installed by `make setup`"));
    eventually("a server", || listens(Path::new(&socket)).then_some(()));
    let uri = format!("nbd+unix:///?socket={socket}");
    let mapped = stdout_of(&["img", "map", "--json", &uri]);
    let mapped: serde_json::Value = serde_json::from_str(&mapped).unwrap();
    assert_eq!(mapped.as_array().unwrap().len(), 1, "{mapped}");
    assert_eq!(mapped[0]["length"], 3072 * MIB);
}
