//! Checks `fathom commit --top`, which merges images in the middle of a chain into lower ones while
//! the disk is in use.

use crate::driver::with_disk;
use crate::exercise::{KillRounds, Random, differ, exercise};
use crate::keep;
use crate::kinds::{Kind, qemu_img, qemu_io};
use crate::mirror::{after_a_kill, check, check_killed, flat, served_uri, write_in_order, written};
use crate::snapshots::snapshot;
use crate::streams::{await_end, below};
use crate::support::{
    Kept, Served, as_arg, disk_dir, eventually, fathom, refused, short_dir, stdout_of,
};
use serde_json::Value;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

fn commit(served: &Served, top: &str, base: &str, more: &[&str]) {
    let args = ["commit", &served.api(), base, "--top", top, "--quiet"];
    stdout_of(&[&args[..], more].concat());
}

fn stop(served: &Served) -> String {
    stdout_of(&["stream", "stop", &served.api()])
}

/// Returns the jobs of all disks.
fn jobs(served: &Served) -> Value {
    let client = fathom_client::Client::connect(Path::new(&served.api())).unwrap();
    let all: Value = client.get(&["v1", "jobs"]).send().unwrap();
    assert!(fathom().arg("jobs").output().unwrap().status.success());
    all["jobs"].clone()
}

/// Starts a commit that is stopped before its end.
fn stopped(served: &Served, top: &str, base: &str) {
    let api = served.api();
    thread::scope(|scope| {
        let args = ["commit", &api, base, "--top", top, "--speed", "100k"];
        let ended = scope.spawn(move || fathom().args(args).output().unwrap());
        eventually("its begin", || {
            let shown = fathom().args(["stream", "show", &api]).output();
            let shown = String::from_utf8(shown.unwrap().stdout).unwrap();
            shown.starts_with("copying: ").then_some(())
        });
        let jobs = jobs(served);
        assert_eq!(jobs[0]["kind"], "commit", "{jobs}");
        assert_eq!(jobs[0]["target"], base, "{jobs}");
        stop(served);
        let ended = ended.join().unwrap();
        assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    });
}

#[test]
fn middle_layers_are_committed_into_each_kind_of_base() {
    for kind in Kind::all().step_by(2).filter(|kind| !kind.has("data_file")) {
        eprintln!("{kind:?}");
        let dir = kind.dir();
        let dir = dir.path();
        kind.make(dir);
        let before = kind.snapshot(dir);
        let mut model = kind.contents(dir, None);
        let mut random = Random::new(1700 + kind.number);
        let image = as_arg(&dir.join("i"));
        let layer = |n: usize| as_arg(&dir.join(format!("layer{n}")));
        let mut served = Served::start(&image, &kind.serve_args());
        let mut then = Vec::new();
        with_disk(&served.arg("s"), 2, |disk| {
            for n in 1..6 {
                exercise(disk, &mut model, &mut random);
                then = model.clone();
                snapshot(&served, &layer(n), &["--transient"]);
            }
            // Commits a middle image, then the backing image of the disk's own image, then all that
            // are left.
            for (top, base) in [(3, layer(2)), (4, layer(2)), (2, image.clone())] {
                let top = layer(top);
                if base == image {
                    // A commit that is stopped leaves the disk and its chain as they were.
                    stopped(&served, &top, &base);
                    exercise(disk, &mut model, &mut random);
                    assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
                    assert_eq!(below(dir, &layer(5)), "layer2");
                }
                thread::scope(|scope| {
                    let committed =
                        scope.spawn(|| commit(&served, &top, &base, &["--speed", "40M"]));
                    while !committed.is_finished() {
                        exercise(disk, &mut model, &mut random);
                    }
                    committed.join().unwrap();
                });
                assert_eq!(differ(&disk.contents(), &model), None, "{kind:?} {top}");
            }
            // The chain does not need the other images any more.
            assert_eq!(below(dir, &layer(5)), "i");
            (1..5).for_each(|n| fs::remove_file(layer(n)).unwrap());
            exercise(disk, &mut model, &mut random);
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
        });
        assert_eq!(served.log().matches("WARN").count(), 1, "{}", served.log());
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        kind.is_clean(dir);
        check(dir, "qcow2", &layer(5));
        assert_eq!(differ(&flat(dir, "qcow2", &layer(5)), &model), None);
        // The lowest image does not have what was written after the last snapshot.
        assert_eq!(differ(&flat(dir, kind.format, &image), &then), None);
        assert!(kind.snapshot(dir) == before, "its snapshot has changed");
    }
}

/// The lowest image is raw and has data everywhere. The images above hide this data in every way.
#[test]
fn what_the_middle_hides_is_gone_from_below() {
    for format in ["qcow2", "qed"] {
        let dir = disk_dir();
        let dir = dir.path();
        let path = |name: &str| as_arg(&dir.join(name));
        qemu_img(dir, &["create", "-q", "-f", "raw", "ground", "12M"]);
        qemu_io(dir, "ground", "raw", &["write -P 0x77 0 12M"]);
        let on = |below: &str, of: &str, image: &str, size: &str| {
            let create = ["create", "-q", "-f", format, "-b", below, "-F", of, image];
            qemu_img(dir, &[&create[..], &[size]].concat());
        };
        on("ground", "raw", "low", "12M");
        qemu_io(dir, "low", format, &["write -P 0x21 1M 3M"]);
        // Behind the end of a shorter image, the image above it reads zeroes.
        on("low", format, "short", "8M");
        let some = ["write -P 0x31 2M 100k", "write -z 3M 1M"];
        qemu_io(dir, "short", format, &some);
        on("short", format, "middle", "12M");
        qemu_io(dir, "middle", format, &["write -P 0x41 2050k 30k"]);
        on("middle", format, "i", "12M");
        qemu_io(dir, "i", format, &["write -P 0x51 10M 64k"]);
        let mut model = flat(dir, format, "i");
        let lower = flat(dir, format, "middle");
        let mut random = Random::new(18);
        let mut served = Served::start(&path("i"), &["--format", format]);
        with_disk(&served.arg("s"), 2, |disk| {
            commit(&served, &path("middle"), &path("low"), &[]);
            assert_eq!(differ(&disk.contents(), &model), None);
            commit(&served, &path("low"), &path("ground"), &[]);
            exercise(disk, &mut model, &mut random);
            assert_eq!(differ(&disk.contents(), &model), None);
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        assert_eq!(below(dir, "i"), "ground");
        assert_eq!(differ(&flat(dir, format, "i"), &model), None);
        assert_eq!(differ(&fs::read(path("ground")).unwrap(), &lower), None);
    }
}

#[test]
fn whenever_the_server_is_killed_it_is_the_same_disk() {
    let dir = disk_dir();
    let dir = dir.path();
    let mut random = Random::new(19);
    let mut served = keep::start(short_dir(), "");
    let mut rounds = KillRounds::new();
    while let Some(round) = rounds.next() {
        let name = |name: &str| format!("{name}{round}");
        let path = |kind: &str| as_arg(&dir.join(name(kind)));
        let (base, middle, own, log) = (path("b"), path("m"), path("o"), dir.join("written"));
        let format = ["raw", "qcow2", "qed"][round % 3];
        qemu_img(dir, &["create", "-q", "-f", format, &base, "4M"]);
        qemu_io(dir, &base, format, &["write -P 252 0 4M"]);
        let create = ["create", "-q", "-f", "qcow2", "-b", &base, "-F", format];
        qemu_img(dir, &[&create[..], &[&middle]].concat());
        qemu_io(dir, &middle, "qcow2", &["write -P 251 0 4M"]);
        let api = served.api();
        let add = ["disk", "add", "--server", &api, "d", &middle];
        stdout_of(&[&add[..], &["--format", "qcow2"]].concat());
        let load = write_in_order(&served_uri(&served), &log);
        eventually("writes", || (written(&log) > 20).then_some(()));
        stdout_of(&["snapshot", &api, &own]);
        let before = written(&log);
        eventually("more", || (written(&log) > before + 20).then_some(()));
        let mut commits = fathom();
        let args = ["commit", &api, &base, "--top", &middle];
        commits.args(args).args(["--quiet", "--speed", "12M"]);
        let commits = Kept::spawn(commits.stderr(Stdio::null()));
        thread::sleep(rounds.pause(&mut random, Duration::from_millis(450)));
        served = keep::again(served, "KILL", "");
        drop(commits);
        drop(load);
        let contents = after_a_kill(&served, &log, 251);
        let is_done = below(dir, &own) == *name("b");
        rounds.note(is_done);
        // The same command completes the commit after the kill.
        if !is_done {
            commit(&served, &middle, &base, &["--disk", "d"]);
        }
        let api = served.api();
        stdout_of(&["disk", "remove", &api, "--disk", "d", "--force"]);
        assert_eq!(below(dir, &own), *name("b"));
        fs::remove_file(middle).unwrap();
        check_killed(dir, format, &base);
        check_killed(dir, "qcow2", &own);
        assert!(flat(dir, "qcow2", &own) == contents, "round {round}");
    }
}

#[test]
fn what_cannot_be_committed_is_refused() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let create = |more: &[&str]| qemu_img(dir.path(), &[&["create", "-q", "-f"], more].concat());
    let on = |format: &str, below: &str, of: &str, image: &str, size: &str| {
        create(&[format, "-b", &path(below), "-F", of, &path(image), size]);
    };
    create(&["raw", &path("ground"), "4M"]);
    create(&["raw", &path("elsewhere"), "4M"]);
    on("qcow2", "ground", "raw", "small", "2M");
    on("qcow2", "small", "qcow2", "low", "4M");
    on("qcow2", "low", "qcow2", "middle", "4M");
    on("qcow2", "middle", "qcow2", "i", "4M");
    on("qcow2", "middle", "qcow2", "other", "4M");
    let qcow2 = ["--format", "qcow2"];
    let mut served = Served::start(&path("i"), &qcow2);
    let api = served.api();
    let fails = |top: &str, base: &str, why: &[&str]| {
        refused(1, &["commit", &api, &path(base), "--top", &path(top)], why);
    };
    with_disk(&served.arg("s"), 1, |disk| {
        fails(
            "i",
            "middle",
            &["not a backing image of the disk", "middle"],
        );
        fails("middle", "i", &["not a backing image of the disk"]);
        fails("middle", "middle", &["is not a backing image of"]);
        fails("low", "middle", &["is not a backing image of"]);
        fails("middle", "elsewhere", &["not a backing image of the disk"]);
        fails("middle", "no", &["cannot find the image"]);
        fails("middle", "small", &["2 MiB", "4 MiB", "the same size"]);
        let args = ["commit", &api, &path("low"), "--top", &path("middle")];
        refused(2, &[&args[..], &["--active"]].concat(), &["--active"]);
        refused(
            2,
            &[&args[..], &["--until-ready"]].concat(),
            &["--until-ready"],
        );
        // Another disk uses the same backing images.
        let mut other = Served::start(&path("other"), &qcow2);
        with_disk(&other.arg("s"), 1, |_| {
            fails("middle", "low", &["in use by"]);
        });
        assert_eq!(other.terminate().0, Some(0), "{}", other.log());
        assert!(disk.contents().iter().all(|byte| *byte == 0));
        // The content of the lowest image, which is declared raw, looks like another format.
        let header = fs::read(path("other")).unwrap();
        let ground = File::options().write(true).open(path("ground"));
        ground.unwrap().write_all(&header[..512]).unwrap();
        commit(&served, &path("middle"), &path("low"), &[]);
    });
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    qemu_img(dir.path(), &["snapshot", "-c", "first", &path("low")]);
    qemu_img(
        dir.path(),
        &["resize", "-q", "-f", "qcow2", &path("small"), "4M"],
    );
    let served = Served::start(&path("i"), &qcow2);
    let api = served.api();
    let fails = |top: &str, base: &str, why: &[&str]| {
        refused(1, &["commit", &api, &path(base), "--top", &path(top)], why);
    };
    with_disk(&served.arg("s"), 1, |_| {
        fails("low", "small", &["internal snapshots"]);
        fails("small", "ground", &["qcow2"]);
    });
}

#[test]
fn a_commit_that_fails_leaves_the_disk_as_it_was() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (base, middle, image) = (path("base"), path("middle"), path("i"));
    let create = |more: &[&str]| qemu_img(dir.path(), &[&["create", "-q", "-f"], more].concat());
    create(&["qcow2", &base, "64M"]);
    create(&["qcow2", "-b", &base, "-F", "qcow2", &middle]);
    create(&["qcow2", "-b", &middle, "-F", "qcow2", &image]);
    // Two layers of 24 MiB do not fit into a file of at most 32 MiB.
    qemu_io(dir.path(), &base, "qcow2", &["write -P 1 0 24M"]);
    qemu_io(dir.path(), &middle, "qcow2", &["write -P 2 32M 24M"]);
    let mut small = Command::new("prlimit");
    small.args(["--fsize=33554432"]).arg(fathom().get_program());
    let served = Served::start_by(small, &image, &["--format", "qcow2"]);
    with_disk(&served.arg("s"), 1, |disk| {
        let before = disk.contents();
        let args = ["commit", &served.api(), &base, "--top", &middle, "--quiet"];
        refused(1, &args, &["the copy has failed", "cannot write"]);
        await_end(&served);
        assert!(stop(&served).starts_with("failed"));
        assert!(disk.contents() == before);
    });
    assert_eq!(below(dir.path(), &image), *middle);
}

/// QEMU takes the text before a colon for a protocol, unless it is a part of a path.
#[test]
fn images_have_names_that_lead_back_to_them() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let [base, middle, image] = ["b:ase", "m:iddle", "i"].map(path);
    let create = |more: &[&str]| qemu_img(dir.path(), &[&["create", "-q", "-f"], more].concat());
    create(&["raw", &base, "4M"]);
    create(&["qcow2", "-b", &base, "-F", "raw", &middle]);
    create(&["qcow2", "-b", &middle, "-F", "qcow2", &image]);
    qemu_io(dir.path(), &middle, "qcow2", &["write -P 9 1M 1M"]);
    let before = flat(dir.path(), "qcow2", &image);
    let mut served = Served::start(&image, &["--format", "qcow2"]);
    with_disk(&served.arg("s"), 1, |disk| {
        commit(&served, &middle, &base, &[]);
        assert_eq!(differ(&disk.contents(), &before), None);
    });
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    assert_eq!(below(dir.path(), &image), "./b:ase");
    assert!(flat(dir.path(), "qcow2", &image) == before);
}
