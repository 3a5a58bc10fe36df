//! Checks mirrors: a disk in use is copied to another image, and continues on the copy.

use crate::driver::{Request, with_disk};
use crate::exercise::{KillRounds, Random, differ, exercise};
use crate::keep;
use crate::kinds::{Kind, SIZE, qemu_img, tool};
use crate::support::{
    Kept, Served, as_arg, disk_dir, eventually, fathom, refused, short_dir, stdout_of,
};
use fathom_testing::Deadline;
use serde_json::Value;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

pub fn start(served: &Served, target: &str, more: &[&str]) {
    let (api, quiet) = (served.api(), "--quiet");
    stdout_of(&[&["mirror", "start", &api, target, quiet], more].concat());
}

pub fn complete(served: &Served, more: &[&str]) {
    let api = served.api();
    stdout_of(&[&["mirror", "complete", &api, "--quiet"], more].concat());
}

pub fn mirror(served: &Served) -> Value {
    let shown = stdout_of(&["mirror", "show", &served.api(), "--json"]);
    serde_json::from_str(&shown).unwrap()
}

/// Waits until the mirror is in this phase.
pub fn await_phase(served: &Served, phase: &str) -> Value {
    eventually(phase, || {
        let now = mirror(served);
        (now["phase"] == phase).then_some(now)
    })
}

/// Returns the contents of an image, as QEMU reads them.
pub fn flat(dir: &Path, format: &str, image: &str) -> Vec<u8> {
    let flat = as_arg(&dir.join("flat"));
    qemu_img(
        dir,
        &["convert", "-U", "-f", format, "-O", "raw", image, &flat],
    );
    fs::read(flat).unwrap()
}

pub fn check(dir: &Path, format: &str, image: &str) {
    if format != "raw" {
        qemu_img(dir, &["check", "-f", format, image]);
    }
}

/// Checks an image whose server was killed. The image may have leaked clusters, but no errors.
pub fn check_killed(dir: &Path, format: &str, image: &str) {
    if format != "raw" {
        let output = tool(dir, "qemu-img", &["check", "-f", format, image]);
        let said = String::from_utf8_lossy(&output.stdout);
        assert!([Some(0), Some(3)].contains(&output.status.code()), "{said}");
    }
}

#[test]
fn every_kind_of_image_becomes_another_while_it_is_used() {
    for kind in Kind::all() {
        let format = ["raw", "qcow2", "qed"][kind.number % 3];
        eprintln!("{kind:?} to {format}");
        let dir = kind.dir();
        let dir = dir.path();
        kind.make(dir);
        let mut model = kind.contents(dir, None);
        let mut random = Random::new(500 + kind.number);
        let data = as_arg(&dir.join("data.raw"));
        let (image, target) = (as_arg(&dir.join("i")), as_arg(&dir.join("target")));
        let mut served = Served::start(&image, &kind.serve_writable(&data));
        let active = if kind.number % 2 == 1 {
            "--active"
        } else {
            "--wait"
        };
        with_disk(&served.arg("s"), 2, |disk| {
            exercise(disk, &mut model, &mut random);
            thread::scope(|scope| {
                let started = scope.spawn(|| start(&served, &target, &["-O", format, active]));
                exercise(disk, &mut model, &mut random);
                started.join().unwrap();
            });
            exercise(disk, &mut model, &mut random);
            thread::scope(|scope| {
                let completed = scope.spawn(|| complete(&served, &["--transient"]));
                while !completed.is_finished() {
                    exercise(disk, &mut model, &mut random);
                }
                completed.join().unwrap();
            });
            assert!(!served.log().contains("WARN"), "{}", served.log());
            let then = kind.contents(dir, None);
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
            exercise(disk, &mut model, &mut random);
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
            // The server does not write to the old image any more.
            assert!(then == kind.contents(dir, None));
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        kind.is_clean(dir);
        check(dir, format, &target);
        assert_eq!(
            differ(&flat(dir, format, &target), &model),
            None,
            "{kind:?}"
        );
    }
}

/// Adds a persistent disk on a file, for NBD clients.
pub fn kept_disk(served: &Served, image: &str) {
    let add = ["disk", "add", "--server", &served.api(), "d", image];
    stdout_of(&add);
}

/// Starts a client that writes blocks one after the other. The length of `log` is the number of
/// blocks that the server has acknowledged.
pub fn write_in_order(uri: &str, log: &Path) -> Kept {
    let script = "\
import nbd, os, sys, time
disk = nbd.NBD()
disk.connect_uri(sys.argv[1])
for n in range(8192):
    disk.pwrite(bytes([1 + n % 250]) * 512, n * 512)
    disk.flush()
    os.write(1, b'.')
    time.sleep(0.001)
";
    let mut load = Command::new("/usr/bin/python3");
    load.args(["-c", script, uri]);
    load.stdout(File::create(log).unwrap());
    Kept(load.stderr(Stdio::null()).spawn().unwrap())
}

pub fn written(log: &Path) -> usize {
    fs::metadata(log).unwrap().len() as usize
}

/// Returns the number of blocks that [`write_in_order`] has written, up to the first missing one.
pub fn there(contents: &[u8]) -> usize {
    let block = |n: usize| &contents[n * 512..(n + 1) * 512];
    let is = |n: &usize| {
        block(*n)
            .iter()
            .all(|byte| u64::from(*byte) == 1 + *n as u64 % 250)
    };
    (0..8192).take_while(is).count()
}

/// Returns the contents of disk `d` after its server was killed; see [`disk_after_a_kill`].
pub fn after_a_kill(served: &Served, log: &Path, untouched: u8) -> Vec<u8> {
    disk_after_a_kill(served, "d", log, untouched)
}

/// Returns the contents of a disk after its server was killed. Fails unless the disk has all blocks
/// that [`write_in_order`] noted in `log`, and `untouched` bytes behind them.
pub fn disk_after_a_kill(served: &Served, name: &str, log: &Path, untouched: u8) -> Vec<u8> {
    let acknowledged = written(log);
    let dir = disk_dir();
    let out = as_arg(&dir.path().join("out"));
    let uri = uri_of(served, name);
    stdout_of(&["img", "convert", "-q", "-f", "raw", "-O", "raw", &uri, &out]);
    let contents = fs::read(out).unwrap();
    let found = there(&contents);
    assert!(found >= acknowledged, "{name}: {found} of {acknowledged}");
    // (A write may have been in flight.)
    let rest = contents.get((found + 1) * 512..).unwrap_or_default();
    assert!(rest.iter().all(|byte| *byte == untouched), "behind {found}");
    contents
}

#[test]
fn whenever_the_server_is_killed_nothing_is_lost() {
    let dir = disk_dir();
    let dir = dir.path();
    let path = |name: String| as_arg(&dir.join(name));
    let mut random = Random::new(11);
    let mut served = keep::start(short_dir(), "");
    let mut rounds = KillRounds::new();
    while let Some(round) = rounds.next() {
        let (image, target) = (path(format!("i{round}")), path(format!("t{round}")));
        fs::write(&image, vec![0; 4 << 20]).unwrap();
        kept_disk(&served, &image);
        let log = dir.join("written");
        let load = write_in_order(&served_uri(&served), &log);
        eventually("writes", || (written(&log) > 20).then_some(()));
        let api = served.api();
        let mut completes = fathom();
        if round % 4 < 2 {
            start(&served, &target, &["-O", "qcow2", "--wait"]);
            completes.args(["mirror", "complete", &api, "--quiet"]);
        } else {
            completes.args(["snapshot", &api, &target]);
        }
        let completes = Kept::spawn(completes.stderr(Stdio::null()));
        if round % 2 == 0 {
            thread::sleep(rounds.pause(&mut random, Duration::from_millis(60)));
        } else {
            // Kills the server during the switch, while requests wait, or shortly after it.
            let end = Instant::now() + Duration::from_secs(10);
            let is_on = || served.log().contains(" is done") || Path::new(&target).exists();
            while !is_on() && Instant::now() < end {}
            thread::sleep(Duration::from_micros(random.below(4000)));
        }
        served = keep::again(served, "KILL", "");
        drop(completes);
        // (The load has lost its server.)
        drop(load);
        after_a_kill(&served, &log, 0);
        let table = fs::read_to_string(served.path("disks/d.toml")).unwrap();
        rounds.note(table.contains(&target));
        stdout_of(&["disk", "remove", &served.api(), "--disk", "d", "--force"]);
    }
}

/// The file must name the target before writes go to the target: a kill in between would lose these
/// writes.
#[test]
fn users_wait_until_the_target_is_kept() {
    let dir = disk_dir();
    let dir = dir.path();
    let (image, target) = (as_arg(&dir.join("i")), as_arg(&dir.join("t")));
    fs::write(&image, vec![0; 4 << 20]).unwrap();
    // strace delays the renaming of files.
    let renames = "rename,renameat,renameat2";
    let mut slow = Command::new("strace");
    slow.args(["-f", "-qq", "-o", "/dev/null", "-e"])
        .args([&format!("trace={renames}"), "-e"])
        .arg(format!("inject={renames}:delay_enter=400000"))
        .arg(fathom().get_program());
    let mut served = keep::start_by(slow, short_dir(), "");
    kept_disk(&served, &image);
    start(&served, &target, &["-O", "qcow2", "--wait"]);
    let log = dir.join("written");
    let load = write_in_order(&served_uri(&served), &log);
    eventually("writes", || (written(&log) > 20).then_some(()));
    let api = served.api();
    let mut completes = fathom();
    completes.args(["mirror", "complete", &api, "--quiet"]);
    let completes = Kept::spawn(&mut completes);
    eventually("the switch", || {
        served.log().contains(" is done").then_some(())
    });
    let before = written(&log);
    let table = served.path("disks/d.toml");
    let is_kept = || fs::read_to_string(&table).unwrap().contains(&target);
    let mut last = written(&log);
    let deadline = Deadline::new("the new image in the disk's definition");
    loop {
        // Reads the log before the file: the server may write both in between.
        let has_switched = served.log().contains("changed: ");
        if is_kept() {
            break;
        }
        assert!(
            !has_switched,
            "the disk has its new image before the file names it"
        );
        deadline.check();
        last = written(&log);
    }
    // (A request may have been in flight.)
    assert!(last <= before + 1, "{before} {last}");
    eventually("more of it", || (written(&log) > last + 20).then_some(()));
    drop((load, completes));
    stdout_of(&["quit", &served.api()]);
    served.end();
}

pub fn served_uri(served: &Served) -> String {
    uri_of(served, "d")
}

pub fn uri_of(served: &Served, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", served.arg("n"))
}

#[test]
fn what_is_kept_is_the_target() {
    let dir = disk_dir();
    let (image, target) = (as_arg(&dir.path().join("i")), as_arg(&dir.path().join("t")));
    fs::write(&image, vec![5; 4 << 20]).unwrap();
    let served = keep::start(short_dir(), "");
    let (api, socket) = (served.api(), served.arg("s"));
    let add = ["disk", "add", "--server", &api, "d", &image];
    stdout_of(
        &[
            &add[..],
            &[
                "--vhost-user",
                &socket,
                "--format",
                "raw",
                "--filter",
                "delay",
            ],
        ]
        .concat(),
    );
    // A transient change stays in effect after the switch, but not after a restart.
    stdout_of(&[
        "disk",
        "set",
        &api,
        "--disk",
        "d",
        "delay",
        "read=1us",
        "--transient",
    ]);
    with_disk(&socket, 1, |disk| {
        start(&served, &target, &["-O", "qcow2"]);
        complete(&served, &[]);
        let data = vec![6; 4096];
        assert_eq!(
            disk.all(&[Request::Write { offset: 0, data }]),
            [Ok(Vec::new())]
        );
        let info = stdout_of(&["info", &api, "--json"]);
        let info: Value = serde_json::from_str(&info).unwrap();
        assert_eq!(
            (&info["disk"], &info["format"]),
            (&target.as_str().into(), &"qcow2".into())
        );
        assert_eq!(
            keep::disks(&served),
            [keep::seen("d", true, "delay:read=1us")]
        );
    });
    refused(1, &["mirror", "show", &api], &["no mirror"]);
    let served = keep::again(served, "TERM", "");
    assert_eq!(keep::disks(&served), [keep::seen("d", true, "delay")]);
    let contents = with_disk(&served.arg("s"), 1, |disk| disk.contents());
    assert!(contents[..4096].iter().all(|b| *b == 6) && contents[4096..].iter().all(|b| *b == 5));
    assert!(fs::read(&image).unwrap().iter().all(|b| *b == 5));
    // The disk can be mirrored again.
    with_disk(&served.arg("s"), 1, |disk| {
        let back = as_arg(&dir.path().join("back"));
        start(&served, &back, &[]);
        complete(&served, &[]);
        assert!(disk.contents() == contents);
    });
}

#[test]
fn what_cannot_be_kept_stays_as_it_is() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (image, target, layer) = (path("i"), path("t"), path("layer"));
    fs::write(&image, vec![0; 4 << 20]).unwrap();
    let served = keep::start(short_dir(), "");
    kept_disk(&served, &image);
    let log = dir.path().join("written");
    let load = write_in_order(&served_uri(&served), &log);
    eventually("writes", || (written(&log) > 20).then_some(()));
    start(&served, &target, &["--wait"]);
    // A directory in the place of the definition cannot be replaced by a file.
    let file = served.path("disks/d.toml");
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    let api = served.api();
    refused(
        1,
        &["mirror", "complete", &api, "-q"],
        &["not switched", "d.toml"],
    );
    refused(1, &["mirror", "complete", &api, "-q"], &["has ended"]);
    refused(1, &["snapshot", &api, &layer], &["not switched", "d.toml"]);
    assert!(!Path::new(&layer).exists(), "it is not left behind");
    let now = written(&log);
    eventually("more of it", || (written(&log) > now + 20).then_some(()));
    drop(load);
    let acknowledged = written(&log);
    assert!(there(&fs::read(&image).unwrap()) >= acknowledged);
    let info = stdout_of(&["info", &api, "--json"]);
    assert!(info.contains(&image), "{info}");
    // A snapshot succeeds once the definition can be written again.
    fs::remove_dir(&file).unwrap();
    stdout_of(&["snapshot", &api, &layer]);
    let served = keep::again(served, "KILL", "");
    let info = stdout_of(&["info", &served.api(), "--json"]);
    assert!(info.contains(&layer), "{info}");
}

#[test]
fn a_copy_is_the_disk_as_it_was_when_it_was_ended() {
    let dir = disk_dir();
    let dir = dir.path();
    let (image, target) = (as_arg(&dir.join("i")), as_arg(&dir.join("t")));
    fs::write(&image, vec![0; 4 << 20]).unwrap();
    let served = keep::start(short_dir(), "");
    kept_disk(&served, &image);
    let log = dir.join("written");
    let load = write_in_order(&served_uri(&served), &log);
    eventually("writes", || (written(&log) > 20).then_some(()));
    start(&served, &target, &["-O", "qcow2", "--wait"]);
    let before = written(&log);
    let told = stdout_of(&["mirror", "stop", &served.api()]);
    let after = written(&log);
    assert!(told.starts_with("done: to "), "{told}");
    let copy = flat(dir, "qcow2", &target);
    // (A block that is written while the mirror stops may be in the copy or not.)
    let found = there(&copy);
    assert!(
        (before..=after + 1).contains(&found),
        "{before} {found} {after}"
    );
    let rest = &copy[(found + 1) * 512..];
    assert!(
        rest.iter().all(|byte| *byte == 0),
        "something is there before its turn"
    );
    check(dir, "qcow2", &target);
    eventually("more of it", || (written(&log) > after).then_some(()));
    drop(load);
    refused(1, &["mirror", "stop", &served.api()], &["no mirror"]);
}

#[test]
fn it_goes_on_when_its_virtual_machine_is_back() {
    let dir = disk_dir();
    let dir = dir.path();
    for format in ["raw", "qcow2"] {
        for is_changed in [false, true] {
            let (image, target) = (as_arg(&dir.join("i")), as_arg(&dir.join("t")));
            let _ = (fs::remove_file(&target), fs::remove_file(&image));
            qemu_img(dir, &["create", "-q", "-f", format, &image, "12M"]);
            let mut model = vec![0; SIZE as usize];
            let mut random = Random::new(3);
            let served = Served::start(&image, &["--format", format]);
            let socket = served.arg("s");
            with_disk(&socket, 2, |disk| {
                exercise(disk, &mut model, &mut random);
                start(&served, &target, &["-O", "qcow2"]);
                exercise(disk, &mut model, &mut random);
            });
            await_phase(&served, "waiting");
            refused(1, &["mirror", "stop", &served.api()], &["not ready"]);
            if is_changed {
                let args = ["-f", format, "-c", "write -P 9 0 1M", &image];
                assert!(tool(dir, "qemu-io", &args).status.success());
            }
            with_disk(&socket, 2, |disk| {
                if is_changed {
                    let problem = await_phase(&served, "failed")["problem"].to_string();
                    assert!(
                        problem.contains("other programs may have changed the disk"),
                        "{problem}"
                    );
                    refused(
                        1,
                        &["mirror", "complete", &served.api()],
                        &["other programs may have changed the disk"],
                    );
                    refused(1, &["mirror", "stop", &served.api()], &["must not be used"]);
                    refused(1, &["mirror", "show", &served.api()], &["no mirror"]);
                    return;
                }
                exercise(disk, &mut model, &mut random);
                complete(&served, &["--transient"]);
                exercise(disk, &mut model, &mut random);
                assert_eq!(differ(&disk.contents(), &model), None);
            });
        }
    }
}

/// A guest that writes faster than the mirror copies must be slowed down, or the mirror is never
/// ready.
#[test]
fn users_are_held_back_if_that_is_wanted() {
    let served = Served::start("memory:64M", &[]);
    let target = as_arg(&served.path("t"));
    let mut load = fathom();
    load.args([
        "bench",
        "--vhost-user",
        &served.arg("s"),
        "--runtime",
        "120s",
    ])
    .args(["--rw", "randwrite", "--bs", "64k", "--iodepth", "8"]);
    let load = Kept::spawn(load.stdout(Stdio::null()).stderr(Stdio::null()));
    let speed = ["--speed", "40M"];
    start(&served, &target, &speed);
    eventually("a round", || {
        (mirror(&served)["copied"].as_u64()? > 100 << 20).then_some(())
    });
    assert_eq!(mirror(&served)["phase"], "copying");
    refused(
        1,
        &["mirror", "stop", &served.api()],
        &["not ready", "--force"],
    );
    stdout_of(&["mirror", "stop", &served.api(), "--force"]);
    start(
        &served,
        &target,
        &[&speed[..], &["--active", "--wait"]].concat(),
    );
    complete(&served, &["--transient"]);
    drop(load);
    let info = stdout_of(&["info", &served.api(), "--json"]);
    assert!(info.contains(&target), "{info}");
}
