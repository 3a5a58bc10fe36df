//! Checks bitmaps in qcow2 images, which Fathom and QEMU use in turn.

use crate::driver::{Request, with_disk};
use crate::exercise::{KillRounds, Random, exercise};
use crate::kinds::{Kind, SIZE, patient_tool, qemu_img, qemu_io, tool};
use crate::mirror::write_in_order;
use crate::support::{Served, as_arg, disk_dir, eventually, fathom, refused, stdout_of};
use serde_json::Value;
use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

fn bitmaps(served: &Served) -> Vec<Value> {
    let all = stdout_of(&["bitmap", "list", &served.api(), "--json"]);
    serde_json::from_str(&all).expect("JSON")
}

/// Returns the names of the server's bitmaps, and the names of those with a problem.
fn names(served: &Served) -> (Vec<String>, Vec<String>) {
    let all = bitmaps(served);
    let name = |bitmap: &Value| bitmap["name"].as_str().unwrap().to_owned();
    let problems = all.iter().filter(|bitmap| !bitmap["problem"].is_null());
    (all.iter().map(name).collect(), problems.map(name).collect())
}

/// Returns the dirty ranges of a bitmap of the image, as QEMU reads them.
fn dirty_by_qemu(dir: &Path, image: &str, bitmap: &str) -> Vec<Range<u64>> {
    let context = format!("--map=qemu:dirty-bitmap:{bitmap}");
    let server = [
        "[", "qemu-nbd", "-r", "-f", "qcow2", "-B", bitmap, image, "]",
    ];
    let args = [&[&context, "--json", "--"], &server[..]].concat();
    let map = patient_tool(dir, "nbdinfo", &args);
    let said = String::from_utf8_lossy(&map.stderr);
    assert!(map.status.success(), "{said}");
    let map: Vec<Value> = serde_json::from_slice(&map.stdout).expect("JSON");
    let number = |part: &Value, name: &str| part[name].as_u64().unwrap();
    let dirty = map.iter().filter(|part| number(part, "type") == 1);
    let range = |part: &Value| {
        let start = number(part, "offset");
        start..start + number(part, "length")
    };
    dirty.map(range).collect()
}

/// Returns the only dirty range of a bitmap of the image `i`.
#[track_caller]
fn only_dirty(dir: &Path, bitmap: &str) -> Range<u64> {
    let all = dirty_by_qemu(dir, "i", bitmap);
    assert_eq!(all.len(), 1, "{all:?}");
    all[0].clone()
}

/// Checks that every sector that has changed is dirty.
#[track_caller]
fn is_never_too_clean(before: &[u8], now: &[u8], dirty: &[Range<u64>]) {
    for (n, (a, b)) in before.chunks(512).zip(now.chunks(512)).enumerate() {
        let at = n as u64 * 512;
        assert!(
            a == b || dirty.iter().any(|part| part.contains(&at)),
            "{at:#x} in {dirty:?}"
        );
    }
}

fn bytes(dirty: &[Range<u64>]) -> u64 {
    dirty.iter().map(|part| part.end - part.start).sum()
}

fn flags(dir: &Path, image: &str, bitmap: &str) -> Vec<String> {
    let info = qemu_img(dir, &["info", "-U", "--output=json", image]);
    let info: Value = serde_json::from_str(&info).unwrap();
    let all = info["format-specific"]["data"]["bitmaps"]
        .as_array()
        .cloned();
    let all = all.unwrap_or_default();
    let found = all.iter().find(|one| one["name"] == bitmap);
    let found = found.unwrap_or_else(|| panic!("no bitmap '{bitmap}' in {info}"));
    let flags = found["flags"].as_array().unwrap().iter();
    flags
        .map(|flag| flag.as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn what_one_has_recorded_the_other_goes_on_with() {
    let has_some = |kind: &Kind| kind.format == "qcow2" && !kind.has("compat=0.10");
    for kind in Kind::all().skip(1).step_by(2).filter(has_some) {
        eprintln!("{kind:?}");
        let dir = kind.dir();
        let dir = dir.path();
        kind.make(dir);
        let mut model = kind.contents(dir, None);
        let before = model.clone();
        let mut random = Random::new(900 + kind.number);
        let data = as_arg(&dir.join("data.raw"));
        let image = as_arg(&dir.join("i"));
        qemu_img(dir, &["bitmap", "--add", "-g", "4k", "i", "theirs"]);
        qemu_img(dir, &["bitmap", "--add", "--disable", "i", "disabled"]);
        let mut granularity = "4096";
        for round in 0..3 {
            let mut served = Served::start(&image, &kind.serve_writable(&data));
            let api = served.api();
            if round == 0 {
                stdout_of(&["bitmap", "add", &api, "ours", "--granularity", granularity]);
                granularity = "65536";
            }
            assert_eq!(
                names(&served),
                (vec!["ours".into(), "theirs".into()], vec![])
            );
            with_disk(&served.arg("s"), 2, |disk| {
                exercise(disk, &mut model, &mut random);
                assert_eq!(flags(dir, "i", "theirs"), ["in-use", "auto"]);
                assert_eq!(flags(dir, "i", "disabled"), [""; 0]);
            });
            assert_eq!(served.terminate().0, Some(0), "{}", served.log());
            assert!(!served.log().contains("WARN"), "{}", served.log());
            kind.is_clean(dir);
            let at = random.below(SIZE / 4096) * 4096;
            let change = format!("write -P {} {at} 4k", 100 + round);
            qemu_io(dir, "i", "qcow2", &[&change]);
            model[at as usize..at as usize + 4096].fill(100 + round as u8);
            for name in ["ours", "theirs"] {
                let dirty = dirty_by_qemu(dir, "i", name);
                is_never_too_clean(&before, &model, &dirty);
                assert!(bytes(&dirty) < SIZE, "{kind:?} {dirty:?}");
            }
            assert_eq!(bytes(&dirty_by_qemu(dir, "i", "disabled")), 0);
        }
        // A cleared bitmap has only later changes, no matter which program has cleared it.
        qemu_img(dir, &["bitmap", "--clear", "i", "ours"]);
        let mut served = Served::start(&image, &kind.serve_writable(&data));
        let of = |name: &str| bitmaps(&served).into_iter().find(|one| one["name"] == name);
        assert_eq!(of("ours").unwrap()["dirty"], 0);
        stdout_of(&["bitmap", "clear", &served.api(), "theirs"]);
        with_disk(&served.arg("s"), 2, |_| {
            stdout_of(&["bitmap", "rename", &served.api(), "ours", "other"]);
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        assert_eq!(bytes(&dirty_by_qemu(dir, "i", "theirs")), 0);
        assert_eq!(bytes(&dirty_by_qemu(dir, "i", "other")), 0);
        let all = qemu_img(dir, &["info", "i"]);
        assert!(!all.contains("name: ours"), "{all}");
        kind.is_clean(dir);
    }
}

#[test]
fn series_of_backups_go_on_after_qemu_has_had_the_image() {
    let dir = disk_dir();
    let dir = dir.path();
    qemu_img(dir, &["create", "-q", "-f", "qcow2", "i", "12M"]);
    let image = as_arg(&dir.join("i"));
    let file = |n: u32| as_arg(&dir.join(format!("backup{n}")));
    let mut random = Random::new(3);
    let mut model = vec![0; SIZE as usize];
    for n in 0..4_u32 {
        let mut served = Served::start(&image, &["--format", "qcow2"]);
        let api = served.api();
        let base = file(n.saturating_sub(1));
        let how: &[&str] = match n {
            0 => &["full"],
            _ => &["incremental", "--base", &base],
        };
        with_disk(&served.arg("s"), 1, |disk| {
            exercise(disk, &mut model, &mut random);
            let args = [
                &["backup"],
                how,
                &[
                    api.as_str(),
                    &file(n),
                    "--bitmap",
                    "b",
                    "--verify",
                    "--quiet",
                ],
            ];
            stdout_of(&args.concat());
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        let saved = qemu_img(dir, &["info", "--output=json", &file(n)]);
        let saved: Value = serde_json::from_str(&saved).unwrap();
        assert!(n == 0 || saved["actual-size"].as_u64().unwrap() < SIZE);
        qemu_img(dir, &["convert", "-O", "raw", &file(n), "flat"]);
        assert!(std::fs::read(dir.join("flat")).unwrap() == model, "{n}");
        assert_eq!(bytes(&dirty_by_qemu(dir, "i", "b")), 0);
        let at = random.below(SIZE / 65536) * 65536;
        qemu_io(dir, "i", "qcow2", &[&format!("write -P 200 {at} 64k")]);
        model[at as usize..at as usize + 65536].fill(200);
        assert_eq!(only_dirty(dir, "b"), at..at + 65536);
    }
}

/// Kills the server while the disk is in use, while its image is being released, and in between.
/// The bitmaps have all changes, or all is dirty.
#[test]
fn whenever_the_server_is_killed_no_bitmap_is_too_clean() {
    let dir = disk_dir();
    let dir = dir.path();
    qemu_img(
        dir,
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            "cluster_size=4k",
            "i",
            "12M",
        ],
    );
    qemu_img(dir, &["bitmap", "--add", "-g", "512", "i", "theirs"]);
    let image = as_arg(&dir.join("i"));
    let nbd = format!("unix:{}", as_arg(&dir.join("n")));
    let serve = || {
        Served::start(
            &image,
            &["--format", "qcow2", "--nbd", &nbd, "--export-name", "d"],
        )
    };
    let contents = || {
        qemu_img(
            dir,
            &["convert", "-U", "-f", "qcow2", "-O", "raw", "i", "flat"],
        );
        std::fs::read(dir.join("flat")).unwrap()
    };
    let before = contents();
    let mut random = Random::new(11);
    let mut rounds = KillRounds::new();
    while let Some(round) = rounds.next() {
        let mut served = serve();
        if round == 0 {
            stdout_of(&[
                "bitmap",
                "add",
                &served.api(),
                "ours",
                "--granularity",
                "512",
            ]);
        }
        let uri = format!("nbd+unix:///d?socket={}", as_arg(&dir.join("n")));
        let load = write_in_order(&uri, &dir.join("log"));
        thread::sleep(Duration::from_millis(60 + random.below(60)));
        if round % 2 == 1 {
            // The server releases the image after its client has left.
            drop(load);
            thread::sleep(Duration::from_micros(random.below(3000)));
        }
        served.child.kill().unwrap();
        served.child.wait().unwrap();
        drop(served);
        let was_left = flags(dir, "i", "theirs") == ["auto"];
        rounds.note(was_left);
        let mut served = serve();
        let (all, problems) = names(&served);
        assert_eq!(all, ["ours", "theirs"], "{}", served.log());
        assert!(problems.is_empty(), "the files were right: {problems:?}");
        with_disk(&served.arg("s"), 1, |_| ());
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        let said = tool(dir, "qemu-img", &["check", "-f", "qcow2", "i"]);
        assert!([Some(0), Some(3)].contains(&said.status.code()), "{said:?}");
        let now = contents();
        for name in ["ours", "theirs"] {
            is_never_too_clean(&before, &now, &dirty_by_qemu(dir, "i", name));
        }
    }
}

#[test]
fn bitmap_in_memory_only_is_all_dirty_after_a_kill() {
    let dir = disk_dir();
    let dir = dir.path();
    qemu_img(dir, &["create", "-q", "-f", "qcow2", "i", "12M"]);
    let image = as_arg(&dir.join("i"));
    let mut served = Served::start(&image, &["--format", "qcow2"]);
    let write = |offset: u64| {
        with_disk(&served.arg("s"), 1, |disk| {
            let data = vec![9; 512];
            assert!(disk.all(&[Request::Write { offset, data }])[0].is_ok());
        });
    };
    // The disk is served but not in use, so another program may add a bitmap.
    qemu_img(dir, &["bitmap", "--add", "i", "late"]);
    write(1 << 20);
    assert!(!dir.join("i.bitmaps").exists());
    let first = 1 << 20..(1 << 20) + 65536;
    assert_eq!(only_dirty(dir, "late"), first);
    write(5 << 20);
    assert_eq!(
        dirty_by_qemu(dir, "i", "late"),
        [first, 5 << 20..(5 << 20) + 65536]
    );
    assert_eq!(flags(dir, "i", "late"), ["auto"]);
    with_disk(&served.arg("s"), 1, |_| {
        assert_eq!(flags(dir, "i", "late"), ["in-use", "auto"]);
        served.child.kill().unwrap();
        served.child.wait().unwrap();
    });
    let mut served = Served::start(&image, &["--format", "qcow2"]);
    assert_eq!(names(&served).1, ["late"]);
    assert_eq!(bitmaps(&served)[0]["dirty"], SIZE);
    with_disk(&served.arg("s"), 1, |_| {
        assert_eq!(names(&served).1, ["late"])
    });
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    assert_eq!(bytes(&dirty_by_qemu(dir, "i", "late")), SIZE);
}

#[test]
fn what_the_image_has_no_room_for_stays_beside_it() {
    let dir = disk_dir();
    let dir = dir.path();
    // The bitmap needs more clusters than the file can grow by.
    qemu_img(
        dir,
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            "cluster_size=512",
            "i",
            "12M",
        ],
    );
    let image = as_arg(&dir.join("i"));
    let fill: Vec<String> = (0..96).map(|n| format!("write {}k 64k", n * 128)).collect();
    qemu_io(
        dir,
        "i",
        "qcow2",
        &fill.iter().map(String::as_str).collect::<Vec<_>>(),
    );
    let len = std::fs::metadata(&image).unwrap().len();
    let mut small = Command::new("prlimit");
    small
        .arg(format!("--fsize={}", len + 512))
        .arg(fathom().get_program());
    let mut served = Served::start_by(small, &image, &["--format", "qcow2", "--no-discard"]);
    stdout_of(&["bitmap", "add", &served.api(), "b", "--granularity", "512"]);
    with_disk(&served.arg("s"), 1, |disk| {
        let write = |n: u64| Request::Write {
            offset: n * (128 << 10),
            data: vec![7; 512],
        };
        let all = Vec::from_iter((0..96).step_by(2).map(write));
        assert!(disk.all(&all).iter().all(Result::is_ok));
    });
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    assert!(
        served.log().contains("stay in files next to it"),
        "{}",
        served.log()
    );
    let info = qemu_img(dir, &["info", "i"]);
    assert!(!info.contains("name: b"), "{info}");
    let mut served = Served::start(&image, &["--format", "qcow2"]);
    assert_eq!(names(&served), (vec!["b".into()], vec![]));
    assert_eq!(bitmaps(&served)[0]["dirty"], 48 * 512);
    with_disk(&served.arg("s"), 1, |_| ());
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    assert_eq!(bytes(&dirty_by_qemu(dir, "i", "b")), 48 * 512);
}

#[test]
fn bitmaps_of_all_kinds_are_told_from_one_another() {
    let dir = disk_dir();
    let dir = dir.path();
    qemu_img(dir, &["create", "-q", "-f", "qcow2", "i", "12M"]);
    let image = as_arg(&dir.join("i"));
    for name in ["b", "with space", "gone"] {
        qemu_img(dir, &["bitmap", "--add", "i", name]);
    }
    qemu_img(dir, &["bitmap", "--add", "--disable", "i", "disabled"]);
    let mut served = Served::start(&image, &["--format", "qcow2"]);
    assert_eq!(names(&served).0, ["b", "gone"]);
    let api = served.api();
    with_disk(&served.arg("s"), 1, |_| {
        // The server could not store a bitmap of this name in the image later.
        let why = ["'disabled'", "fathom img bitmap"];
        refused(1, &["bitmap", "add", &api, "disabled"], &why);
        refused(1, &["bitmap", "rename", &api, "b", "disabled"], &why);
        // Bitmaps whose bits would not fit the new size prevent the change.
        refused(1, &["resize", &api, "16M"], &["bitmaps"]);
    });
    assert_eq!(
        served.log().matches("miss writes").count(),
        1,
        "{}",
        served.log()
    );
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    assert_eq!(flags(dir, "i", "with space"), ["in-use", "auto"]);
    assert_eq!(flags(dir, "i", "disabled"), [""; 0]);
    // A bitmap that one program removes is also gone for the other.
    for name in ["with space", "disabled", "gone"] {
        qemu_img(dir, &["bitmap", "--remove", "i", name]);
    }
    let mut served = Served::start(&image, &["--format", "qcow2"]);
    assert_eq!(names(&served).0, ["b"]);
    with_disk(&served.arg("s"), 1, |_| assert_eq!(names(&served).0, ["b"]));
    assert!(!dir.join("i.bitmaps/gone").exists());
    // The bytes that a disk grows by are dirty.
    let api = served.api();
    with_disk(&served.arg("s"), 1, |_| {
        stdout_of(&["resize", &api, "16M"]);
    });
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    assert_eq!(only_dirty(dir, "b"), SIZE..16 << 20);
    let mut served = Served::start(&image, &["--format", "qcow2"]);
    // A virtual machine may still have requests that a killed server has left. Until it has
    // connected, the server changes nothing in the image.
    let remove = ["bitmap", "remove", &served.api(), "b"];
    refused(1, &remove, &["until its virtual machine has connected"]);
    with_disk(&served.arg("s"), 1, |_| ());
    stdout_of(&remove);
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    assert!(!dir.join("i.bitmaps").exists());
    let info = qemu_img(dir, &["info", "i"]);
    assert!(!info.contains("bitmaps"), "{info}");
    qemu_img(dir, &["check", "-q", "i"]);
}

/// The image's refcount table moves while its bitmaps are written.
#[test]
fn the_refcount_table_may_move_meanwhile() {
    let dir = disk_dir();
    let dir = dir.path();
    let options = "cluster_size=512";
    qemu_img(
        dir,
        &["create", "-q", "-f", "qcow2", "-o", options, "i", "16M"],
    );
    // The first refcount table covers 8 MiB.
    qemu_io(dir, "i", "qcow2", &["write 0 7958k"]);
    let image = as_arg(&dir.join("i"));
    let mut served = Served::start(&image, &["--format", "qcow2"]);
    stdout_of(&["bitmap", "add", &served.api(), "b", "--granularity", "512"]);
    let mut model = vec![0; 16 << 20];
    let len = || std::fs::metadata(&image).unwrap().len();
    let mut round = 0;
    while len() < (8 << 20) + 32768 {
        let writes = (0..6).map(|n| (round * 6 + n) * 2048 % (7 << 20) + (8 << 20));
        let writes = Vec::from_iter(writes);
        for at in &writes {
            model[*at as usize..][..512].fill(1);
        }
        let write = |offset: &u64| Request::Write {
            offset: *offset,
            data: vec![1; 512],
        };
        with_disk(&served.arg("s"), 1, |disk| {
            let all = Vec::from_iter(writes.iter().map(write));
            assert!(disk.all(&all).iter().all(Result::is_ok));
        });
        // (As soon as the image is unlocked.)
        eventually("a check", || {
            let checked = tool(dir, "qemu-img", &["check", "-f", "qcow2", "i"]);
            let code = checked.status.code();
            assert!([Some(0), Some(1)].contains(&code), "{checked:?}");
            (code == Some(0)).then_some(())
        });
        round += 1;
        assert!(round < 400, "{}", len());
    }
    let dirty = dirty_by_qemu(dir, "i", "b");
    is_never_too_clean(&vec![0; 16 << 20], &model, &dirty);
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
}

/// The bitmaps of a file that replaces the image are out of date, no matter how the server has
/// ended.
#[test]
fn another_file_in_the_place_of_the_image_is_noticed() {
    for is_killed in [false, true] {
        let dir = disk_dir();
        let dir = dir.path();
        qemu_img(dir, &["create", "-q", "-f", "qcow2", "i", "12M"]);
        let image = as_arg(&dir.join("i"));
        let mut served = Served::start(&image, &["--format", "qcow2"]);
        with_disk(&served.arg("s"), 1, |_| {
            stdout_of(&["bitmap", "add", &served.api(), "b"]);
        });
        assert_eq!(bitmaps(&served)[0]["dirty"], 0);
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        std::fs::copy(dir.join("i"), dir.join("copy")).unwrap();
        let mut served = Served::start(&image, &["--format", "qcow2"]);
        with_disk(&served.arg("s"), 1, |_| match is_killed {
            true => {
                served.child.kill().unwrap();
                served.child.wait().unwrap();
            }
            false => assert_eq!(names(&served).1, [""; 0]),
        });
        drop(served);
        std::fs::rename(dir.join("copy"), dir.join("i")).unwrap();
        let mut served = Served::start(&image, &["--format", "qcow2"]);
        with_disk(&served.arg("s"), 1, |_| {
            let found = &bitmaps(&served)[0];
            let problem = found["problem"].as_str().unwrap();
            assert!(problem.contains("another file"), "{found}");
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        assert_eq!(only_dirty(dir, "b"), 0..SIZE);
        // From then on, the bitmap belongs to this file.
        qemu_img(dir, &["bitmap", "--clear", "i", "b"]);
        let served = Served::start(&image, &["--format", "qcow2"]);
        with_disk(&served.arg("s"), 1, |_| {
            assert_eq!(bitmaps(&served)[0]["dirty"], 0, "{}", served.log());
        });
    }
}

/// When QEMU writes to an external data file, it leaves the image unchanged, unless it records the
/// write.
#[test]
fn what_others_write_to_a_data_file_is_noticed() {
    for (is_new, is_written) in [(true, false), (true, true), (false, false), (false, true)] {
        let dir = disk_dir();
        let dir = dir.path();
        let create = [
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            "data_file=data,data_file_raw=on",
        ];
        qemu_img(dir, &[&create[..], &["i", "12M"]].concat());
        qemu_io(dir, "i", "qcow2", &["write -P 1 0 1M"]);
        let (image, data) = (as_arg(&dir.join("i")), as_arg(&dir.join("data")));
        let mut served = Served::start(&image, &["--format", "qcow2", "--data-file", &data]);
        // (In a file next to the image, until the virtual machine has connected.)
        stdout_of(&["bitmap", "add", &served.api(), "b"]);
        if !is_new {
            with_disk(&served.arg("s"), 1, |disk| {
                let (offset, data) = (8 << 20, vec![3; 512]);
                assert!(disk.all(&[Request::Write { offset, data }])[0].is_ok());
            });
            // At a detach, the server unlocks the image after its last write. Without -U, qemu-img
            // needs the lock.
            eventually("the bitmap is in the unlocked image", || {
                let info = tool(dir, "qemu-img", &["info", &image]);
                String::from_utf8_lossy(&info.stdout)
                    .contains("name: b")
                    .then_some(())
            });
        }
        let before = std::fs::read(dir.join("i")).unwrap();
        if is_written && is_new {
            qemu_io(dir, "i", "qcow2", &["write -P 2 0 64k"]);
        } else if is_written {
            qemu_io(dir, "data", "raw", &["write -P 2 0 64k"]);
        }
        assert!(std::fs::read(dir.join("i")).unwrap() == before);
        let dirty = match (is_written, is_new) {
            (true, _) => SIZE,
            (false, new) => u64::from(!new) * (64 << 10),
        };
        with_disk(&served.arg("s"), 1, |_| {
            let found = &bitmaps(&served)[0];
            assert_eq!(found["problem"].is_string(), is_written, "{found}");
            assert_eq!(found["dirty"], dirty, "{found}");
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    }
}
