//! Tests that no data is lost when a server is killed.

use crate::pair::{Pair, changes, ends_well, guest, pull, wait_for_phase};
use crate::support::{Served, eventually};
use std::fs;
use std::process::Command;
use std::time::Duration;

/// A server is killed while the disk is copied. The disk is then copied anew.
#[test]
fn either_server_may_be_killed_while_a_disk_comes() {
    let pair = Pair::new("qcow2", "raw");
    let mut source = pair.source();
    let mut load = changes(&source);
    let mut target = pair.target();
    for round in 0..8u64 {
        std::thread::sleep(Duration::from_millis(37 * round));
        if round % 2 == 0 {
            target.signal("KILL");
            target.end();
            target = pair.target();
        } else {
            source.signal("KILL");
            source.end();
            drop(load);
            source = pair.source();
            load = changes(&source);
        }
    }
    wait_for_phase(&target, "ready");
    drop(load);
    ends_well(guest(&target));
    wait_for_phase(&target, "done");
    drop((source, target));
    pair.check_same();
}

/// The target is killed at any moment of the switch. Either it has the disk, or it copies the disk
/// anew.
///
/// A guest that connects afterwards gets the disk in both cases.
#[test]
fn the_server_here_may_be_killed_while_it_takes_the_disk_over() {
    for round in 0..12u64 {
        let pair = Pair::new("raw", "raw");
        let source = pair.source();
        let load = changes(&source);
        let mut target = pair.target();
        wait_for_phase(&target, "ready");
        drop(load);
        let mut waits = guest(&target);
        std::thread::sleep(Duration::from_micros(round * 700));
        target.signal("KILL");
        target.end();
        let _ = waits.kill();
        waits.wait().unwrap();
        let target = pair.target();
        ends_well(guest(&target));
        drop((source, target));
        pair.check_same();
    }
}

#[test]
fn a_disk_that_is_here_needs_nobody_after_a_restart() {
    let pair = Pair::new("raw", "qcow2");
    let source = pair.source();
    let target = pair.target();
    ends_well(guest(&target));
    wait_for_phase(&target, "done");
    drop(source);
    target.load(2000, &["--rw", "randwrite"]);
    let (before, after) = (pair.path("before"), pair.path("to"));
    drop(target);
    fs::copy(&after, &before).unwrap();
    // The same command copies nothing over what the guest has written since.
    let target = pair.target();
    assert!(pull(&target).is_null());
    ends_well(guest(&target));
    drop(target);
    let images = [pair.arg("before"), pair.arg("to")];
    crate::pair::qemu_img(&["compare", &images[0], &images[1]]);
}

#[test]
fn a_full_disk_here_costs_the_guest_there_nothing() {
    let pair = Pair::new("raw", "raw");
    let small = pair.path("small");
    fs::create_dir(&small).unwrap();
    let mount = |args: &[&str]| {
        let status = Command::new("mount").args(args).arg(&small).status();
        assert!(status.unwrap().success(), "a tmpfs needs root");
    };
    mount(&["-t", "tmpfs", "-o", "size=8M", "tmpfs"]);
    let image = small.join("to");
    fs::File::create(&image)
        .unwrap()
        .set_len(crate::pair::SIZE)
        .unwrap();
    let source = pair.source();
    let record = pair.arg("record");
    let args = ["--pull", &pair.uri(), "--pull-record", &record];
    let target = Served::start(image.to_str().unwrap(), &args);
    eventually("it says why", || {
        let problem = pull(&target)["problem"].to_string();
        problem.contains("no space left").then_some(())
    });
    source.load(1000, &["--rw", "randrw"]);
    mount(&["-o", "remount,size=200M"]);
    wait_for_phase(&target, "ready");
    ends_well(guest(&target));
    wait_for_phase(&target, "done");
    drop((source, target));
    fs::copy(&image, pair.path("to")).unwrap();
    eventually("nobody needs it", || {
        let unmounted = Command::new("umount").arg(&small).status();
        unmounted.unwrap().success().then_some(())
    });
    pair.check_same();
}
