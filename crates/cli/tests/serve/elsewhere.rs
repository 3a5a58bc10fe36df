//! Checks disks whose chain QEMU's tools make shorter, or whose images they make longer, while the
//! disk is not in use.

use crate::driver::with_disk;
use crate::exercise::{Random, differ, exercise};
use crate::kinds::{patient_tool, qemu_img, qemu_io};
use crate::mirror::{check, flat};
use crate::support::nbd::Nbd;
use crate::support::{Kept, Served, as_arg, disk_dir, eventually, fathom, stdout_of};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// Makes the chain `top` on `middle` on `low` on `base`. `base` is raw. Each image is longer than
/// its backing image.
fn chain(format: &str) -> TempDir {
    let dir = disk_dir();
    let path = dir.path();
    fs::write(path.join("base"), vec![9; 3 * MIB as usize]).unwrap();
    let mut below = ("base", "raw");
    for (image, size, what) in [
        ("low", "5M", "write -P 1 4M 500k"),
        ("middle", "7M", "write -P 2 2M 4600k"),
        ("top", "12M", "write -P 3 6M 300k"),
    ] {
        let (name, of) = below;
        let create = [
            "create", "-q", "-f", format, "-b", name, "-F", of, image, size,
        ];
        qemu_img(path, &create);
        qemu_io(path, image, format, &[what]);
        below = (image, format);
    }
    dir
}

#[test]
fn a_disk_goes_on_where_others_have_made_its_chain_shorter() {
    for format in ["qcow2", "qed"] {
        let dir = chain(format);
        let dir = dir.path();
        let mut model = flat(dir, format, "top");
        let mut random = Random::new(31);
        let top = as_arg(&dir.join("top"));
        let mut served = Served::start(&top, &["--format", format]);
        let mut use_it = |model: &mut Vec<u8>| {
            with_disk(&served.arg("s"), 1, |disk| {
                assert_eq!(differ(&disk.contents(), model), None, "{format}");
                exercise(disk, model, &mut random);
                assert_eq!(differ(&disk.contents(), model), None, "{format}");
            });
            let log = served.log();
            let told = log
                .lines()
                .filter_map(|line| line.split_once("top: its chain now has "));
            told.map(|(_, what)| what.to_owned()).next_back()
        };
        assert_eq!(use_it(&mut model), None);
        // All file names stay the same. The backing image becomes longer, and gets the data of the
        // top image.
        qemu_img(dir, &["commit", "-q", "-f", format, "top"]);
        assert_eq!(use_it(&mut model), None);
        // Removes a middle image: its data goes to the image below, which becomes longer.
        qemu_img(dir, &["commit", "-q", "-f", format, "-d", "middle"]);
        qemu_img(
            dir,
            &[
                "rebase", "-u", "-f", format, "-F", format, "-b", "low", "top",
            ],
        );
        fs::remove_file(dir.join("middle")).unwrap();
        assert_eq!(use_it(&mut model).unwrap(), "3 instead of 4 images");
        // Removes the next image in the same way.
        qemu_img(dir, &["commit", "-q", "-f", format, "-d", "low"]);
        qemu_img(
            dir,
            &[
                "rebase", "-u", "-f", format, "-F", "raw", "-b", "base", "top",
            ],
        );
        assert_eq!(use_it(&mut model).unwrap(), "2 instead of 3 images");
        // The top image gets all data and has no backing image any more. Another program changes
        // the former base image.
        qemu_img(dir, &["rebase", "-f", format, "-F", "raw", "-b", "", "top"]);
        File::options()
            .write(true)
            .open(dir.join("base"))
            .unwrap()
            .write_all_at(&[0xee; 1 << 20], 0)
            .unwrap();
        assert_eq!(use_it(&mut model).unwrap(), "1 instead of 2 images");
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        check(dir, format, "top");
        assert_eq!(differ(&flat(dir, format, "top"), &model), None, "{format}");
    }
}

#[test]
fn a_chain_on_other_files_is_refused_until_it_is_as_it_was() {
    let dir = chain("qcow2");
    let dir = dir.path();
    let served = Nbd::start(&as_arg(&dir.join("top")), &["--format", "qcow2"]);
    let reads = || reads(dir, &served.uri());
    let below = |image: &str, name: &str, format: &str| {
        qemu_img(
            dir,
            &[
                "rebase", "-u", "-f", "qcow2", "-F", format, "-b", name, image,
            ],
        );
    };
    let refused = |why: &str| {
        assert!(!reads(), "{why}");
        let count = served.log().matches("restart the server").count();
        assert!(count > 0, "{}", served.log());
        count
    };
    assert!(reads());
    // Refuses another backing file, even if its contents are the same.
    fs::copy(dir.join("middle"), dir.join("other")).unwrap();
    below("top", "other", "qcow2");
    let first = refused("another file");
    below("top", "middle", "qcow2");
    assert!(reads());
    // Refuses an image further down whose file was replaced, or whose format is another one.
    fs::rename(dir.join("low"), dir.join("kept")).unwrap();
    fs::copy(dir.join("kept"), dir.join("low")).unwrap();
    below("top", "low", "qcow2");
    assert!(refused("another one by that name") > first);
    fs::rename(dir.join("kept"), dir.join("low")).unwrap();
    below("top", "low", "raw");
    refused("another format");
    // Accepts another name of the same image, unless this image is on another file.
    fs::copy(dir.join("base"), dir.join("other")).unwrap();
    let name = as_arg(&dir.join("low"));
    qemu_img(dir, &["commit", "-q", "-f", "qcow2", "-d", "middle"]);
    below("low", "other", "raw");
    below("top", &name, "qcow2");
    refused("on another file itself");
    below("low", "base", "raw");
    assert!(reads());
}

#[test]
fn image_with_a_replaced_data_file_is_refused() {
    let dir = disk_dir();
    let dir = dir.path();
    let create = ["create", "-q", "-f", "qcow2", "-o", "data_file=data"];
    let of_its_own = ["create", "-q", "-f", "qcow2", "plain", "12M"];
    qemu_img(dir, &of_its_own);
    qemu_img(dir, &[&create[..], &["low", "12M"]].concat());
    qemu_io(dir, "low", "qcow2", &["write -P 2 2M 1M"]);
    qemu_img(
        dir,
        &[
            "create", "-q", "-f", "qcow2", "-b", "low", "-F", "qcow2", "top",
        ],
    );
    fs::copy(dir.join("data"), dir.join("other")).unwrap();
    let amend = |name: &str| {
        qemu_img(
            dir,
            &[
                "amend",
                "-f",
                "qcow2",
                "-o",
                &format!("data_file={name}"),
                "low",
            ],
        );
    };
    let data = as_arg(&dir.join("data"));
    // Tests this for the disk's own image and for a backing image.
    for (image, args) in [("low", &["--data-file", &data][..]), ("top", &[])] {
        let args = [&["--format", "qcow2"], args].concat();
        let served = Nbd::start(&as_arg(&dir.join(image)), &args);
        let reads = || reads(dir, &served.uri());
        assert!(reads());
        amend("other");
        assert!(!reads(), "another data file of {image}");
        assert!(served.log().contains("restart the server"));
        // The same data file may have another name.
        amend(&data);
        assert!(reads());
        // Replaces the image by one without a data file, which would have the data in itself.
        let low = fs::read(dir.join("low")).unwrap();
        fs::write(dir.join("low"), fs::read(dir.join("plain")).unwrap()).unwrap();
        assert!(!reads(), "no data file of {image}");
        fs::write(dir.join("low"), low).unwrap();
        assert!(reads());
    }
}

/// Returns whether QEMU's tool can read the data that it has written at 2 MiB.
fn reads(dir: &Path, uri: &str) -> bool {
    let read = ["-r", "-f", "raw", "-c", "read -P 2 2M 1M", uri];
    patient_tool(dir, "qemu-io", &read).status.success()
}

/// This happens if an administrator replaces a base image by a newer one, for new disks.
#[test]
fn replaced_backing_files_are_served_until_the_disk_closes() {
    let dir = disk_dir();
    let dir = dir.path();
    let with_data = ["create", "-q", "-f", "qcow2", "-o", "data_file=data"];
    qemu_img(dir, &[&with_data[..], &["base", "12M"]].concat());
    qemu_io(dir, "base", "qcow2", &["write -P 2 2M 1M"]);
    let on_base = ["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2"];
    qemu_img(dir, &[&on_base[..], &["top"]].concat());
    let served = Nbd::start(&as_arg(&dir.join("top")), &["--format", "qcow2"]);
    for file in ["base", "data"] {
        fs::write(dir.join("new"), [7; 1 << 20]).unwrap();
        fs::rename(dir.join("new"), dir.join(file)).unwrap();
        assert!(reads(dir, &served.uri()), "{}", served.log());
        let told = format!(
            "{}: the file was replaced by another file",
            as_arg(&dir.join(file))
        );
        assert!(served.log().contains(&told), "{}", served.log());
    }
}

#[test]
fn an_image_in_several_files_is_refused_if_they_are_others() {
    let dir = disk_dir();
    let dir = dir.path();
    let image = dir.join("i.vmdk");
    let flat = [
        "create",
        "-q",
        "-f",
        "vmdk",
        "-o",
        "subformat=monolithicFlat",
    ];
    qemu_img(dir, &[&flat[..], &["i.vmdk", "12M"]].concat());
    qemu_io(dir, "i.vmdk", "vmdk", &["write -P 2 2M 1M"]);
    fs::copy(dir.join("i-flat.vmdk"), dir.join("j-flat.vmdk")).unwrap();
    let served = Nbd::start(&as_arg(&image), &["--format", "vmdk", "--readonly"]);
    assert!(reads(dir, &served.uri()));
    let names = fs::read_to_string(&image).unwrap();
    fs::write(&image, names.replace("i-flat", "j-flat")).unwrap();
    assert!(!reads(dir, &served.uri()));
    let log = served.log();
    assert!(
        log.contains("names other files than when the image was opened"),
        "{log}"
    );
    fs::write(&image, names).unwrap();
    assert!(reads(dir, &served.uri()));
}

#[test]
fn an_image_that_is_cut_off_is_refused_until_it_is_as_it_was() {
    let dir = disk_dir();
    let dir = dir.path();
    fs::write(dir.join("key"), "correct horse").unwrap();
    let key = format!("file:{}", as_arg(&dir.join("key")));
    let (raw, luks) = (as_arg(&dir.join("raw")), as_arg(&dir.join("luks")));
    let create = ["img", "create", "-q", "-f", "luks", "-o", "iter-time=10"];
    stdout_of(&[&create[..], &[&luks, "8M", "--key", &key]].concat());
    File::create(&raw).unwrap().set_len(8 * MIB).unwrap();
    let of_luks = ["--format", "luks", "--key", &key];
    let of_raw = ["--format", "raw", "--offset", "1M", "--size", "6M"];
    for (image, args) in [(raw, &of_raw[..]), (luks, &of_luks[..])] {
        let served = Nbd::start(&image, args);
        let uri = served.uri();
        let is_let_in = || {
            let read = ["-r", "-f", "raw", "-c", "read 5M 64k", &uri];
            patient_tool(dir, "qemu-io", &read).status.success()
        };
        assert!(is_let_in());
        let file = File::options().write(true).open(&image).unwrap();
        let len = file.metadata().unwrap().len();
        file.set_len(6 * MIB).unwrap();
        assert!(!is_let_in());
        let log = served.log();
        assert!(
            log.contains("shorter than when the image was opened"),
            "{log}"
        );
        file.set_len(len).unwrap();
        assert!(is_let_in());
    }
}

/// Makes a qcow2 image `top` on the shorter image `base`.
fn on_shorter(dir: &Path, format: &str) -> String {
    let create = [
        "create", "-q", "-f", "qcow2", "-u", "-b", "base", "-F", format, "top", "12M",
    ];
    qemu_img(dir, &create);
    as_arg(&dir.join("top"))
}

#[test]
fn a_raw_image_below_is_as_long_as_others_have_made_it() {
    let dir = disk_dir();
    let dir = dir.path();
    fs::write(dir.join("base"), vec![9; 3 * MIB as usize]).unwrap();
    let top = on_shorter(dir, "raw");
    let served = Served::start(&top, &["--format", "qcow2"]);
    let (mut model, mut random) = (flat(dir, "qcow2", &top), Random::new(8));
    for round in 0..3 {
        with_disk(&served.arg("s"), 1, |disk| {
            assert_eq!(differ(&disk.contents(), &model), None, "{round}");
            exercise(disk, &mut model, &mut random);
        });
        qemu_img(dir, &["commit", "-q", "-f", "qcow2", "top"]);
    }
}

#[test]
fn an_encrypted_image_below_is_as_long_as_others_have_made_it() {
    let dir = disk_dir();
    let dir = dir.path();
    fs::write(dir.join("key"), "correct horse").unwrap();
    let key = format!("file:{}", as_arg(&dir.join("key")));
    let base = as_arg(&dir.join("base"));
    let create = [
        "img",
        "create",
        "-q",
        "-f",
        "luks",
        "-o",
        "iter-time=10",
        &base,
        "3M",
    ];
    stdout_of(&[&create[..], &["--key", &key]].concat());
    let top = on_shorter(dir, "luks");
    let served = Served::start(&top, &["--format", "qcow2", "--key", &key]);
    let contents = || with_disk(&served.arg("s"), 1, |disk| disk.contents());
    let before = contents();
    let fathom = |args: &[&str]| fathom().args(args).args(["--key", &key]).output().unwrap();
    eventually("nobody has it", || {
        let resized = fathom(&["img", "resize", "-q", "-f", "luks", &base, "12M"]);
        resized.status.success().then_some(())
    });
    // Where nothing was ever written, an encrypted image has arbitrary data.
    let now = as_arg(&dir.join("now"));
    let convert = [
        "img", "convert", "-q", "-f", "qcow2", "-O", "raw", &top, &now,
    ];
    assert!(fathom(&convert).status.success());
    let now = fs::read(now).unwrap();
    assert!(now[..3 << 20] == before[..3 << 20] && now != before);
    assert_eq!(differ(&contents(), &now), None);
}

#[test]
fn work_on_a_chain_that_others_have_made_shorter_has_failed() {
    let dir = chain("qcow2");
    let dir = dir.path();
    let mut model = flat(dir, "qcow2", "top");
    let top = as_arg(&dir.join("top"));
    let mut served = Served::start(&top, &["--format", "qcow2"]);
    let api = served.api();
    let show = || stdout_of(&["stream", "show", &api]);
    with_disk(&served.arg("s"), 1, |_| {
        stdout_of(&["stream", "start", &api, "--speed", "64k"]);
    });
    eventually("it waits", || show().starts_with("waiting: ").then_some(()));
    qemu_img(dir, &["commit", "-q", "-f", "qcow2", "-d", "middle"]);
    qemu_img(
        dir,
        &[
            "rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", "low", "top",
        ],
    );
    with_disk(&served.arg("s"), 1, |disk| {
        let shown = eventually("its end", || {
            Some(show()).filter(|shown| shown.starts_with("failed: "))
        });
        assert!(shown.contains("begin again"), "{shown}");
        assert_eq!(differ(&disk.contents(), &model), None);
        // A new stream completes. The server may still be restoring the disk's former options.
        eventually("the stream is accepted", || {
            let start = fathom().args(["stream", "start", &api, "--wait"]).output();
            let start = start.unwrap();
            let said = String::from_utf8_lossy(&start.stderr);
            assert!(
                start.status.success() || said.contains("retry when"),
                "{said}"
            );
            start.status.success().then_some(())
        });
        exercise(disk, &mut model, &mut Random::new(5));
        assert_eq!(differ(&disk.contents(), &model), None);
    });
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    check(dir, "qcow2", "top");
    assert_eq!(differ(&flat(dir, "qcow2", "top"), &model), None);
}

#[test]
fn work_below_an_image_that_has_got_snapshots_has_failed() {
    let dir = chain("qcow2");
    let dir = dir.path();
    qemu_img(dir, &["resize", "-q", "-f", "qcow2", "low", "7M"]);
    let model = flat(dir, "qcow2", "top");
    let mut served = Served::start(&as_arg(&dir.join("top")), &["--format", "qcow2"]);
    let (api, low, middle) = (
        served.api(),
        as_arg(&dir.join("low")),
        as_arg(&dir.join("middle")),
    );
    let show = || {
        let shown = fathom().args(["stream", "show", &api]).output().unwrap();
        String::from_utf8(shown.stdout).unwrap()
    };
    for (image, args) in [
        ("top", &["stream", "start", &api, "--wait"][..]),
        ("middle", &["commit", &api, &low, "--top", &middle]),
    ] {
        let mut work = fathom();
        work.args(args).args(["--quiet", "--speed", "64k"]);
        let work = with_disk(&served.arg("s"), 1, |_| {
            let work = Kept::spawn(&mut work);
            eventually("its begin", || {
                show().starts_with("copying: ").then_some(())
            });
            work
        });
        let waits = || eventually("it waits", || show().starts_with("waiting: ").then_some(()));
        waits();
        if image == "middle" {
            // A snapshot in another image does not make the job fail.
            qemu_img(dir, &["snapshot", "-c", "s2", "top"]);
            with_disk(&served.arg("s"), 1, |_| {
                eventually("more of it", || {
                    show().starts_with("copying: ").then_some(())
                });
            });
            waits();
        }
        qemu_img(dir, &["snapshot", "-c", "s1", image]);
        with_disk(&served.arg("s"), 1, |disk| {
            let shown = eventually("its end", || {
                Some(show()).filter(|shown| shown.starts_with("failed: "))
            });
            assert!(shown.contains("begin again"), "{shown}");
            assert_eq!(differ(&disk.contents(), &model), None);
        });
        drop(work);
        qemu_img(dir, &["snapshot", "-d", "s1", image]);
    }
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
}
