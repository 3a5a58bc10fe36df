//! Tests a guest whose disk is above a remote image, on two hosts that each cache what they have
//! read.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fathom_lab::{Disk, Guest, Machine, Server};
use fathom_tests::{Place, fathom};
use serde_json::json;

use super::migration::{expect_no_io_errors, wait_migrated};

const STEP: Duration = Duration::from_secs(120);
const MIB: usize = 1 << 20;

fn sh(script: &str, args: &[&Path]) -> String {
    let output = Command::new("sh").args(["-ec", script]).args(args).output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {said}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Starts the remote server of an image. No virtual machine uses its vhost-user socket.
fn far(place: &Place, base: &Path) -> (Server, String) {
    let nbd = place.sockets().join("far.nbd");
    let address = format!("unix:{}", nbd.display());
    let args = [
        "--readonly",
        "--nbd",
        &address,
        "--filter",
        "delay:read=3ms",
    ];
    let uri = format!("nbd+unix:///?socket={}", nbd.display());
    (place.serve("far", base, &args), uri)
}

fn serve(place: &Place, side: &str, disk: &Path, base: &str) -> Server {
    let cache = place.path(&format!("cache-{side}"));
    let cache = cache.to_str().unwrap();
    let args = [
        "--format",
        "qcow2",
        "--base",
        base,
        "--base-cache",
        cache,
        "--base-fetch",
        "1M",
    ];
    place.serve(&format!("disk-{side}"), disk, &args)
}

fn kill_keepers(place: &Place) {
    let cache = place.path("cache-");
    let pattern = format!("^fathom-base.*{}", cache.display());
    let _ = Command::new("pkill")
        .args(["-KILL", "-f", &pattern])
        .status();
}

#[test]
fn a_guest_starts_from_afar_and_moves_while_its_image_comes() {
    let place = Place::new();
    let base: PathBuf = place.path("base.raw");
    sh("head -c 64M /dev/urandom >\"$0\"", &[&base]);
    let sum = sh("sha256sum <\"$0\" | cut -d' ' -f1", &[&base]);
    let (far, uri) = far(&place, &base);
    let disk = place.path("disk.qcow2");
    let create = [
        "img", "create", "-q", "-u", "-f", "qcow2", "-b", &uri, "-F", "raw",
    ];
    let made = Command::new(fathom())
        .args(create)
        .arg(&disk)
        .arg("64M")
        .status();
    assert!(made.unwrap().success());
    let source_server = serve(&place, "source", &disk, &uri);
    let machine = |server: &Server| Machine {
        cpus: 1,
        memory_mib: 256,
        disks: vec![Disk::vhost_user("disk", server.socket())],
        ..Machine::default()
    };
    let mut source = Guest::boot(&machine(&source_server)).unwrap();
    let first = sh("head -c 16M \"$0\" | sha256sum | cut -d' ' -f1", &[&base]);
    let device = source.device("disk").unwrap();
    let part = format!("dd if={device} bs=1M count=16 2>/dev/null | sha256sum | cut -d' ' -f1");
    assert_eq!(source.check(&part, STEP).unwrap().trim(), first);
    // Writes a part of a cluster, the rest of which is fetched from the remote server.
    let write =
        format!("dd if=/dev/zero of={device} bs=4k seek=5001 count=3 conv=fsync 2>/dev/null");
    source.check(&write, STEP).unwrap();

    let target_server = serve(&place, "target", &disk, &uri);
    let mut target = Guest::start(&Machine {
        incoming: true,
        ..machine(&target_server)
    })
    .unwrap();
    let channel = place.sockets().join("migration");
    let to = format!("unix:{}", channel.display());
    target.qmp("migrate-incoming", json!({"uri": to})).unwrap();
    source.qmp("migrate", json!({"uri": to})).unwrap();
    wait_migrated(&mut source);
    target.wait_event("RESUME", STEP).unwrap();
    source.quit().unwrap();
    source_server.stop().unwrap();
    kill_keepers(&place);

    let mut expected = std::fs::read(&base).unwrap();
    expected[5001 * 4096..5004 * 4096].fill(0);
    assert_eq!(expected.len(), 64 * MIB);
    std::fs::write(place.path("expected"), expected).unwrap();
    let whole = format!("echo 3 >/proc/sys/vm/drop_caches; sha256sum <{device} | cut -d' ' -f1");
    let now = sh(
        "sha256sum <\"$0\" | cut -d' ' -f1",
        &[&place.path("expected")],
    );
    assert_ne!(now, sum);
    assert_eq!(target.check(&whole, STEP).unwrap().trim(), now);
    // Everything is cached by now, so the remote server is no longer needed.
    far.stop().unwrap();
    assert_eq!(target.check(&whole, STEP).unwrap().trim(), now);
    expect_no_io_errors(&mut target);
    target.power_off().unwrap();
    target_server.stop().unwrap();
    kill_keepers(&place);
}
