//! Checks external snapshots: a disk continues on a new overlay.

use crate::driver::with_disk;
use crate::exercise::{Random, differ, exercise};
use crate::kinds::{Kind, tool};
use crate::mirror::{check, complete, flat, start};
use crate::support::{Served, as_arg, disk_dir, refused, stdout_of};
use std::fs;
use std::path::Path;
use std::thread;

pub fn snapshot(served: &Served, file: &str, more: &[&str]) {
    stdout_of(&[&["snapshot", &served.api(), file], more].concat());
}

#[test]
fn a_snapshot_of_every_kind_is_the_disk_as_it_was() {
    for kind in Kind::all()
        .skip(1)
        .step_by(2)
        .filter(|kind| !kind.has("data_file"))
    {
        eprintln!("{kind:?}");
        let dir = kind.dir();
        let dir = dir.path();
        kind.make(dir);
        let mut model = kind.contents(dir, None);
        let mut random = Random::new(900 + kind.number);
        let image = as_arg(&dir.join("i"));
        let layers = tempfile::tempdir_in(dir).unwrap();
        let layer = |n: usize| match n {
            0 => image.clone(),
            1 => as_arg(&dir.join("layer1")),
            n => as_arg(&layers.path().join(format!("layer{n}"))),
        };
        let mut then = Vec::new();
        let mut served = Served::start(&image, &kind.serve_args());
        with_disk(&served.arg("s"), 2, |disk| {
            for n in 1..4 {
                exercise(disk, &mut model, &mut random);
                then.push(model.clone());
                snapshot(&served, &layer(n), &["--transient"]);
                // The backing image is locked, so that other programs cannot write to it.
                let io = ["-f", kind.format, "-c", "write 0 512", &image];
                assert!(!tool(dir, "qemu-io", &io).status.success());
            }
            // Takes a snapshot while the guest writes.
            thread::scope(|scope| {
                let taken = scope.spawn(|| snapshot(&served, &layer(4), &["--transient"]));
                while !taken.is_finished() {
                    exercise(disk, &mut model, &mut random);
                }
                taken.join().unwrap();
            });
            exercise(disk, &mut model, &mut random);
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        kind.is_clean(dir);
        for n in 0..5 {
            let format = if n == 0 { kind.format } else { "qcow2" };
            check(dir, format, &layer(n));
            let expected = then.get(n).or((n == 4).then_some(&model));
            if let Some(expected) = expected {
                let is = flat(dir, format, &layer(n));
                assert_eq!(differ(&is, expected), None, "{kind:?} {n}");
            }
        }
        // A mirror merges all images into one while the disk is in use.
        let (last, one) = (layer(4), as_arg(&dir.join("one")));
        let args = ["--format", "qcow2", "--allow-dir", &as_arg(dir)];
        let mut served = Served::start(&last, &args);
        with_disk(&served.arg("s"), 2, |disk| {
            start(&served, &one, &["-O", "qcow2"]);
            exercise(disk, &mut model, &mut random);
            complete(&served, &["--transient"]);
            assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        assert_eq!(differ(&flat(dir, "qcow2", &one), &model), None, "{kind:?}");
    }
}

#[test]
fn what_cannot_have_a_snapshot_is_refused() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let image = path("i");
    fs::write(&image, vec![7; 4 << 20]).unwrap();
    let fails = |disk: &str, args: &[&str], why: &[&str]| {
        let served = Served::start(disk, args);
        refused(
            1,
            &["snapshot", &served.api(), &path("t"), "--transient"],
            why,
        );
        assert!(!Path::new(&path("t")).exists());
    };
    fails("memory:1M", &[], &["not a file"]);
    fails(&image, &["--readonly"], &["read-only"]);
    fails(&image, &["--size", "1M"], &["part of its file"]);
    fails(&image, &["--filter", "cow"], &["cow"]);
    let served = Served::start(&image, &[]);
    let api = served.api();
    refused(
        1,
        &["snapshot", &api, &path("t")],
        &["command line", "--transient"],
    );
    refused(
        1,
        &["snapshot", &api, &path("no/t"), "--transient"],
        &["cannot create the image"],
    );
    fs::write(path("there"), "mine").unwrap();
    refused(
        1,
        &["snapshot", &api, &path("there"), "--transient"],
        &["file exists"],
    );
    assert_eq!(fs::read(path("there")).unwrap(), b"mine");
    start(&served, &path("t"), &["--wait"]);
    refused(
        1,
        &["snapshot", &api, &path("u"), "--transient"],
        &["a mirror is in progress"],
    );
    assert!(!Path::new(&path("u")).exists());
}

#[test]
fn switch_that_leaves_bitmaps_behind_is_refused_unless_told() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (image, layer, target) = (path("i"), path("layer"), path("target"));
    fs::write(&image, vec![1; 4 << 20]).unwrap();
    let served = Served::start(&image, &["--format", "raw"]);
    let api = served.api();
    let left = ["bitmaps (b)", "full", "--leave-bitmaps"];
    stdout_of(&["bitmap", "add", &api, "b"]);
    refused(1, &["snapshot", &api, &layer, "--transient"], &left);
    assert!(!dir.path().join("layer").exists());
    start(&served, &target, &["-O", "raw", "--wait"]);
    refused(
        1,
        &["mirror", "complete", &api, "--quiet", "--transient"],
        &left,
    );
    // The disk and its bitmap are as before, and the mirror can still be completed.
    let listed = stdout_of(&["bitmap", "list", &api, "--json"]);
    assert!(listed.contains("\"b\""), "{listed}");
    complete(&served, &["--transient", "--leave-bitmaps"]);
    assert_eq!(stdout_of(&["bitmap", "list", &api, "--json"]).trim(), "[]");
    // Without bitmaps, the switch needs no option.
    snapshot(&served, &layer, &["--transient"]);
}
