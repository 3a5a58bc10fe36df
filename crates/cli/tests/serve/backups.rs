//! Checks backups: a client reads a disk as it was at one instant, while the disk is in use.

use crate::alarms::events;
use crate::driver::{Request, with_disk};
use crate::exercise::{Random, differ, exercise};
use crate::kinds::{ENGINES, Kind, SIZE, qemu_img, tool};
use crate::support::nbd::python;
use crate::support::{
    Kept, Served, as_arg, disk_dir, eventually, fathom, listens, refused, run, stdout_of,
};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

const MIB: u64 = 1 << 20;

/// Starts a backup, and returns its URI.
fn start(served: &Served, args: &[&str]) -> String {
    let api = served.api();
    let said = stdout_of(&[&["backup", "start", &api], args].concat());
    said.trim_end().to_owned()
}

fn stop(served: &Served) {
    stdout_of(&["backup", "stop", &served.api()]);
}

fn backup(served: &Served) -> Value {
    let info = stdout_of(&["info", &served.api(), "--json"]);
    let info: Value = serde_json::from_str(&info).expect("JSON");
    info["backup"].clone()
}

/// Returns the contents of this URI, as QEMU reads them.
fn read(dir: &Path, uri: &str) -> Vec<u8> {
    qemu_img(dir, &["convert", "-f", "raw", "-O", "raw", uri, "copy"]);
    fs::read(dir.join("copy")).unwrap()
}

fn raw_image(dir: &Path) -> String {
    let image = dir.join("image");
    let bytes: Vec<_> = (0..SIZE).map(|n| (n / 512 % 251) as u8).collect();
    fs::write(&image, bytes).unwrap();
    as_arg(&image)
}

#[test]
fn every_disk_is_read_as_it_was() {
    for kind in Kind::all() {
        eprintln!("{kind:?}");
        let dir = kind.dir();
        let dir = dir.path();
        kind.make(dir);
        let mut model = kind.contents(dir, None);
        let mut random = Random::new(200 + kind.number);
        let data = as_arg(&dir.join("data.raw"));
        let image = as_arg(&dir.join("i"));
        let mut served = Served::start(&image, &kind.serve_writable(&data));
        with_disk(&served.arg("s"), 2, |disk| {
            for _ in 0..2 {
                exercise(disk, &mut model, &mut random);
                let before = model.clone();
                let uri = start(&served, &[]);
                exercise(disk, &mut model, &mut random);
                // QEMU also reads the backup while the disk is being written.
                let (args, to) = (["convert", "-f", "raw", "-O", "raw"], dir.join("beside"));
                let reader = thread::scope(|scope| {
                    let reader =
                        scope.spawn(|| qemu_img(dir, &[&args[..], &[&uri, "beside"]].concat()));
                    exercise(disk, &mut model, &mut random);
                    reader.join().is_ok()
                });
                assert!(reader, "{kind:?}: it cannot be read");
                let beside = fs::read(to).unwrap();
                assert_eq!(differ(&beside, &before), None, "{kind:?}");
                assert_eq!(differ(&read(dir, &uri), &before), None, "{kind:?}");
                assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
                stop(&served);
            }
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        kind.is_clean(dir);
        assert_eq!(differ(&kind.contents(dir, None), &model), None, "{kind:?}");
    }
}

/// Number of places to which numbered writes go. The writes follow each other, one at a time.
const PLACES: u64 = 64;

fn place(number: u64) -> u64 {
    // (Each place is in a block of its own, which the server copies as a whole.)
    number * 7 % PLACES * (SIZE / PLACES)
}

/// Checks that the copy contains the first writes up to some number, and no later write.
fn check_order(copy: &[u8], least: u64, most: u64) {
    let number = |at: u64| {
        let bytes = &copy[at as usize..at as usize + 8];
        u64::from_le_bytes(bytes.try_into().unwrap())
    };
    let last = (0..PLACES).map(|n| number(place(n))).max().unwrap();
    assert!(
        (least..=most).contains(&last),
        "{last} of {least} to {most}"
    );
    for n in last.saturating_sub(PLACES - 1)..=last {
        assert_eq!(number(place(n)), n, "of the first {last}");
    }
}

#[test]
fn an_instant_is_one_of_the_order_in_which_was_written() {
    let dir = disk_dir();
    for (n, engine) in ENGINES.iter().enumerate() {
        let image = raw_image(dir.path());
        let threads = if n == 0 { "2" } else { "1" };
        let mut served = Served::start(&image, &["--aio", engine, "--iothreads", threads]);
        let (done, ends) = (AtomicU64::new(0), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                with_disk(&served.arg("s"), 2, |disk| {
                    for number in 0.. {
                        let mut data = vec![0; 4096];
                        data[..8].copy_from_slice(&u64::to_le_bytes(number));
                        // The flush makes the writes alternate between the two queues.
                        let flush = vec![Request::Flush; (number % 2) as usize];
                        let write = Request::Write {
                            offset: place(number),
                            data,
                        };
                        let all = disk.all(&[flush, vec![write]].concat());
                        assert!(all.iter().all(Result::is_ok));
                        done.store(number, Ordering::SeqCst);
                        if ends.load(Ordering::SeqCst) {
                            return;
                        }
                    }
                });
            });
            let seen = |least: u64| {
                eventually("it is written", || {
                    let done = done.load(Ordering::SeqCst);
                    (done >= least).then_some(done)
                })
            };
            for _ in 0..5 {
                let least = seen(done.load(Ordering::SeqCst) + 2 * PLACES);
                let uri = start(&served, &[]);
                let most = done.load(Ordering::SeqCst) + 1;
                seen(most + PLACES);
                check_order(&read(dir.path(), &uri), least, most);
                check_order(&read(dir.path(), &uri), least, most);
                stop(&served);
            }
            ends.store(true, Ordering::SeqCst);
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    }
}

#[test]
fn a_scratch_file_that_is_full_fails_the_backup_and_no_guest() {
    let dir = disk_dir();
    let image = raw_image(dir.path());
    let mut model = fs::read(&image).unwrap();
    let mut served = Served::start(&image, &[]);
    let api = served.api();
    let _listener = events(&served);
    let told = || fs::read_to_string(served.path("events")).unwrap_or_default();
    eventually("somebody listens", || {
        for what in ["freeze", "thaw"] {
            stdout_of(&["disk", what, &api]);
        }
        told().contains("changed").then_some(())
    });
    with_disk(&served.arg("s"), 2, |disk| {
        let uri = start(&served, &["--scratch-size", "1M"]);
        exercise(disk, &mut model, &mut Random::new(1));
        assert_eq!(differ(&disk.contents(), &model), None);
        let problem = backup(&served)["problem"].as_str().map(str::to_owned);
        let problem = problem.expect("it has failed");
        assert!(problem.contains("exceeds its limit of 1 MiB"), "{problem}");
        let args = ["convert", "-f", "raw", "-O", "raw", &uri, "copy"];
        assert!(!tool(dir.path(), "qemu-img", &args).status.success());
        refused(1, &["backup", "stop", &api], &["has failed", "1 MiB"]);
        // The next backup works.
        let uri = start(&served, &[]);
        let before = model.clone();
        exercise(disk, &mut model, &mut Random::new(2));
        assert_eq!(differ(&read(dir.path(), &uri), &before), None);
        stop(&served);
    });
    eventually("it was told", || {
        let told = told();
        (told.contains("backup-begun") && told.contains("backup-failed")).then_some(())
    });
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    assert_eq!(differ(&fs::read(&image).unwrap(), &model), None);
}

#[test]
fn full_scratch_disk_fails_the_backup_but_no_guest_request() {
    let dir = disk_dir();
    let image = raw_image(dir.path());
    let small = dir.path().join("small");
    fs::create_dir(&small).unwrap();
    let small = as_arg(&small);
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1M", "tmpfs", &small])
        .status();
    assert!(mounted.unwrap().success());
    let mut model = fs::read(&image).unwrap();
    let mut served = Served::start(&image, &["--sandbox", "off"]);
    with_disk(&served.arg("s"), 1, |disk| {
        start(&served, &["--scratch", &small, "--scratch-size", "100M"]);
        exercise(disk, &mut model, &mut Random::new(1));
        assert_eq!(differ(&disk.contents(), &model), None);
    });
    refused(
        1,
        &["backup", "stop", &served.api()],
        &["has failed", "no space left"],
    );
    let ended = served.terminate().0;
    assert!(
        std::process::Command::new("umount")
            .arg(&small)
            .status()
            .unwrap()
            .success()
    );
    assert_eq!(ended, Some(0), "{}", served.log());
    assert_eq!(differ(&fs::read(&image).unwrap(), &model), None);
}

/// Reads a backup with the code of another program: its own NBD client, extents and reads. Writes
/// into an existing file.
const AS_VIRTNBDBACKUP: &str = r#"
from libvirtnbdbackup.common import common
from libvirtnbdbackup.extenthandler import ExtentHandler
from libvirtnbdbackup.nbdcli import Unix, client
from os import environ

kind = Unix("", environ["CONTEXT"], environ["SOCKET"])
connection = client(kind).connect()
extents = [extent for extent in ExtentHandler(connection, kind).queryBlockStatus() if extent.data]
with open(environ["COPY"], "r+b") as copy:
    for extent in extents:
        common.writeChunk(copy, extent, connection, "raw", False)
print(sum(extent.length for extent in extents))
"#;

#[test]
fn virtnbdbackup_reads_all_of_a_disk_and_then_what_has_changed() {
    let kind = Kind::all().next().unwrap();
    let dir = kind.dir();
    let dir = dir.path();
    kind.make(dir);
    let (mut model, mut random) = (kind.contents(dir, None), Random::new(77));
    let data = as_arg(&dir.join("data.raw"));
    let served = Served::start(&as_arg(&dir.join("i")), &kind.serve_writable(&data));
    let (api, copy) = (served.api(), dir.join("copy"));
    fs::File::create(&copy).unwrap().set_len(SIZE).unwrap();
    let read = |context| {
        let (socket, copy) = (served.arg("s.backup"), as_arg(&copy));
        let environment = [("SOCKET", &*socket), ("COPY", &copy), ("CONTEXT", context)];
        let bytes = python(AS_VIRTNBDBACKUP, &environment);
        bytes.trim_end().parse::<u64>().unwrap()
    };
    with_disk(&served.arg("s"), 1, |disk| {
        exercise(disk, &mut model, &mut random);
        stdout_of(&["bitmap", "add", &api, "b"]);
        for context in ["", "qemu:dirty-bitmap:b", "qemu:dirty-bitmap:b"] {
            let before = model.clone();
            let of = ["--bitmap", "b"];
            start(&served, &of[..if context.is_empty() { 0 } else { 2 }]);
            exercise(disk, &mut model, &mut random);
            let bytes = read(context);
            assert!((1..SIZE).contains(&bytes), "{context}: {bytes}");
            assert_eq!(
                differ(&fs::read(&copy).unwrap(), &before),
                None,
                "{context}"
            );
            stop(&served);
            if !context.is_empty() {
                stdout_of(&["bitmap", "advance", &api, "b"]);
            }
        }
    });
}

#[test]
fn whoever_lets_go_of_the_disk_ends_its_backup() {
    let dir = disk_dir();
    let image = raw_image(dir.path());
    let mut served = Served::start(&image, &[]);
    with_disk(&served.arg("s"), 1, |disk| {
        let uri = start(&served, &[]);
        assert_eq!(read(dir.path(), &uri).len() as u64, disk.size());
    });
    eventually("it has ended", || {
        backup(&served)["problem"].as_str().map(str::to_owned)
    });
    // The image is unlocked, so that the guest can continue on another server.
    eventually("it is free", || {
        let args = ["-f", "raw", "-c", "write 0 512", &image];
        let written = tool(dir.path(), "qemu-io", &args);
        let said = String::from_utf8_lossy(&written.stderr).into_owned();
        (written.status.success() && !said.contains("lock")).then_some(())
    });
    refused(
        1,
        &["backup", "stop", &served.api()],
        &["disconnected from the disk"],
    );
    refused(
        1,
        &["backup", "stop", &served.api()],
        &["there is no backup"],
    );
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
}

#[test]
fn what_would_disturb_a_backup_waits_for_its_end() {
    let dir = disk_dir();
    let image = raw_image(dir.path());
    let mut served = Served::start(&image, &[]);
    let api = served.api();
    with_disk(&served.arg("s"), 1, |disk| {
        start(&served, &[]);
        let begun = "is in progress";
        refused(1, &["backup", "start", &api], &[begun]);
        refused(1, &["resize", &api, "20M"], &[begun]);
        refused(1, &["disk", "freeze", &api], &[begun]);
        refused(1, &["disk", "change", &api, "cache=writethrough"], &[begun]);
        refused(1, &["upgrade", &api], &[begun]);
        refused(1, &["disk", "remove", &api], &["in use by", "a backup"]);
        stop(&served);
        refused(
            1,
            &["backup", "start", &api, "--scratch", "/nowhere"],
            &["/nowhere"],
        );
        refused(
            2,
            &["backup", "start", &api, "--nbd", "tcp:1"],
            &["unix:PATH"],
        );
        assert!(disk.all(&[Request::Flush])[0].is_ok());
        // The image of a served disk cannot be the target of the copy.
        let onto_itself = ["backup", "full", &api, &image, "-O", "raw"];
        refused(1, &onto_itself, &["in use"]);
        stdout_of(&["disk", "freeze", &api]);
        refused(1, &["backup", "start", &api], &["frozen"]);
        stdout_of(&["disk", "thaw", &api]);
        start(&served, &[]);
    });
    // A server that stops also ends its backup.
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    assert!(!Path::new(&served.arg("s.backup")).exists());
    // The server refuses a backup of an image that other processes may change.
    let served = Served::start(&image, &["--readonly", "--force-share"]);
    refused(1, &["backup", "start", &served.api()], &["other processes"]);
}

/// Starts a slow copy, and waits until it is in progress.
fn begin_slowly(served: &Served, file: &str) -> Kept {
    let mut slow = fathom();
    slow.args(["backup", "full", &served.api(), file]);
    let slow = Kept::spawn(slow.args(["-O", "raw", "--rate", "1M"]));
    eventually("it copies", || {
        backup(served)["uri"].as_str().map(str::to_owned)
    });
    slow
}

#[test]
fn a_copy_is_there_when_all_of_it_is() {
    let dir = disk_dir();
    let image = raw_image(dir.path());
    let mut served = Served::start(&image, &["--iothreads", "2"]);
    let (api, socket) = (served.api(), served.arg("s"));
    let file = |name: &str| as_arg(&dir.path().join(name));
    let mut load = fathom();
    load.args([
        "bench",
        "--vhost-user",
        &socket,
        "--rw",
        "randwrite",
        "--runtime",
        "1h",
    ]);
    let load = Kept::spawn(load.args(["--bs", "64k", "--offset", "8M"]));
    eventually("it is in progress", || {
        let info = stdout_of(&["info", &api]);
        (!info.contains("queues:     0 running")).then_some(())
    });
    for args in [&["-O", "qcow2", "-c"][..], &["-O", "raw"], &["-O", "qed"]] {
        let copy = file(args[1]);
        fs::write(&copy, "an older one").unwrap();
        stdout_of(&[&["backup", "full", &api, &copy, "--verify"], args].concat());
        // The load does not write in the first 8 MiB.
        let first = [
            &["compare", "-f", args[1], "-F", "raw", &copy, &image][..],
            &["-p"],
        ];
        let said = tool(dir.path(), "qemu-img", &first.concat());
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        let differs = said
            .split("offset ")
            .nth(1)
            .and_then(|rest| rest.split('!').next());
        let at: Option<u64> = differs.map(|at| at.trim().parse().unwrap());
        assert!(at.is_none_or(|at| at >= 8 * MIB), "{said}");
        assert!(backup(&served).is_null());
    }
    // An interrupted copy leaves the existing file unchanged.
    let kept = fs::read(file("raw")).unwrap();
    let mut slow = begin_slowly(&served, &file("raw"));
    slow.signal("INT");
    eventually("it ends", || slow.0.try_wait().unwrap());
    assert!(fs::read(file("raw")).unwrap() == kept);
    assert!(backup(&served).is_null());
    // A copy whose server is killed also leaves the existing file unchanged.
    let mut slow = begin_slowly(&served, &file("raw"));
    served.child.kill().unwrap();
    let status = eventually("it ends", || slow.0.try_wait().unwrap());
    assert_eq!(status.code(), Some(1));
    assert!(fs::read(file("raw")).unwrap() == kept);
    let names = fs::read_dir(dir.path()).unwrap();
    let parts = names.filter(|name| {
        let name = name.as_ref().unwrap().file_name();
        name.to_string_lossy().contains(".part")
    });
    assert_eq!(parts.count(), 0);
    drop(load);
    assert!(run(&["list"]).status.success());
}

#[test]
fn a_copy_goes_to_an_archive_or_onto_a_servers_disk() {
    let dir = disk_dir();
    let dir = dir.path();
    let image = raw_image(dir);
    let mut model = fs::read(&image).unwrap();
    let at_first = model.clone();
    let served = Served::start(&image, &[]);
    let api = served.api();
    let other = as_arg(&dir.join("other"));
    fs::write(&other, vec![1; SIZE as usize]).unwrap();
    let socket = as_arg(&dir.join("n"));
    let nbd = format!("unix:{socket}");
    let uri = format!("nbd+unix:///d?socket={socket}");
    let mut target = Served::start(&other, &["--nbd", &nbd, "--export-name", "d"]);
    let archive = as_arg(&dir.join("archive"));
    let full = |name: &str, more: &[&str]| {
        let args = ["backup", "full", &api, name, "--quiet"];
        stdout_of(&[&args[..], more].concat());
    };
    let stripes = || walk(&Path::new(&archive).join("stripes")).len();
    with_disk(&served.arg("s"), 2, |disk| {
        full(&uri, &["-O", "raw", "--verify"]);
        full("monday", &["--archive", &archive]);
        let before = stripes();
        let (offset, data) = (5 * MIB, vec![77; 4096]);
        model[offset as usize..][..4096].fill(77);
        assert!(disk.all(&[Request::Write { offset, data }])[0].is_ok());
        full("tuesday", &["--archive", &archive, "--bitmap", "b"]);
        // The archive does not store data again that it already has.
        assert_eq!(stripes(), before + 1);
        for (name, model) in [("monday", &at_first), ("tuesday", &model)] {
            let manifest = format!("{archive}/images/{name}.manifest");
            let back = as_arg(&dir.join(name));
            stdout_of(&["img", "restore", &manifest, &back]);
            assert_eq!(differ(&fs::read(&back).unwrap(), model), None, "{name}");
        }
        let refuse = |name: &str, more: &[&str], code: i32, why: &[&str]| {
            refused(
                code,
                &[&["backup", "full", &api, name][..], more].concat(),
                why,
            );
        };
        refuse("tuesday", &["--archive", &archive], 1, &["already exists"]);
        refuse(&uri, &[], 1, &["-O raw"]);
        refuse("memory:1M", &["-O", "raw"], 1, &["cannot hold a backup"]);
        refuse("x", &["--archive", &archive, "-O", "raw"], 2, &[]);
        refuse("x", &["--archive", &archive, "--verify"], 2, &[]);
        assert_eq!(backup(&served), Value::Null);
    });
    assert_eq!(target.terminate().0, Some(0), "{}", target.log());
    assert_eq!(differ(&fs::read(&other).unwrap(), &at_first), None);
}

/// Neither server returns the data that was written to it.
#[test]
fn a_copy_that_differs_is_no_backup() {
    let dir = disk_dir();
    let dir = dir.path();
    let image = raw_image(dir);
    let first = fs::read(&image).unwrap().iter().position(|byte| *byte != 0);
    let served = Served::start(&image, &[]);
    let api = served.api();
    let socket = as_arg(&dir.join("n"));
    let uri = format!("nbd+unix:///?socket={socket}");
    let larger = (SIZE + MIB).to_string();
    let at = format!("at byte {}; check", first.unwrap() & !511);
    for (plugin, size, problem) in [
        ("null", &*SIZE.to_string(), &*at),
        ("memory", &larger, "has another size than the disk"),
    ] {
        let _ = fs::remove_file(&socket);
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.args(["-f", "-U", &socket, plugin, size]);
        let _nbdkit = Kept::spawn(&mut nbdkit);
        eventually("nbdkit listens", || listens(socket.as_ref()).then_some(()));
        let args = ["backup", "full", &api, &uri, "-O", "raw", "--verify"];
        refused(1, &args, &["not a backup", problem]);
        assert!(backup(&served).is_null());
    }
}

/// Returns all files below a directory.
fn walk(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => all.extend(walk(&path)),
            false => all.push(path),
        }
    }
    all
}
