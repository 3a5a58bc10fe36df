//! Disks that are brought into the images below their own while they are used.

use crate::driver::with_disk;
use crate::exercise::{Random, differ, exercise};
use crate::keep;
use crate::kinds::{Kind, qemu_img};
use crate::mirror::{
    await_phase, check, check_killed, complete, flat, served_uri, there, write_in_order, written,
};
use crate::snapshots::snapshot;
use crate::support::{
    Kept, Served, as_arg, disk_dir, eventually, fathom, refused, short_dir, stdout_of,
};
use std::fs;
use std::thread;
use std::time::Duration;

fn commit(served: &Served, more: &[&str]) {
    stdout_of(&[&["commit", &served.api(), "--quiet"], more].concat());
}

fn stop(served: &Served, more: &[&str]) {
    stdout_of(&[&["mirror", "stop", &served.api()], more].concat());
}

#[test]
fn layers_go_into_every_kind_of_image_while_they_are_used() {
    for kind in Kind::all().filter(|kind| !kind.has("data_file")) {
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
            for round in 0..3 {
                let (first, second) = (layer(2 * round), layer(2 * round + 1));
                snapshot(&served, &first, &["--unkept"]);
                exercise(disk, &mut model, &mut random);
                if round > 0 {
                    snapshot(&served, &second, &["--unkept"]);
                    exercise(disk, &mut model, &mut random);
                }
                if round == 2 {
                    // Not after all, which changes nothing for those who go by the chain.
                    commit(&served, &["--base", &image, "--until-ready"]);
                    exercise(disk, &mut model, &mut random);
                    stop(&served, &[]);
                    exercise(disk, &mut model, &mut random);
                    assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
                    commit(&served, &["--until-ready", "--speed", "20M"]);
                    exercise(disk, &mut model, &mut random);
                    complete(&served, &["--unkept"]);
                    assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
                }
                let base = ["--unkept", "--base", &image];
                let active = if round == 1 { &["--active"][..] } else { &[] };
                thread::scope(|scope| {
                    let committed = scope.spawn(|| commit(&served, &[&base, active].concat()));
                    while !committed.is_finished() {
                        exercise(disk, &mut model, &mut random);
                    }
                    committed.join().unwrap();
                });
                exercise(disk, &mut model, &mut random);
                assert_eq!(differ(&disk.contents(), &model), None, "{kind:?} {round}");
                let info = stdout_of(&["info", &served.api(), "--json"]);
                assert!(info.contains(&format!("{image:?}")), "{info}");
            }
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
        qemu_img(dir, &["resize", "-q", "-f", "raw", "base", "12M"]);
        let mut model = kind.contents(dir, None);
        let mut random = Random::new(1200 + kind.number);
        let (image, base) = (as_arg(&dir.join("i")), as_arg(&dir.join("base")));
        let mut served = Served::start(&image, &kind.serve_args());
        with_disk(&served.arg("s"), 2, |disk| {
            exercise(disk, &mut model, &mut random);
            commit(&served, &["--until-ready"]);
            exercise(disk, &mut model, &mut random);
            stop(&served, &["--force"]);
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
            thread::scope(|scope| {
                let committed = scope.spawn(|| commit(&served, &["--unkept"]));
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
    let mut switched = 0;
    let rounds = 40;
    for round in 0..rounds {
        let path = |name: &str| as_arg(&dir.join(format!("{name}{round}")));
        let (image, layer, log) = (path("i"), path("l"), dir.join("written"));
        // Whatever is in it shows through where the load has not been.
        let format = ["raw", "qcow2", "qed"][round % 3];
        qemu_img(dir, &["create", "-q", "-f", format, &image, "4M"]);
        let io = ["-f", format, "-c", "write -P 251 0 4M", &image];
        assert!(crate::kinds::tool(dir, "qemu-io", &io).status.success());
        let add = ["disk", "add", "--server", &served.api(), "d", &image];
        stdout_of(&[&add[..], &["--format", format]].concat());
        let api = served.api();
        let load = write_in_order(&served_uri(&served), &log);
        eventually("writes", || (written(&log) > 20).then_some(()));
        stdout_of(&["snapshot", &api, &layer]);
        let before = written(&log);
        eventually("more", || (written(&log) > before + 20).then_some(()));
        let mut commits = fathom();
        commits.args(["commit", &api, "--quiet", "--speed", "2M"]);
        let commits = Kept::spawn(commits.stderr(std::process::Stdio::null()));
        thread::sleep(Duration::from_micros(random.below(150_000)));
        served = keep::again(served, "KILL", "");
        drop(commits);
        drop(load);
        let acknowledged = written(&log);
        let out = path("out");
        let uri = served_uri(&served);
        stdout_of(&["img", "convert", "-q", "-f", "raw", "-O", "raw", &uri, &out]);
        let contents = fs::read(&out).unwrap();
        let found = there(&contents);
        assert!(
            found >= acknowledged,
            "round {round}: {found} of {acknowledged}"
        );
        // (One was under way.)
        let rest = &contents[(found + 1) * 512..];
        assert!(rest.iter().all(|byte| *byte == 251), "round {round}");
        let table = fs::read_to_string(served.path("disks/d.toml")).unwrap();
        switched += usize::from(!table.contains(&layer));
        // Beginning again is all it takes.
        let api = served.api();
        if table.contains(&layer) {
            commit(&served, &["--disk", "d"]);
        }
        stdout_of(&["disk", "remove", &api, "--disk", "d", "--force"]);
        check_killed(dir, format, &image);
        assert!(flat(dir, format, &image) == contents, "round {round}");
    }
    assert!((1..rounds).contains(&switched), "{switched} of {rounds}");
}

#[test]
fn what_cannot_be_committed_is_refused() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (base, small, image, other) = (path("base"), path("small"), path("i"), path("other"));
    let create = |more: &[&str]| qemu_img(dir.path(), &[&["create", "-q", "-f"], more].concat());
    create(&["raw", &base, "4M"]);
    create(&["raw", &small, "1M"]);
    create(&["qcow2", "-b", &base, "-F", "raw", &image]);
    create(&["qcow2", "-b", &base, "-F", "raw", &other]);
    create(&["qcow2", "-b", &small, "-F", "raw", &path("grown"), "4M"]);
    let refuses = |disk: &str, args: &[&str], more: &[&str], why: &[&str]| {
        let served = Served::start(disk, args);
        refused(
            1,
            &[&["commit", &served.api(), "--unkept"], more].concat(),
            why,
        );
    };
    let qcow2 = ["--format", "qcow2"];
    refuses(&base, &[], &[], &["none below it"]);
    refuses("memory:1M", &[], &[], &["not a file"]);
    refuses(
        &image,
        &["--format", "qcow2", "--readonly"],
        &[],
        &["reading only"],
    );
    refuses(&path("grown"), &qcow2, &[], &["1 MiB", "4 MiB", "one size"]);
    refuses(&image, &qcow2, &["--base", &small], &["not one of", &base]);
    refuses(&image, &qcow2, &["--base", &image], &["not one of", &base]);
    refuses(
        &image,
        &qcow2,
        &["--base", &path("no")],
        &["cannot be found"],
    );
    // Somebody else has it below his.
    let mut used = Served::start(&other, &qcow2);
    let served = Served::start(&image, &qcow2);
    let api = served.api();
    let whole = with_disk(&used.arg("s"), 1, |_| {
        with_disk(&served.arg("s"), 1, |disk| {
            refused(1, &["commit", &api, "--unkept"], &["in use by"]);
            disk.contents()
        })
    });
    assert!(whole.iter().all(|byte| *byte == 0));
    assert_eq!(used.terminate().0, Some(0));
    with_disk(&served.arg("s"), 1, |_| {
        refused(1, &["commit", &api], &["command line", "--unkept"]);
        await_phase(&served, "ready");
        refused(1, &["commit", &api], &["being mirrored"]);
        let snapshot = ["snapshot", &api, &path("l"), "--unkept"];
        refused(1, &snapshot, &["being mirrored"]);
        complete(&served, &["--unkept"]);
        refused(1, &["commit", &api], &["none below it"]);
    });
}
