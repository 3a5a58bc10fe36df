//! Checks frozen disks: the image can be copied, and users only have to wait.

use super::clients::{self, Client};
use super::{BLOCK, Chain, SIZE, StopAtEnd, image, load};
use crate::driver::with_disk;
use crate::kinds::qemu_img;
use crate::support::{as_arg, disk_dir, eventually, run, stdout_of};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

fn disk(chain: &Chain, args: &[&str]) {
    let api = chain.server.api();
    stdout_of(&[&["disk", args[0], &api], &args[1..]].concat());
}

/// Checks that a command is refused with one line that has these words.
fn refused(chain: &Chain, args: &[&str], words: &str) {
    let api = chain.server.api();
    let output = run(&[&[args[0], args[1], &api], &args[2..]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{args:?}");
    assert!(said.contains(words) && said.lines().count() == 1, "{said}");
}

/// Checks that a copy is the image of one instant. The load writes all blocks of a round before the
/// next round, so the copy has blocks of at most two successive rounds.
fn check_copy(copy: &str, format: &str) {
    let server = Chain::start(copy, &["--format", format]);
    with_disk(&server.server.arg("s"), 1, |disk| {
        let contents = disk.contents();
        let round = |at: u64| {
            let word = &contents[at as usize..at as usize + 8];
            (u64::from_le_bytes(word.try_into().unwrap()) ^ at) >> 32
        };
        let rounds: Vec<_> = (0..SIZE).step_by(BLOCK * 4).map(round).collect();
        let (least, most) = (rounds.iter().min().unwrap(), rounds.iter().max().unwrap());
        assert!(*least > 0 && most - least <= 1, "{rounds:?}");
    });
    server.quit();
}

#[test]
fn the_image_of_a_frozen_disk_can_be_copied() {
    for format in ["raw", "qcow2"] {
        let dir = disk_dir();
        let image = image(dir.path(), format);
        let copy = as_arg(&dir.path().join("copy"));
        let chain = Chain::start(&image, &["--format", format]);
        let socket = chain.server.arg("s");
        let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            let _stop = StopAtEnd(&stop);
            let load = scope.spawn(|| load(&socket, 1, &stop, &rounds));
            let progress = || {
                let before = rounds.load(SeqCst);
                eventually("progress", || {
                    assert!(!load.is_finished());
                    (rounds.load(SeqCst) > before).then_some(())
                });
            };
            for _ in 0..3 {
                progress();
                disk(&chain, &["freeze"]);
                let before = rounds.load(SeqCst);
                assert_eq!(chain.ask(&["info"])["frozen"], true);
                // qemu-img takes a lock of its own, and finds a clean image.
                if format == "qcow2" {
                    qemu_img(dir.path(), &["check", "-f", format, "i"]);
                }
                qemu_img(
                    dir.path(),
                    &["convert", "-f", format, "-O", format, "i", "copy"],
                );
                sleep(Duration::from_millis(50));
                assert!(rounds.load(SeqCst) - before <= 1, "it stands still");
                disk(&chain, &["thaw"]);
                check_copy(&copy, format);
            }
            progress();
        });
        assert_eq!(chain.server.log().matches("front-end connected").count(), 1);
        chain.quit();
    }
}

#[test]
fn clients_wait_for_a_frozen_disk() {
    let dir = disk_dir();
    let (chain, socket) = clients::serve(&image(dir.path(), "qcow2"), &["--format", "qcow2"]);
    let mut client = Client::start(include_str!("half.py"), &[&socket]);
    while client.line().as_deref() == Some("ready") {
        disk(&chain, &["freeze"]);
        let info = chain.ask(&["info"]);
        assert_eq!(
            info["nbd"]["connections"].as_array().unwrap().len(),
            1,
            "{info}"
        );
        qemu_img(dir.path(), &["check", "-f", "qcow2", "i"]);
        client.go_on();
        disk(&chain, &["thaw"]);
    }
    client.end();
    chain.quit();
}

#[test]
fn a_frozen_disk_goes_on_after_its_time_or_with_its_servers_end() {
    let dir = disk_dir();
    let chain = Chain::start(&image(dir.path(), "raw"), &["--format", "raw"]);
    refused(&chain, &["disk", "thaw"], "not frozen");
    disk(&chain, &["freeze"]);
    for args in [
        &["disk", "freeze"][..],
        &["disk", "resize", "4M", "--shrink"],
        &["disk", "change", "iothreads=2"],
        &["disk", "remove", "--force"],
    ] {
        refused(&chain, args, "thaw it first");
    }
    chain.refused(&[], "thaw it first");
    disk(&chain, &["thaw"]);
    let before = Instant::now();
    disk(&chain, &["freeze", "--for", "200ms"]);
    chain.server.load(10, &[]);
    assert!(before.elapsed() > Duration::from_millis(200));
    assert_eq!(chain.ask(&["info"])["frozen"], false);
    disk(&chain, &["freeze"]);
    // The end of the server does not wait for a thaw.
    chain.quit();
}
