//! Checks `fathom commit`, which merges a disk's images into a backing image while the disk is in
//! use.

use crate::driver::{Request, with_disk};
use crate::exercise::{KillRounds, Random, differ, exercise};
use crate::keep;
use crate::kinds::{Kind, qemu_img, qemu_io, tool};
use crate::mirror::{
    after_a_kill, await_phase, check, check_killed, complete, flat, served_uri, write_in_order,
    written,
};
use crate::snapshots::snapshot;
use crate::streams::without_snapshots;
use crate::support::{
    Kept, Served, as_arg, disk_dir, eventually, fathom, refused, short_dir, stdout_of,
};
use std::fs::{self, File};
use std::io::Write;
use std::process::Command;
use std::thread;
use std::time::Duration;

fn commit(served: &Served, base: &str, more: &[&str]) {
    stdout_of(
        &[
            &["commit", &served.api(), base, "--quiet", "--transient"],
            more,
        ]
        .concat(),
    );
}

fn stop(served: &Served, more: &[&str]) {
    stdout_of(&[&["mirror", "stop", &served.api()], more].concat());
}

#[test]
fn layers_go_into_every_kind_of_image_while_they_are_used() {
    for kind in Kind::all()
        .skip(1)
        .step_by(2)
        .filter(|kind| !kind.has("data_file"))
    {
        eprintln!("{kind:?}");
        let dir = kind.dir();
        let dir = dir.path();
        kind.make(dir);
        let before = kind.snapshot(dir);
        let mut model = kind.contents(dir, None);
        let mut random = Random::new(1100 + kind.number);
        let image = as_arg(&dir.join("i"));
        let layers = tempfile::tempdir_in(dir).unwrap();
        let layer = |n: usize| as_arg(&layers.path().join(format!("layer{n}")));
        let mut served = Served::start(&image, &kind.serve_args());
        with_disk(&served.arg("s"), 2, |disk| {
            let round = kind.number % 3;
            let (first, second) = (layer(1), layer(2));
            snapshot(&served, &first, &["--transient"]);
            exercise(disk, &mut model, &mut random);
            if round > 0 {
                snapshot(&served, &second, &["--transient"]);
                exercise(disk, &mut model, &mut random);
            }
            if round == 2 {
                // A commit that is stopped leaves the disk and its chain valid.
                commit(&served, &image, &["--until-ready"]);
                exercise(disk, &mut model, &mut random);
                stop(&served, &[]);
                exercise(disk, &mut model, &mut random);
                assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
                commit(&served, &first, &["--until-ready", "--speed", "20M"]);
                exercise(disk, &mut model, &mut random);
                complete(&served, &["--transient"]);
                assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
            }
            let active = if round == 1 { &["--active"][..] } else { &[] };
            thread::scope(|scope| {
                let committed = scope.spawn(|| commit(&served, &image, active));
                while !committed.is_finished() {
                    exercise(disk, &mut model, &mut random);
                }
                committed.join().unwrap();
            });
            exercise(disk, &mut model, &mut random);
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?} {round}");
            let info = stdout_of(&["info", &served.api(), "--json"]);
            assert!(info.contains(&format!("{image:?}")), "{info}");
        });
        assert!(!served.log().contains("WARN"), "{}", served.log());
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        kind.is_clean(dir);
        let is = flat(dir, kind.format, &image);
        assert_eq!(differ(&is, &model), None, "{kind:?}");
        assert!(kind.snapshot(dir) == before, "its snapshot has changed");
    }
}

#[test]
fn every_kind_of_image_goes_into_a_raw_one_while_it_is_used() {
    let kinds = Kind::all().filter(|kind| !kind.has("data_file") && !kind.has("preallocation"));
    for kind in kinds {
        eprintln!("{kind:?}");
        let dir = kind.dir();
        let dir = dir.path();
        kind.make(dir);
        let below = as_arg(&dir.join("base"));
        qemu_img(dir, &["resize", "-q", "-f", "raw", "base", "12M"]);
        without_snapshots(kind, dir, |served| {
            let args = ["commit", &served.api(), &below, "--transient"];
            refused(1, &args, &["internal snapshots"]);
        });
        let mut model = kind.contents(dir, None);
        let mut random = Random::new(1200 + kind.number);
        let (image, base) = (as_arg(&dir.join("i")), as_arg(&dir.join("base")));
        let mut served = Served::start(&image, &kind.serve_args());
        with_disk(&served.arg("s"), 2, |disk| {
            exercise(disk, &mut model, &mut random);
            commit(&served, &base, &["--until-ready"]);
            exercise(disk, &mut model, &mut random);
            stop(&served, &["--force"]);
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
            thread::scope(|scope| {
                let committed = scope.spawn(|| commit(&served, &base, &[]));
                while !committed.is_finished() {
                    exercise(disk, &mut model, &mut random);
                }
                committed.join().unwrap();
            });
            exercise(disk, &mut model, &mut random);
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        check(dir, kind.format, &image);
        assert_eq!(differ(&fs::read(base).unwrap(), &model), None, "{kind:?}");
    }
}

#[test]
fn whenever_the_server_is_killed_it_is_the_same_disk() {
    let dir = disk_dir();
    let dir = dir.path();
    let mut random = Random::new(12);
    let mut served = keep::start(short_dir(), "");
    let mut rounds = KillRounds::new();
    while let Some(round) = rounds.next() {
        let path = |name: &str| as_arg(&dir.join(format!("{name}{round}")));
        let (image, layer, log) = (path("i"), path("l"), dir.join("written"));
        // This pattern shows wherever the load has not written.
        let format = ["raw", "qcow2", "qed"][round % 3];
        qemu_img(dir, &["create", "-q", "-f", format, &image, "4M"]);
        let io = ["-f", format, "-c", "write -P 251 0 4M", &image];
        assert!(tool(dir, "qemu-io", &io).status.success());
        let add = ["disk", "add", "--server", &served.api(), "d", &image];
        stdout_of(&[&add[..], &["--format", format]].concat());
        let api = served.api();
        let load = write_in_order(&served_uri(&served), &log);
        eventually("writes", || (written(&log) > 20).then_some(()));
        stdout_of(&["snapshot", &api, &layer]);
        let before = written(&log);
        eventually("more", || (written(&log) > before + 20).then_some(()));
        let mut commits = fathom();
        commits.args(["commit", &api, &image, "--quiet", "--speed", "2M"]);
        let commits = Kept::spawn(commits.stderr(std::process::Stdio::null()));
        thread::sleep(rounds.pause(&mut random, Duration::from_millis(150)));
        served = keep::again(served, "KILL", "");
        drop(commits);
        drop(load);
        let contents = after_a_kill(&served, &log, 251);
        let table = fs::read_to_string(served.path("disks/d.toml")).unwrap();
        rounds.note(!table.contains(&layer));
        // The same command completes the commit after the kill.
        let api = served.api();
        if table.contains(&layer) {
            commit(&served, &image, &["--disk", "d"]);
        }
        stdout_of(&["disk", "remove", &api, "--disk", "d", "--force"]);
        check_killed(dir, format, &image);
        assert!(flat(dir, format, &image) == contents, "round {round}");
    }
}

#[test]
fn what_cannot_be_committed_is_refused() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (base, small, image, other) = (path("base"), path("small"), path("i"), path("other"));
    let create = |more: &[&str]| qemu_img(dir.path(), &[&["create", "-q", "-f"], more].concat());
    create(&["raw", &base, "4M"]);
    create(&["raw", &small, "1M"]);
    create(&["raw", &path("third"), "4M"]);
    create(&["qcow2", "-b", &base, "-F", "raw", &image]);
    create(&["qcow2", "-b", &base, "-F", "raw", &other]);
    create(&["qcow2", "-b", &small, "-F", "raw", &path("grown"), "4M"]);
    let refuses = |disk: &str, args: &[&str], base: &str, why: &[&str]| {
        let served = Served::start(disk, args);
        refused(1, &["commit", &served.api(), base, "--transient"], why);
    };
    let qcow2 = ["--format", "qcow2"];
    refuses(&base, &[], &base, &["no backing image"]);
    refuses("memory:1M", &[], &base, &["not a file"]);
    let read_only = ["--format", "qcow2", "--readonly"];
    refuses(&image, &read_only, &base, &["read-only"]);
    refuses(
        &path("grown"),
        &qcow2,
        &small,
        &["1 MiB", "4 MiB", "the same size"],
    );
    refuses(&image, &qcow2, &small, &["not a backing image", &base]);
    refuses(&image, &qcow2, &image, &["not a backing image", &base]);
    refuses(&image, &qcow2, &path("no"), &["cannot find the image"]);
    // Another server uses the same base image.
    let mut used = Served::start(&other, &qcow2);
    let served = Served::start(&image, &qcow2);
    let api = served.api();
    let fails = |why: &[&str]| refused(1, &["commit", &api, &base, "--transient"], why);
    let whole = with_disk(&used.arg("s"), 1, |_| {
        with_disk(&served.arg("s"), 1, |disk| {
            fails(&["in use by"]);
            disk.contents()
        })
    });
    assert!(whole.iter().all(|byte| *byte == 0));
    assert_eq!(used.terminate().0, Some(0));
    // The content of the base image, which is declared raw, looks like another format.
    let header = fs::read(&other).unwrap();
    let disguise = |with: &[u8]| {
        File::options()
            .write(true)
            .open(&base)
            .unwrap()
            .write_all(with)
    };
    disguise(&header[..512]).unwrap();
    with_disk(&served.arg("s"), 1, |_| fails(&["qcow2"]));
    disguise(&[0; 512]).unwrap();
    with_disk(&served.arg("s"), 1, |_| {
        refused(
            1,
            &["commit", &api, &base],
            &["command line", "--transient"],
        );
        commit(&served, &base, &["--until-ready"]);
        refused(
            1,
            &["mirror", "complete", &api],
            &["command line", "--transient"],
        );
        await_phase(&served, "ready");
        fails(&["a mirror is in progress"]);
        let snapshot = ["snapshot", &api, &path("l"), "--transient"];
        refused(1, &snapshot, &["a mirror is in progress"]);
        complete(&served, &["--transient"]);
        fails(&["no backing image"]);
    });
    // Another program changes the backing image while the disk is not in use.
    let served = Served::start(&other, &qcow2);
    let rebase = ["rebase", "-u", "-b", &path("third"), "-F", "raw", &other];
    qemu_img(dir.path(), &rebase);
    let args = ["commit", &served.api(), &base, "--transient"];
    refused(1, &args, &["no longer in the same chain"]);
}

#[test]
fn a_base_that_ends_within_a_block_keeps_its_size() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (base, image) = (path("base"), path("i"));
    let size = (4 << 20) + 512;
    fs::write(&base, vec![1; size]).unwrap();
    let create = [
        "create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &image,
    ];
    qemu_img(dir.path(), &create);
    let served = Served::start(&image, &["--format", "qcow2"]);
    with_disk(&served.arg("s"), 1, |disk| {
        let data = vec![2; 1024];
        let offset = (size - 1024) as u64;
        assert_eq!(
            disk.all(&[Request::Write { offset, data }]),
            [Ok(Vec::new())]
        );
        commit(&served, &base, &[]);
        let contents = disk.contents();
        assert!(contents[..size - 1024].iter().all(|byte| *byte == 1));
        assert!(contents[size - 1024..].iter().all(|byte| *byte == 2));
    });
    assert_eq!(fs::metadata(&base).unwrap().len(), size as u64);
}

#[test]
fn a_commit_that_fails_leaves_the_disk_as_it_was() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (base, image) = (path("base"), path("i"));
    let create = |more: &[&str]| qemu_img(dir.path(), &[&["create", "-q", "-f"], more].concat());
    create(&["qcow2", &base, "64M"]);
    create(&["qcow2", "-b", &base, "-F", "qcow2", &image]);
    // Two layers of 24 MiB do not fit into a file of at most 32 MiB.
    qemu_io(dir.path(), &base, "qcow2", &["write -P 1 0 24M"]);
    qemu_io(dir.path(), &image, "qcow2", &["write -P 2 32M 24M"]);
    let mut small = Command::new("prlimit");
    small.args(["--fsize=33554432"]).arg(fathom().get_program());
    let served = Served::start_by(small, &image, &["--format", "qcow2"]);
    with_disk(&served.arg("s"), 1, |disk| {
        let before = disk.contents();
        let args = ["commit", &served.api(), &base, "--transient", "--quiet"];
        refused(1, &args, &["the mirror has failed"]);
        await_phase(&served, "failed");
        // The disk has its former options again, and other programs can open the base image.
        eventually("the base", || {
            let io = ["-f", "qcow2", "-r", "-c", "read -P 1 0 24M", &base];
            tool(dir.path(), "qemu-io", &io)
                .status
                .success()
                .then_some(())
        });
        eventually("the disk has its former options", || {
            (served.log().matches("changed: ").count() == 2).then_some(())
        });
        assert!(disk.contents() == before);
    });
}
