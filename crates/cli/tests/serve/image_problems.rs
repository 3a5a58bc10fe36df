//! Checks what `fathom info` shows of images that were not closed or are damaged.

use crate::driver::{Request, with_disk};
use crate::kinds::qemu_img;
use crate::support::{Served, as_arg, disk_dir, eventually, refused, run, short_dir, stdout_of};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

const CLUSTER: usize = 64 << 10;
const QCOW2: [&str; 2] = ["--format", "qcow2"];

fn serve(image: &Path, more: &[&str]) -> Served {
    Served::start(&as_arg(image), &[&QCOW2, more].concat())
}

fn info(served: &Served) -> Value {
    let shown = stdout_of(&["info", &served.api(), "--json"]);
    serde_json::from_str(&shown).unwrap()
}

fn problems(served: &Served) -> Value {
    info(served)["image"]["problems"].clone()
}

/// Returns the lines about problems in the output for people.
fn problem_lines(served: &Served) -> Vec<String> {
    let shown = stdout_of(&["info", &served.api()]);
    let lines = shown.lines().filter(|line| line.starts_with("problem:"));
    lines.map(str::to_owned).collect()
}

/// Opens the image for use, and releases it.
fn use_once(served: &Served) {
    served.load(1, &["--rw", "read"]);
}

/// Kills the server when discarded clusters are no longer referenced but still have their
/// refcounts.
fn kill_with_leaks(served: &mut Served) {
    const LEN: usize = 16 * CLUSTER;
    with_disk(&served.arg("s"), 1, |disk| {
        let write = |cluster: usize| Request::Write {
            offset: (cluster * CLUSTER) as u64,
            data: vec![7; CLUSTER],
        };
        let discard = Request::Discard {
            offset: 0,
            len: LEN as u64,
        };
        let writes: Vec<_> = (0..LEN / CLUSTER).map(write).collect();
        for requests in [
            &writes[..],
            &[Request::Flush],
            &[discard],
            &[Request::Flush],
        ] {
            assert!(disk.all(requests).iter().all(Result::is_ok));
        }
        served.signal("KILL");
    });
    let _ = served.end();
}

#[test]
fn image_of_killed_server_may_leak_until_leaks_are_repaired() {
    let dir = disk_dir();
    let image = dir.path().join("i");
    qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", "i", "64M"]);
    let mut served = serve(&image, &[]);
    served.load(100, &["--rw", "randwrite"]);
    assert_eq!(problems(&served), json!([]));
    kill_with_leaks(&mut served);
    // The leaks remain when the image is closed properly.
    for _ in 0..2 {
        let mut served = serve(&image, &[]);
        use_once(&served);
        assert_eq!(problems(&served), json!(["leaks"]), "{}", served.log());
        let lines = problem_lines(&served);
        assert_eq!(lines.len(), 1);
        assert!(
            lines[0].contains("fathom img check --repair leaks"),
            "{lines:?}"
        );
        assert_eq!(served.terminate().0, Some(0));
        assert_eq!(served.log().matches("clusters may be leaked").count(), 1);
    }
    let path = as_arg(&image);
    let found = run(&["img", "check", &path]).status.code();
    assert_eq!(found, Some(3), "there are leaks");
    let repair = ["img", "check", "--repair", "leaks", &path];
    assert_eq!(run(&repair).status.code(), Some(0));
    let mut served = serve(&image, &[]);
    use_once(&served);
    assert_eq!(problems(&served), json!([]), "{}", served.log());
    assert!(problem_lines(&served).is_empty());
    assert_eq!(served.terminate().0, Some(0));
}

#[test]
fn image_that_an_upgrade_hands_over_has_no_leaks() {
    let dir = disk_dir();
    let image = dir.path().join("i");
    qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", "i", "64M"]);
    let served = serve(&image, &[]);
    let mut load = served.start_load(
        1 << 30,
        &["--rw", "randwrite", "--reconnect=60s", "--runtime", "2s"],
    );
    eventually("some writes", || {
        let requests = info(&served)["workers"][0]["requests"].as_u64();
        (requests > Some(100)).then_some(())
    });
    served.upgrade();
    assert_eq!(problems(&served), json!([]));
    assert!(load.wait().unwrap().success());
    use_once(&served);
    assert_eq!(problems(&served), json!([]), "{}", served.log());
}

/// Sets a reserved bit of the L2 entry of guest cluster 1, in an image with one L2 table.
fn damage(image: &Path) {
    let mut bytes = fs::read(image).unwrap();
    let word = |bytes: &[u8], at: usize| {
        u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00
    };
    let l1 = word(&bytes, 40) as usize;
    let entry = word(&bytes, l1) as usize + 8;
    bytes[entry + 7] |= 4;
    fs::write(image, bytes).unwrap();
}

#[test]
fn damage_is_shown_when_it_is_found_and_until_it_is_repaired() {
    let dir = disk_dir();
    let image = dir.path().join("i");
    let options = ["-o", "preallocation=metadata"];
    let create = [&["create", "-q", "-f", "qcow2"], &options[..], &["i", "8M"]].concat();
    qemu_img(dir.path(), &create);
    damage(&image);
    let mut served = serve(&image, &[]);
    with_disk(&served.arg("s"), 1, |disk| {
        assert_eq!(problems(&served), json!([]));
        let write = |offset| Request::Write {
            offset,
            data: vec![7; 4096],
        };
        let written = disk.all(&[write(0), write(CLUSTER as u64)]);
        assert!(written[0].is_ok() && written[1].is_err());
        assert_eq!(problems(&served), json!(["damage"]));
    });
    assert_eq!(problems(&served), json!(["damage"]));
    let lines = problem_lines(&served);
    assert_eq!(lines.len(), 1);
    assert!(
        lines[0].contains("fathom img check --repair all"),
        "{lines:?}"
    );
    assert_eq!(served.terminate().0, Some(0));

    // The server does not write to the image any more. The server reports the damage of a read-only
    // disk, even before the disk is used.
    let path = as_arg(&image);
    let (sockets, words) = (short_dir(), ["marked corrupt", "--repair all"]);
    let socket = as_arg(&sockets.path().join("s"));
    let serve_writable = ["serve", &path, "--vhost-user", &socket];
    refused(1, &[&serve_writable[..], &QCOW2].concat(), &words);
    let mut served = serve(&image, &["--readonly"]);
    assert_eq!(problems(&served), json!(["damage"]));
    use_once(&served);
    assert_eq!(problems(&served), json!(["damage"]));
    assert_eq!(served.terminate().0, Some(0));

    let overlay = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "i"];
    qemu_img(dir.path(), &[&overlay[..], &["overlay", "8M"]].concat());
    let mut served = serve(&dir.path().join("overlay"), &[]);
    assert_eq!(problems(&served), json!(["backing-damage"]));
    use_once(&served);
    assert_eq!(problems(&served), json!(["backing-damage"]));
    assert_eq!(served.terminate().0, Some(0));

    let repair = ["img", "check", "--repair", "all", &path];
    assert_eq!(run(&repair).status.code(), Some(0));
    let served = serve(&image, &[]);
    use_once(&served);
    assert_eq!(problems(&served), json!([]));
}
