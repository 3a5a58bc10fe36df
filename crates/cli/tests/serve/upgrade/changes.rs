//! Checks changes of options of a disk that is served: the server replaces the disk in the same
//! process.

use super::clients::{self, Client};
use super::{BLOCK, Chain, SIZE, StopAtEnd, block, image, load};
use crate::driver::{Request, with_disk};
use crate::kinds::qemu_img;
use crate::support::{disk_dir, eventually, run, stdout_of};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;

/// Changes of options. After each, the disk has other options than before.
const CHANGES: [&[&str]; 10] = [
    &["iothreads=3"],
    &["cache=writethrough"],
    &["aio=threads", "poll=20us"],
    &["cpus=0", "iothreads=1"],
    &["cache=writeback", "aio="],
    &["discard=false"],
    &["filters=[\"delay:read=10us\"]"],
    &["cache=none", "cpus=", "poll="],
    &["discard=", "iothreads=2"],
    &["filters="],
];

fn change(chain: &Chain, options: &[&str]) -> Value {
    let api = chain.server.api();
    let said = stdout_of(&[&["disk", "change", &api, "--json"], options].concat());
    let now = options_of(chain);
    for option in options {
        let (key, value) = option.split_once('=').unwrap();
        let now = match &now[key] {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let usual = ["false", "none", "1"].contains(&value) && now.is_empty();
        assert!(now == value || usual, "{option}: {now}");
    }
    serde_json::from_str(&said).unwrap()
}

/// Returns the options by their names in the configuration.
fn options_of(chain: &Chain) -> Value {
    let client = fathom_client::Client::connect(Path::new(&chain.server.api())).unwrap();
    let all: Value = client.get(&["v1", "disks"]).send().unwrap();
    all["disks"][0]["options"].clone()
}

/// Checks that a change is refused with one line that has these words.
fn refused(chain: &Chain, options: &[&str], words: &str) {
    let api = chain.server.api();
    let output = run(&[&["disk", "change", &api], options].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{options:?}");
    assert!(said.contains(words) && said.lines().count() == 1, "{said}");
}

/// Takes these steps while a virtual machine writes and reads. The load makes progress between two
/// steps. Returns the number of its rounds.
fn under_load(chain: &Chain, queues: usize, mut steps: impl FnMut(usize) -> bool) -> u64 {
    let socket = chain.server.arg("s");
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        let load = scope.spawn(|| load(&socket, queues, &stop, &rounds));
        for step in 0.. {
            let before = rounds.load(SeqCst);
            eventually("progress", || {
                assert!(!load.is_finished());
                (rounds.load(SeqCst) > before).then_some(())
            });
            if !steps(step) {
                break;
            }
        }
    });
    rounds.load(SeqCst)
}

#[test]
fn a_loaded_guest_sees_nothing_of_changes() {
    for (format, queues) in [("raw", 2), ("qcow2", 2), ("qed", 1)] {
        let dir = disk_dir();
        let image = image(dir.path(), format);
        let chain = Chain::start(&image, &["--format", format]);
        let rounds = under_load(&chain, queues, |step| {
            let Some(options) = CHANGES.get(step % CHANGES.len()) else {
                return false;
            };
            change(&chain, options);
            step < 2 * CHANGES.len()
        });
        let info = chain.ask(&["info"]);
        assert_eq!(info["workers"].as_array().unwrap().len(), 3, "{info}");
        let blocks = SIZE / (BLOCK as u64 * 4);
        assert_eq!(chain.requests(), 2 * rounds * blocks, "requests counted");
        let log = chain.server.log();
        assert_eq!(log.matches("front-end connected").count(), 1, "{log}");
        assert!(!log.contains("ERROR") && !log.contains("WARN"), "{log}");
        with_disk(&chain.server.arg("s"), 1, |disk| {
            let contents = disk.contents();
            for at in (0..SIZE).step_by(BLOCK * 4) {
                let found = &contents[at as usize..at as usize + BLOCK];
                assert!(found == block(at, rounds), "{at}");
            }
        });
        chain.quit();
        if format != "raw" {
            qemu_img(dir.path(), &["check", "-f", format, "i"]);
        }
    }
}

#[test]
fn loaded_clients_see_nothing_of_changes() {
    let dir = disk_dir();
    let image = image(dir.path(), "qcow2");
    let (chain, socket) = clients::serve(&image, &["--format", "qcow2"]);
    let mut client = Client::start(include_str!("load.py"), &[&socket, "structured", "3"]);
    for options in CHANGES.iter().chain(&CHANGES) {
        // The client sends discards, because the server has offered them.
        if !options[0].starts_with("discard") {
            assert!(client.line().is_some(), "{options:?}");
            change(&chain, options);
        }
    }
    client.end();
    chain.quit();
    qemu_img(dir.path(), &["check", "-f", "qcow2", "i"]);
}

#[test]
fn client_in_a_request_continues_with_the_changed_disk() {
    let dir = disk_dir();
    let (chain, socket) = clients::serve(&image(dir.path(), "raw"), &["--format", "raw"]);
    let mut client = Client::start(include_str!("half.py"), &[&socket]);
    let mut changes = CHANGES.iter().cycle();
    while client.line().as_deref() == Some("ready") {
        change(&chain, changes.next().unwrap());
        client.go_on();
    }
    client.end();
    chain.quit();
}

#[test]
fn what_is_no_longer_possible_fails_request_by_request() {
    let dir = disk_dir();
    let chain = Chain::start(&image(dir.path(), "raw"), &["--format", "raw"]);
    with_disk(&chain.server.arg("s"), 1, |disk| {
        let write = || Request::Write {
            offset: 4096,
            data: block(4096, 5),
        };
        let discard = || Request::Discard {
            offset: 0,
            len: 4096,
        };
        let read = || Request::Read {
            offset: 4096,
            len: BLOCK,
        };
        let done = |outcomes: Vec<Result<Vec<u8>, i32>>| {
            outcomes.iter().map(Result::is_ok).collect::<Vec<_>>()
        };
        assert_eq!(done(disk.all(&[write(), discard()])), [true, true]);
        change(&chain, &["readonly=true"]);
        let found = disk.all(&[read()]).remove(0).unwrap();
        assert!(found == block(4096, 5));
        assert_eq!(done(disk.all(&[write(), discard()])), [false, false]);
        assert_eq!(chain.ask(&["info"])["read_only"], true);
        change(&chain, &["readonly=false", "discard=false"]);
        assert_eq!(done(disk.all(&[write(), discard()])), [true, false]);
        change(&chain, &["discard="]);
        assert_eq!(done(disk.all(&[write(), discard()])), [true, true]);
    });
    chain.quit();
}

#[test]
fn a_disk_that_cannot_be_changed_goes_on_as_it_was() {
    let dir = disk_dir();
    let image = image(dir.path(), "raw");
    let chain = Chain::start(&image, &["--format", "raw"]);
    let before = options_of(&chain);
    under_load(&chain, 2, |step| {
        match step {
            0 => refused(&chain, &["queues=3"], "(queues)"),
            1 => refused(&chain, &["pool=nowhere"], "nowhere"),
            2 => refused(&chain, &["cache=warm"], "warm"),
            3 => refused(&chain, &["colour=red"], "colour"),
            4 => {
                let aside = dir.path().join("aside");
                fs::rename(&image, &aside).unwrap();
                refused(&chain, &["iothreads=4"], "not changed");
                fs::rename(&aside, &image).unwrap();
            }
            5 => {
                change(&chain, &["iothreads=2"]);
                change(&chain, &["iothreads="]);
            }
            _ => return false,
        }
        true
    });
    assert_eq!(options_of(&chain), before);
    chain.quit();
    let chain = Chain::start("memory:8M", &["--filter", "fault:hang=yes,op=flush"]);
    refused(&chain, &["iothreads=2"], "hang");
    chain.quit();
}

#[test]
fn raw_disk_with_guest_encryption_survives_upgrades() {
    let dir = disk_dir();
    let image = image(dir.path(), "raw");
    let mut chain = Chain::start(&image, &[]);
    // The server was started without a format; now the guest formats the whole disk.
    let file = fs::OpenOptions::new().write(true).open(&image).unwrap();
    file.write_all_at(b"LUKS\xba\xbe\0\x02", 0).unwrap();
    change(&chain, &["iothreads=2"]);
    chain.upgrade(&[]);
    change(&chain, &["iothreads=1"]);
    with_disk(&chain.server.arg("s"), 1, |disk| {
        assert!(disk.contents().starts_with(b"LUKS"));
    });
    chain.quit();
}

/// A removal without `--force` checks repeatedly whether the disk is in use, while changed disks
/// replace it.
#[test]
fn unforced_removal_keeps_a_changing_disk_with_clients() {
    let dir = disk_dir();
    let (chain, socket) = clients::serve(&image(dir.path(), "raw"), &["--format", "raw"]);
    let mut client = Client::start(include_str!("load.py"), &[&socket, "structured", "3"]);
    assert!(client.line().is_some());
    let api = chain.server.api();
    let name = chain.ask(&["info"])["name"].as_str().unwrap().to_owned();
    for _ in 0..8 {
        thread::scope(|scope| {
            let removal = scope.spawn(|| run(&["disk", "remove", &api, "--disk", &name]));
            for options in CHANGES
                .iter()
                .cycle()
                .filter(|o| !o[0].starts_with("discard"))
            {
                if removal.is_finished() {
                    break;
                }
                change(&chain, options);
            }
            let output = removal.join().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(
                !output.status.success() && said.contains("in use"),
                "{said}"
            );
        });
        assert!(client.line().is_some());
    }
    client.end();
    chain.quit();
}
