//! Checks series of incremental backups, which contain what has changed since the previous backup.

use crate::driver::{Request, with_disk};
use crate::exercise::{Random, differ, exercise};
use crate::kinds::{Kind, SIZE, qemu_img, tool};
use crate::support::{Served, as_arg, disk_dir, refused, stdout_of};
use fathom_testing::until;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

fn backup(served: &Served, how: &str, file: &str, args: &[&str]) {
    let api = served.api();
    let all = ["backup", how, &api, file, "--bitmap", "b", "--quiet"];
    stdout_of(&[&all[..], args].concat());
}

fn bitmaps(served: &Served) -> Vec<Value> {
    let all = stdout_of(&["bitmap", "list", &served.api(), "--json"]);
    serde_json::from_str(&all).expect("JSON")
}

/// Returns the number of dirty bytes of the server's only bitmap, which must be valid.
fn dirty(served: &Served) -> u64 {
    let all = bitmaps(served);
    assert_eq!((all.len(), &all[0]["problem"]), (1, &Value::Null));
    all[0]["dirty"].as_u64().unwrap()
}

/// Returns the disk that the last backup of a series contains, as QEMU reads it.
fn flat(dir: &Path, last: &str) -> Vec<u8> {
    qemu_img(dir, &["convert", "-f", "qcow2", "-O", "raw", last, "flat"]);
    fs::read(dir.join("flat")).unwrap()
}

#[test]
fn a_series_of_backups_is_the_disk() {
    // (`own_bitmaps` tests other kinds.)
    for kind in Kind::all().step_by(2) {
        eprintln!("{kind:?}");
        let dir = kind.dir();
        let dir = dir.path();
        kind.make(dir);
        let mut model = kind.contents(dir, None);
        let mut random = Random::new(300 + kind.number);
        let data = as_arg(&dir.join("data.raw"));
        let image = as_arg(&dir.join("i"));
        let file = |n: usize| as_arg(&dir.join(format!("backup{n}")));
        for n in 0..4usize {
            // Each round starts a new server.
            let mut served = Served::start(&image, &kind.serve_writable(&data));
            if n == 0 {
                let api = served.api();
                stdout_of(&["bitmap", "add", &api, "b", "--granularity", "4k"]);
            }
            let base = ["--base", &file(n.saturating_sub(1)), "--verify"].map(str::to_owned);
            let base = Vec::from_iter(base.iter().map(String::as_str));
            with_disk(&served.arg("s"), 2, |disk| {
                if n == 3 {
                    // Data that is written during a backup is in the next one.
                    thread::scope(|scope| {
                        let saves = scope.spawn(|| backup(&served, "incremental", &file(n), &base));
                        exercise(disk, &mut model, &mut random);
                        saves.join().unwrap();
                    });
                    let base = ["--base", &file(n), "--compress"];
                    backup(&served, "incremental", &file(4), &base);
                    return;
                }
                exercise(disk, &mut model, &mut random);
                match n {
                    0 => backup(&served, "full", &file(n), &["--verify"]),
                    _ => backup(&served, "incremental", &file(n), &base),
                }
                assert_eq!(differ(&flat(dir, &file(n)), &model), None, "{kind:?} {n}");
                assert_eq!(dirty(&served), 0);
            });
            assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        }
        assert_eq!(differ(&flat(dir, &file(4)), &model), None, "{kind:?}");
        kind.is_clean(dir);
    }
}

/// Returns many small writes, whose data differs from what earlier rounds have written.
fn changes(random: &mut Random, round: u64) -> Vec<String> {
    let mut args = Vec::new();
    for n in 0..600 {
        let (at, len) = (random.below(SIZE / 512 - 64), 1 + random.below(64));
        let what = match n % 5 {
            0 => "-z".to_owned(),
            _ => format!("-P {}", 1 + (round * 600 + n) % 250),
        };
        args.push("-c".to_owned());
        args.push(format!("aio_write -q {what} {} {}", at * 512, len * 512));
    }
    args
}

#[test]
fn a_server_that_is_killed_forgets_no_change() {
    let dir = disk_dir();
    let dir = dir.path();
    let image = as_arg(&dir.join("image"));
    fs::write(&image, vec![0; SIZE as usize]).unwrap();
    let socket = format!("unix:{}", as_arg(&dir.join("n")));
    let uri = format!("nbd+unix:///d?socket={}", as_arg(&dir.join("n")));
    let mut random = Random::new(7);
    let file = |n: u64| as_arg(&dir.join(format!("backup{n}")));
    let serve = || Served::start(&image, &["--nbd", &socket, "--export-name", "d"]);
    let served = serve();
    stdout_of(&["bitmap", "add", &served.api(), "b", "--granularity", "4k"]);
    backup(&served, "full", &file(0), &[]);
    drop(served);
    for round in 1..8 {
        let mut served = serve();
        let written = || fs::metadata(&image).unwrap().modified().unwrap();
        let before = written();
        let mut load = Command::new("qemu-io");
        load.args(["-f", "raw", &uri])
            .args(changes(&mut random, round));
        let load = load.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut load = load.expect("qemu-io is installed by `make setup`");
        until("a write has begun", || written() != before);
        thread::sleep(Duration::from_millis(random.below(40)));
        served.child.kill().unwrap();
        served.child.wait().unwrap();
        load.wait().unwrap();
        let now = fs::read(&image).unwrap();
        let served = serve();
        let changed = dirty(&served);
        assert!(changed < SIZE, "{changed}");
        backup(
            &served,
            "incremental",
            &file(round),
            &["--base", &file(round - 1)],
        );
        assert_eq!(
            differ(&flat(dir, &file(round)), &now),
            None,
            "round {round}"
        );
        drop(served);
        // A round does not change the whole disk.
        assert!(changed > 0);
    }
}

#[test]
fn what_does_not_become_a_backup_changes_nothing() {
    let dir = disk_dir();
    let dir = dir.path();
    let image = as_arg(&dir.join("image"));
    fs::write(&image, vec![7; SIZE as usize]).unwrap();
    let mut served = Served::start(&image, &[]);
    let (api, file) = (served.api(), |name: &str| as_arg(&dir.join(name)));
    let (full, next) = (file("full"), file("next"));
    let of = |base: &str| {
        ["incremental", &api, &next, "--bitmap", "b", "--base", base].map(str::to_owned)
    };
    let fails = |base: &str, more: &[&str], why: &[&str]| {
        let args = of(base);
        let args = Vec::from_iter(args.iter().map(String::as_str));
        refused(1, &[&["backup"][..], &args, more].concat(), why);
    };
    fails(&full, &[], &["not a backup"]);
    fs::write(&full, "").unwrap();
    fails(&full, &[], &["no bitmap 'b'", "backup full --bitmap b"]);
    refused(1, &["bitmap", "advance", &api, "b"], &["no backup"]);
    refused(
        1,
        &["bitmap", "add", &api, "../b"],
        &["is not a bitmap's name"],
    );
    refused(
        1,
        &["bitmap", "add", &api, "b", "--granularity", "5k"],
        &["power of two"],
    );
    refused(1, &["bitmap", "remove", &api, "b"], &["no bitmap 'b'"]);
    backup(&served, "full", &full, &[]);
    let mut model = fs::read(&image).unwrap();
    with_disk(&served.arg("s"), 1, |disk| {
        exercise(disk, &mut model, &mut Random::new(1));
        let changed = dirty(&served);
        // A backup that no client has confirmed leaves the bitmap as it was.
        stdout_of(&["backup", "start", &api, "--bitmap", "b"]);
        refused(1, &["bitmap", "advance", &api, "b"], &["end it first"]);
        stdout_of(&["backup", "stop", &api]);
        assert_eq!(dirty(&served), changed);
        fs::write(&next, "one from before").unwrap();
        fails(&full, &[], &["exists already"]);
        fs::remove_file(&next).unwrap();
        fails(&full, &["--base-format", "qed"], &["qed"]);
        fails(&full, &["-o", "preallocation=full"], &["preallocation"]);
        assert!(!Path::new(&next).exists());
        assert_eq!(dirty(&served), changed);
        // The bitmap cannot be advanced after a backup that has failed.
        stdout_of(&[
            "backup",
            "start",
            &api,
            "--bitmap",
            "b",
            "--scratch-size",
            "64k",
        ]);
        exercise(disk, &mut model, &mut Random::new(2));
        refused(1, &["backup", "stop", &api], &["has failed"]);
        refused(1, &["bitmap", "advance", &api, "b"], &["no backup"]);
        backup(&served, "incremental", &next, &["--base", &full]);
    });
    assert_eq!(differ(&flat(dir, &next), &model), None);
    assert_eq!(dirty(&served), 0);
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    // The bitmap does not know what other programs change. The server reports that.
    let written = tool(
        dir,
        "qemu-io",
        &["-f", "raw", "-c", "write -P 9 0 1M", &image],
    );
    assert!(written.status.success());
    model[..1 << 20].fill(9);
    let served = Served::start(&image, &[]);
    let all = bitmaps(&served);
    assert!(
        all[0]["problem"]
            .as_str()
            .unwrap()
            .contains("another program")
    );
    assert_eq!(all[0]["dirty"], SIZE);
    let last = file("last");
    backup(
        &served,
        "incremental",
        &last,
        &["--base", &next, "--verify"],
    );
    assert_eq!(differ(&flat(dir, &last), &model), None);
    assert_eq!(dirty(&served), 0);
    stdout_of(&["bitmap", "remove", &served.api(), "b"]);
    assert!(bitmaps(&served).is_empty() && !dir.join("image.bitmaps").exists());
    // A read-only disk has no bitmaps.
    let served = Served::start(&image, &["--readonly"]);
    refused(1, &["bitmap", "add", &served.api(), "b"], &["read-only"]);
}

#[test]
fn other_clients_are_told_what_is_dirty() {
    let dir = disk_dir();
    let dir = dir.path();
    let image = as_arg(&dir.join("image"));
    fs::write(&image, vec![7; SIZE as usize]).unwrap();
    let nbd = format!("unix:{}", as_arg(&dir.join("n")));
    let uri = format!("nbd+unix:///d?socket={}", as_arg(&dir.join("n")));
    let served = Served::start(&image, &["--nbd", &nbd, "--export-name", "d"]);
    let api = served.api();
    stdout_of(&["bitmap", "add", &api, "b"]);
    let changes = [
        "write 1M 64k",
        "write -z 3M 1M",
        "discard 5M 128k",
        "write 6M 512",
    ];
    let changes = changes.iter().flat_map(|change| ["-c", change]);
    let io = Vec::from_iter(["-f", "raw", &uri].into_iter().chain(changes));
    assert!(tool(dir, "qemu-io", &io).status.success());
    let uri = stdout_of(&["backup", "start", &api, "--bitmap", "b"]);
    let uri = uri.trim_end();
    // The bitmap of the backup does not contain what is written after its start.
    let io = ["-f", "raw", "-c", "write 9M 1M", &served_uri(dir)];
    assert!(tool(dir, "qemu-io", &io).status.success());
    let map = tool(
        dir,
        "nbdinfo",
        &["--map=qemu:dirty-bitmap:b", "--json", uri],
    );
    let map: Value = serde_json::from_slice(&map.stdout).expect("JSON");
    let dirty = map
        .as_array()
        .unwrap()
        .iter()
        .filter(|part| part["type"] == 1);
    let dirty: Vec<_> = dirty
        .map(|part| {
            (
                part["offset"].as_u64().unwrap(),
                part["length"].as_u64().unwrap(),
            )
        })
        .collect();
    let mib = 1 << 20;
    let expected = [
        (mib, 64 << 10),
        (3 * mib, mib),
        (5 * mib, 128 << 10),
        (6 * mib, 64 << 10),
    ];
    assert_eq!(dirty, expected);
    let list = tool(dir, "nbdinfo", &["--list", uri]);
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    assert!(
        list.contains("qemu:dirty-bitmap:b") && list.contains("base:allocation"),
        "{list}"
    );
    // Reads the bitmap with QEMU's own client, which shows it as the allocation of the disk.
    let options = format!(
        "driver=nbd,server.type=unix,server.path={},x-dirty-bitmap=qemu:dirty-bitmap:b",
        served.arg("s.backup")
    );
    let map = tool(
        dir,
        "qemu-img",
        &["map", "--output=json", "--image-opts", &options],
    );
    let map: Value = serde_json::from_slice(&map.stdout).expect("JSON");
    // For QEMU, `data` is true where the bitmap is clean; dirty ranges look like holes.
    let parts = map
        .as_array()
        .unwrap()
        .iter()
        .filter(|part| part["data"] == false);
    let found: Vec<_> = parts
        .map(|part| {
            (
                part["start"].as_u64().unwrap(),
                part["length"].as_u64().unwrap(),
            )
        })
        .collect();
    assert_eq!(found, expected);
    stdout_of(&["backup", "stop", &api]);
}

fn served_uri(dir: &Path) -> String {
    format!("nbd+unix:///d?socket={}", as_arg(&dir.join("n")))
}

#[test]
fn a_disk_that_gets_other_sizes_stays_in_its_series() {
    let dir = disk_dir();
    let dir = dir.path();
    let image = as_arg(&dir.join("image"));
    fs::write(&image, vec![7; SIZE as usize]).unwrap();
    let mut served = Served::start(&image, &[]);
    let api = served.api();
    let file = |n: usize| as_arg(&dir.join(format!("backup{n}")));
    backup(&served, "full", &file(0), &[]);
    let half = (SIZE / 2).to_string();
    stdout_of(&["resize", &api, &half, "--shrink"]);
    stdout_of(&["resize", &api, &SIZE.to_string()]);
    backup(&served, "incremental", &file(1), &["--base", &file(0)]);
    let mut model = fs::read(&image).unwrap();
    assert!(model[SIZE as usize / 2..].iter().all(|byte| *byte == 0));
    assert_eq!(differ(&flat(dir, &file(1)), &model), None);
    assert_eq!(dirty(&served), 0);
    // The bytes by which the disk grows are in the next backup, and in no later one.
    let long = SIZE + (1 << 20);
    stdout_of(&["resize", &api, &long.to_string()]);
    assert_eq!(dirty(&served), 1 << 20);
    backup(&served, "incremental", &file(2), &["--base", &file(1)]);
    model.resize(long as usize, 0);
    assert_eq!(differ(&flat(dir, &file(2)), &model), None);
    assert_eq!(dirty(&served), 0);
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
}

#[test]
fn bitmaps_are_begun_anew_renamed_and_put_together() {
    const M: u64 = 1 << 20;
    let dir = disk_dir();
    let dir = dir.path();
    let image = as_arg(&dir.join("image"));
    fs::write(&image, vec![7; SIZE as usize]).unwrap();
    let nbd = format!("unix:{}", as_arg(&dir.join("n")));
    let serve = || Served::start(&image, &["--nbd", &nbd, "--export-name", "d"]);
    let mut served = serve();
    let api = served.api();
    let bitmap = |args: &[&str]| {
        let (what, rest) = args.split_first().unwrap();
        stdout_of(&[&["bitmap", what, &api], rest].concat())
    };
    let write = |range: &str| {
        let change = format!("write {range}");
        let io = ["-f", "raw", "-c", &change, &served_uri(dir)];
        assert!(tool(dir, "qemu-io", &io).status.success());
    };
    let says = |served: &Served| -> Vec<(String, u64)> {
        let one = |one: &Value| (one["name"].as_str().unwrap().into(), one["dirty"].as_u64());
        let all = bitmaps(served);
        let all = all.iter().map(one);
        all.map(|(name, dirty)| (name, dirty.unwrap())).collect()
    };
    let are = |all: &[(&str, u64)]| -> Vec<(String, u64)> {
        all.iter()
            .map(|(name, dirty)| (name.to_string(), *dirty))
            .collect()
    };
    bitmap(&["add", "a", "--granularity", "4k"]);
    write("0 1M");
    bitmap(&["add", "b"]);
    write("4M 1M");
    bitmap(&["add", "c"]);
    write("6M 4k");
    assert_eq!(
        says(&served),
        are(&[("a", 2 * M + 4096), ("b", M + 65536), ("c", 65536)])
    );
    bitmap(&["clear", "a"]);
    assert_eq!(says(&served)[0].1, 0);
    write("8M 8k");
    bitmap(&["merge", "a", "b", "c"]);
    // A merge marks whole blocks of the source bitmaps, which are larger here.
    let (b, c) = (M + 2 * 65536, 2 * 65536);
    assert_eq!(says(&served), are(&[("a", b), ("b", b), ("c", c)]));
    bitmap(&["rename", "b", "z"]);
    let fails = |args: &[&str], why: &str| {
        let (what, rest) = args.split_first().unwrap();
        refused(1, &[&["bitmap", what, &api], rest].concat(), &[why]);
    };
    fails(&["rename", "a", "z"], "'z' already");
    fails(&["rename", "a", "../x"], "is not a bitmap's name");
    fails(&["rename", "b", "y"], "no bitmap 'b'");
    fails(&["clear", "b"], "no bitmap 'b'");
    fails(&["merge", "a", "z", "b"], "no bitmap 'b'");
    // Advancing a bitmap keeps the changes that were merged into it after the backup.
    let back_up = |name: &str| {
        stdout_of(&["backup", "start", &api, "--bitmap", name]);
        fails(&["merge", name, "a"], "end it first");
        stdout_of(&["backup", "stop", &api]);
    };
    back_up("c");
    bitmap(&["merge", "c", "z"]);
    bitmap(&["rename", "c", "d"]);
    bitmap(&["advance", "d"]);
    assert_eq!(says(&served), are(&[("a", b), ("d", b), ("z", b)]));
    back_up("d");
    bitmap(&["clear", "d"]);
    fails(&["advance", "d"], "no backup");
    assert_eq!(says(&served)[1].1, 0);
    // The bitmaps are the same after the server was killed.
    let before = says(&served);
    served.child.kill().unwrap();
    served.child.wait().unwrap();
    let served = serve();
    assert_eq!(says(&served), before);
}

/// A disk that is not in a file has its bitmaps in the directory of `--bitmaps`.
#[test]
fn a_disk_elsewhere_has_bitmaps_in_a_directory() {
    let dir = disk_dir();
    let dir = dir.path();
    let (one, other) = (as_arg(&dir.join("one")), as_arg(&dir.join("other")));
    for image in [&one, &other] {
        fs::write(image, vec![0; SIZE as usize]).unwrap();
    }
    let below = |image: &str, name: &str| {
        let nbd = format!("unix:{}", as_arg(&dir.join(name)));
        let served = Served::start(image, &["--nbd", &nbd, "--export-name", "d"]);
        let uri = format!("nbd+unix:///d?socket={}", as_arg(&dir.join(name)));
        (served, uri)
    };
    let (_one, uri) = below(&one, "n1");
    let (_other, other_uri) = below(&other, "n2");
    let bitmaps_dir = as_arg(&dir.join("bitmaps"));
    let served = Served::start(&uri, &[]);
    refused(1, &["bitmap", "add", &served.api(), "b"], &["--bitmaps"]);
    drop(served);
    let served = Served::start("memory:1M", &["--bitmaps", &bitmaps_dir]);
    let why = ["discarded when the server ends"];
    refused(1, &["bitmap", "add", &served.api(), "b"], &why);
    drop(served);
    let file = |n: usize| as_arg(&dir.join(format!("backup{n}")));
    let mut model = vec![0; SIZE as usize];
    let mut random = Random::new(77);
    for n in 0..4_usize {
        let mut served = Served::start(&uri, &["--bitmaps", &bitmaps_dir]);
        with_disk(&served.arg("s"), 2, |disk| {
            exercise(disk, &mut model, &mut random);
            let scratch = ["--scratch", &as_arg(dir)];
            let before = file(n.saturating_sub(1));
            let base = [&scratch[..], &["--base", &before]].concat();
            match n {
                0 => backup(&served, "full", &file(n), &scratch),
                _ => backup(&served, "incremental", &file(n), &base),
            }
            assert_eq!(dirty(&served), 0);
            assert_eq!(differ(&flat(dir, &file(n)), &model), None, "{n}");
            let (offset, data) = (n as u64 * 65536, vec![5; 512]);
            model[offset as usize..][..512].fill(5);
            assert!(disk.all(&[Request::Write { offset, data }])[0].is_ok());
            assert_eq!(dirty(&served), 65536);
            if n == 2 {
                served.child.kill().unwrap();
            }
        });
        if n != 2 {
            assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        }
    }
    // The bitmaps are not valid for another disk.
    let served = Served::start(&other_uri, &["--bitmaps", &bitmaps_dir]);
    let found = &bitmaps(&served)[0];
    assert!(
        found["problem"].as_str().unwrap().contains("another disk"),
        "{found}"
    );
    assert_eq!(found["dirty"], SIZE);
}
