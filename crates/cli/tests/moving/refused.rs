//! Tests that impossible moves are rejected at once, with one line.

use crate::pair::{Pair, SIZE, qemu_img};
use crate::support::{Served, refused, short_dir};
use std::fs;

#[test]
fn what_cannot_come_is_refused() {
    let pair = Pair::new("raw", "raw");
    let dir = short_dir();
    let socket = crate::support::as_arg(&dir.path().join("s"));
    let (to, uri) = (pair.arg("to"), pair.uri());
    let serve = ["serve", &to, "--vhost-user", &socket];
    let pulled = [&serve[..], &["--pull", &uri]].concat();
    refused(1, &pulled, &["cannot connect"]);
    let source = pair.source();
    refused(1, &["serve", &to, "--pull", &uri], &["needs --vhost-user"]);
    refused(1, &[&pulled[..], &["--readonly"]].concat(), &["--readonly"]);
    refused(
        2,
        &[&serve[..], &["--pull-speed", "1M"]].concat(),
        &["--pull"],
    );
    refused(
        1,
        &[&serve[..], &["--pull", "http://x/"]].concat(),
        &["--pull"],
    );
    // The sizes differ.
    let large = pair.arg("large");
    qemu_img(&["create", &large, &(2 * SIZE).to_string()]);
    let wrong = ["serve", &large, "--vhost-user", &socket, "--pull", &uri];
    refused(1, &wrong, &["must have the same size"]);
    // The file of the record is something else.
    fs::write(pair.path("to.pull"), "my thesis").unwrap();
    refused(1, &pulled, &["to.pull", "not a record"]);
    assert_eq!(fs::read(pair.path("to.pull")).unwrap(), b"my thesis");
    fs::remove_file(pair.path("to.pull")).unwrap();
    // The server has no default path for the record of a memory disk.
    let memory = format!("memory:{SIZE}");
    let args = ["serve", &memory, "--vhost-user", &socket, "--pull", &uri];
    refused(1, &args, &["--pull-record"]);
    drop(source);
    // The server does not allow the takeover.
    let nbd = format!("unix:{}", uri.split_once("socket=").unwrap().1);
    let _ = fs::remove_file(uri.split_once("socket=").unwrap().1);
    let _still = Served::start(&pair.arg("from"), &["--nbd", &nbd, "--export-name", "d"]);
    refused(1, &pulled, &["does not allow export 'd' to be taken over"]);
}

#[test]
fn one_server_at_a_time_takes_a_disk_over() {
    let pair = Pair::new("raw", "raw");
    let source = pair.source();
    let target = pair.target();
    crate::pair::wait_for_phase(&target, "ready");
    let other = pair.arg("other");
    qemu_img(&["create", &other, &SIZE.to_string()]);
    let dir = short_dir();
    let socket = crate::support::as_arg(&dir.path().join("s"));
    let (uri, again) = (
        pair.uri(),
        ["serve", &other, "--vhost-user", &socket, "--pull"],
    );
    refused(
        1,
        &[&again[..], &[&uri]].concat(),
        &["another server is copying the disk"],
    );
    crate::pair::ends_well(crate::pair::guest(&target));
    crate::pair::wait_for_phase(&target, "done");
    refused(
        1,
        &[&again[..], &[&uri]].concat(),
        &["another server has taken the disk over"],
    );
    drop(source);
}

/// Only the guest may change a disk that may be taken over.
#[test]
fn nbd_clients_of_such_a_disk_only_read() {
    let pair = Pair::new("raw", "raw");
    let _source = pair.source();
    let info = std::process::Command::new("nbdinfo")
        .args(["--is", "read-only", &pair.uri()])
        .status();
    assert!(info.unwrap().success());
}
