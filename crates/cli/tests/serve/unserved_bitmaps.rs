//! Checks `fathom img bitmap` for bitmaps in files next to images, and for those of devices, while
//! no server uses the disk.

use crate::driver::{Request, with_disk};
use crate::kinds::{SIZE, qemu_img, tool};
use crate::support::loop_device::Loop;
use crate::support::{Served, as_arg, disk_dir, eventually, refused, run, stdout_of};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Returns the bitmaps: for each, its name, its dirty bytes, and the reason if all of it is dirty.
fn listed(args: &[&str]) -> Vec<(String, u64, Option<String>)> {
    let all = [&["img", "bitmap", "--list", "--json"], args].concat();
    let all: Value = serde_json::from_str(&stdout_of(&all)).expect("JSON");
    let one = |one: &Value| {
        assert_eq!(one["flags"][1], "beside", "{one}");
        let name = one["name"].as_str().unwrap().to_owned();
        let problem = one["problem"].as_str().map(str::to_owned);
        (name, one["count"].as_u64().unwrap(), problem)
    };
    all.as_array().unwrap().iter().map(one).collect()
}

/// Returns the names and dirty bytes of bitmaps that all must be valid.
fn dirty(args: &[&str]) -> Vec<(String, u64)> {
    let all = listed(args).into_iter();
    let known = all.map(|(name, dirty, problem)| {
        assert_eq!(problem, None, "{name}");
        (name, dirty)
    });
    known.collect()
}

fn write(served: &Served, offset: u64, len: usize) {
    with_disk(&served.arg("s"), 1, |disk| {
        let data = vec![5; len];
        assert!(disk.all(&[Request::Write { offset, data }])[0].is_ok());
    });
}

fn are(all: &[(&str, u64)]) -> Vec<(String, u64)> {
    let all = all.iter().map(|(name, dirty)| (name.to_string(), *dirty));
    all.collect()
}

struct Disk {
    image: String,
    serve: Vec<String>,
}

impl Disk {
    /// Makes a raw disk of zeroes.
    fn raw(dir: &Path) -> Disk {
        let image = as_arg(&dir.join("i"));
        fs::write(&image, vec![0; SIZE as usize]).unwrap();
        Disk {
            image,
            serve: Vec::new(),
        }
    }

    fn serve(&self) -> Served {
        let args = Vec::from_iter(self.serve.iter().map(String::as_str));
        Served::start(&self.image, &args)
    }

    fn bitmap(&self, args: &[&str], name: &str) {
        let all = [&["img", "bitmap"], args, &[&self.image, name]].concat();
        stdout_of(&all);
    }
}

/// Changes bitmaps with the tool and with servers in turn. `more` has options for the tool.
fn goes_on(disk: &Disk, more: &[&str]) {
    let list = || dirty(&[more, &[&disk.image]].concat());
    disk.bitmap(&[&["--add", "-g", "4k"][..], more].concat(), "fine");
    disk.bitmap(&[&["--add"][..], more].concat(), "day");
    assert_eq!(list(), are(&[("day", 0), ("fine", 0)]));
    let mut served = disk.serve();
    write(&served, 1 << 20, 512);
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    assert_eq!(list(), are(&[("day", 65536), ("fine", 4096)]));
    disk.bitmap(&[&["--clear"][..], more].concat(), "day");
    disk.bitmap(&[&["--add", "-g", "4k"][..], more].concat(), "sum");
    disk.bitmap(
        &[&["--merge", "fine", "--merge", "day"][..], more].concat(),
        "sum",
    );
    assert_eq!(list(), are(&[("day", 0), ("fine", 4096), ("sum", 4096)]));
    let mut served = disk.serve();
    write(&served, 2 << 20, 65536);
    served.child.kill().unwrap();
    served.child.wait().unwrap();
    drop(served);
    let after = are(&[("day", 65536), ("fine", 69632), ("sum", 69632)]);
    eventually("its locks are gone", || {
        let args = [&["img", "bitmap", "--list", &disk.image][..], more].concat();
        run(&args).status.success().then_some(())
    });
    assert_eq!(list(), after);
    // The next server continues with the same bitmaps.
    let mut served = disk.serve();
    let of_server = stdout_of(&["bitmap", "list", &served.api(), "--json"]);
    let of_server: Value = serde_json::from_str(&of_server).expect("JSON");
    let of_server = of_server.as_array().unwrap();
    assert_eq!(of_server.len(), after.len());
    for (one, (name, dirty)) in of_server.iter().zip(&after) {
        assert_eq!(
            (&one["name"], &one["dirty"]),
            (&name.as_str().into(), &(*dirty).into())
        );
    }
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    for name in ["day", "fine", "sum"] {
        disk.bitmap(&[&["--remove"][..], more].concat(), name);
    }
    assert_eq!(list(), []);
}

#[test]
fn bitmaps_beside_images_are_seen_to_while_nobody_serves_them() {
    let formats: [(&str, &str); 4] = [
        ("raw", "size=12M"),
        ("qed", "size=12M"),
        ("qcow2", "size=12M,compat=0.10"),
        ("luks", "size=12M"),
    ];
    for (format, options) in formats {
        eprintln!("{format}");
        let dir = disk_dir();
        let image = as_arg(&dir.path().join("i"));
        let mut serve = vec!["--format".to_owned(), format.to_owned()];
        match format {
            "luks" => {
                let key = as_arg(&dir.path().join("key"));
                fs::write(&key, "secret").unwrap();
                let key = format!("file:{key}");
                let args = [
                    "img", "create", "-q", "-f", "luks", "--key", &key, &image, "12M",
                ];
                stdout_of(&args);
                serve.extend(["--key".to_owned(), key]);
            }
            _ => {
                let args = ["create", "-q", "-f", format, "-o", options, &image];
                qemu_img(dir.path(), &args);
            }
        }
        let disk = Disk { image, serve };
        goes_on(&disk, &["-f", format]);
        assert!(!dir.path().join("i.bitmaps").exists());
    }
}

#[test]
#[ignore = "needs root: loop devices"]
fn so_are_those_of_a_device_and_of_a_server() {
    let dir = disk_dir();
    let file = dir.path().join("file");
    fs::write(&file, vec![0; SIZE as usize]).unwrap();
    let device = Loop::of(&file);
    let bitmaps = as_arg(&dir.path().join("bitmaps"));
    let disk = |image: &str| Disk {
        image: image.to_owned(),
        serve: ["--bitmaps", &bitmaps].map(str::to_owned).to_vec(),
    };
    refused(
        1,
        &["img", "bitmap", "--add", &device.0, "b"],
        &["--bitmaps"],
    );
    goes_on(&disk(&device.0), &["--bitmaps", &bitmaps]);
    let below = format!("unix:{}", as_arg(&dir.path().join("below")));
    let _below = Served::start(&device.0, &["--nbd", &below, "--export-name", "d"]);
    let uri = format!("nbd+unix:///d?socket={}", as_arg(&dir.path().join("below")));
    goes_on(&disk(&uri), &["--bitmaps", &bitmaps]);
    // An export with another name may be another disk.
    disk(&uri).bitmap(&["--add", "--bitmaps", &bitmaps], "b");
    let other = uri.replace("/d?", "/?");
    let found = listed(&["--bitmaps", &bitmaps, &other]);
    assert!(
        found[0].2.as_ref().unwrap().contains("another disk"),
        "{found:?}"
    );
}

#[test]
fn refused_operations_on_unserved_bitmaps_change_nothing() {
    let dir = disk_dir();
    let disk = Disk::raw(dir.path());
    let image = disk.image.clone();
    disk.bitmap(&["--add"], "b");
    let own = as_arg(&dir.path().join("own"));
    qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", &own, "12M"]);
    qemu_img(dir.path(), &["bitmap", "--add", &own, "o"]);
    let fails = |args: &[&str], why: &str| {
        refused(1, &[&["img", "bitmap"], args].concat(), &[why]);
    };
    fails(&["--add", &image, "b"], "'b' already");
    fails(&["--add", &image, "../c"], "is not a bitmap's name");
    fails(&["--add", "-g", "3k", &image, "c"], "power of two");
    fails(&["--remove", &image, "c"], "no bitmap 'c'");
    fails(&["--clear", &image, "c"], "no bitmap 'c'");
    fails(&["--merge", "c", &image, "b"], "no bitmap 'c'");
    fails(&["--disable", &image, "b"], "cannot be disabled");
    fails(
        &["--clear", "--merge", "b", &image, "b"],
        "one action at a time",
    );
    fails(&["--merge", "o", "-b", &own, &image, "b"], "source file");
    fails(&["--list", "memory:1M"], "memory");
    assert_eq!(dirty(&[&image]), are(&[("b", 0)]));
    // While a server uses the disk, its bitmaps can be listed with `-U`, but not changed.
    let mut served = disk.serve();
    with_disk(&served.arg("s"), 1, |disk| {
        let (offset, data) = (1 << 20, vec![5; 4096]);
        assert!(disk.all(&[Request::Write { offset, data }])[0].is_ok());
        fails(&["--clear", &image, "b"], "in use");
        fails(&["--list", &image], "in use");
        assert_eq!(dirty(&["-U", &image]), are(&[("b", 65536)]));
    });
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    // A bitmap does not know what another program has changed.
    let args = ["-f", "raw", "-c", "write 5M 1M", &image];
    assert!(tool(dir.path(), "qemu-io", &args).status.success());
    let found = listed(&[&image]);
    assert!(found[0].2.as_ref().unwrap().contains("another program"));
    assert_eq!(found[0].1, SIZE);
    // The problem remains, even after the bitmap has been merged into another one.
    disk.bitmap(&["--add"], "c");
    disk.bitmap(&["--merge", "b"], "c");
    let found = listed(&[&image]);
    assert!(
        found[0].2.is_some() && found[1] == ("c".into(), SIZE, None),
        "{found:?}"
    );
}

/// Only the lock of the bitmaps' directory protects this disk.
#[test]
fn nobody_changes_the_bitmaps_of_a_disk_in_use() {
    let dir = disk_dir();
    let dir = dir.path();
    let file = as_arg(&dir.join("file"));
    fs::write(&file, vec![0; SIZE as usize]).unwrap();
    let below = format!("unix:{}", as_arg(&dir.join("below")));
    let _below = Served::start(&file, &["--nbd", &below, "--export-name", "d"]);
    let uri = format!("nbd+unix:///d?socket={}", as_arg(&dir.join("below")));
    let bitmaps = as_arg(&dir.join("bitmaps"));
    let disk = Disk {
        image: uri.clone(),
        serve: ["--bitmaps", &bitmaps].map(str::to_owned).to_vec(),
    };
    let add = ["img", "bitmap", "--add", "--bitmaps", &bitmaps, &uri, "b"];
    for round in 0..2 {
        // (First without bitmaps, then after the last bitmap has been removed.)
        let mut served = disk.serve();
        with_disk(&served.arg("s"), 1, |disk| {
            let (offset, data) = (1 << 20, vec![5; 4096]);
            assert!(disk.all(&[Request::Write { offset, data }])[0].is_ok());
            if round == 1 {
                stdout_of(&["bitmap", "add", &served.api(), "a"]);
                stdout_of(&["bitmap", "remove", &served.api(), "a"]);
            }
            refused(1, &add, &["another process"]);
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    }
    stdout_of(&add);
    assert_eq!(dirty(&["--bitmaps", &bitmaps, &uri]), are(&[("b", 0)]));
    // The directory of `--bitmaps` belongs to the user, so it is not removed with its last bitmap.
    disk.bitmap(&["--remove", "--bitmaps", &bitmaps], "b");
    assert!(Path::new(&bitmaps).is_dir());
}

/// Files of another program in the directory of `--bitmaps` stay unchanged.
#[test]
fn a_directory_of_something_else_stays_as_it_is() {
    let dir = disk_dir();
    let dir = dir.path();
    let (image, other, wrong) = ("i", "o", "wrong");
    let [image, other, wrong] = [image, other, wrong].map(|name| as_arg(&dir.join(name)));
    fs::create_dir(&wrong).unwrap();
    for path in [&image, &other] {
        fs::write(path, vec![0; SIZE as usize]).unwrap();
    }
    let there = |name: &str| Path::new(&wrong).join(name);
    let _socket = std::os::unix::net::UnixListener::bind(there("socket")).unwrap();
    fs::copy("/bin/sleep", there("program")).unwrap();
    let mut program = std::process::Command::new(there("program"))
        .arg("100")
        .spawn()
        .unwrap();
    for name in ["text", ".mine.new", ".mine.next"] {
        fs::write(there(name), "somebody else's").unwrap();
    }
    std::os::unix::fs::symlink(&image, there("link")).unwrap();
    let names = || {
        let names = fs::read_dir(&wrong)
            .unwrap()
            .map(|file| file.unwrap().file_name());
        let mut names = Vec::from_iter(names.map(|name| name.into_string().unwrap()));
        names.sort();
        names
    };
    let before = names();
    let bitmap = |what: &str, image: &str, name: &str| {
        run(&[
            "img",
            "bitmap",
            what,
            "-f",
            "raw",
            "--bitmaps",
            &wrong,
            image,
            name,
        ])
    };
    assert!(bitmap("--add", &image, "b").status.success());
    assert!(bitmap("--add", &image, "text").status.code() == Some(1));
    let mut served = Served::start(&image, &["--bitmaps", &wrong]);
    write(&served, 0, 512);
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    // Bitmaps of another disk are not changed, and no bitmap is added next to them.
    let told = bitmap("--add", &other, "c");
    let told = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(told.contains("another disk"), "{told}");
    assert_eq!(dirty(&["--bitmaps", &wrong, &image]), are(&[("b", 65536)]));
    assert!(bitmap("--remove", &image, "b").status.success());
    assert_eq!(names(), before);
    program.kill().unwrap();
    program.wait().unwrap();
    let nowhere = as_arg(&dir.join("nowhere"));
    let list = ["img", "bitmap", "--list", "--bitmaps", &nowhere, &image];
    refused(1, &list, &["nowhere"]);
}

/// Listing the bitmaps of a killed server does not make them invalid.
#[test]
fn looking_at_the_bitmaps_of_a_killed_server_leaves_them_known() {
    let dir = disk_dir();
    let image = as_arg(&dir.path().join("i"));
    qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", &image, "12M"]);
    let disk = Disk {
        image: image.clone(),
        serve: ["--format", "qcow2"].map(str::to_owned).to_vec(),
    };
    disk.bitmap(&["--add"], "own");
    let mut served = disk.serve();
    with_disk(&served.arg("s"), 1, |disk| {
        let write = |disk: &mut crate::driver::Driver<'_>, offset: u64| {
            let data = vec![5; 4096];
            assert!(disk.all(&[Request::Write { offset, data }])[0].is_ok());
        };
        write(disk, 0);
        stdout_of(&["bitmap", "add", &served.api(), "beside"]);
        write(disk, 1 << 20);
        served.child.kill().unwrap();
    });
    served.child.wait().unwrap();
    drop(served);
    eventually("its locks are gone", || {
        let args = ["img", "bitmap", "--list", &image];
        run(&args).status.success().then_some(())
    });
    // The bitmap is not in the image yet, but in a file next to it.
    refused(
        1,
        &["img", "bitmap", "--clear", &image, "beside"],
        &["-f raw or -f qcow2"],
    );
    let add = ["img", "bitmap", "--add", "-f", "qcow2", &image, "beside"];
    refused(1, &add, &["already"]);
    let mut served = disk.serve();
    for _ in 0..2 {
        stdout_of(&["bitmap", "list", &served.api(), "--json"]);
    }
    write(&served, 2 << 20, 512);
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    let said = stdout_of(&["img", "bitmap", "--list", "--json", &image]);
    let said: Value = serde_json::from_str(&said).expect("JSON");
    let count = |name| {
        let all = said.as_array().unwrap().iter();
        let found = all.clone().find(|one| one["name"] == name);
        found.and_then(|one| one["count"].as_u64())
    };
    let found = [count("beside"), count("own")];
    assert_eq!(found, [Some(2 * 65536), Some(3 * 65536)], "{said}");
}

/// The server could not open the bitmap while it wrote to the disk.
#[test]
fn a_bitmap_that_has_missed_something_is_not_believed() {
    let dir = disk_dir();
    let disk = Disk::raw(dir.path());
    let image = disk.image.clone();
    disk.bitmap(&["--add", "-f", "raw"], "b");
    let mut served = disk.serve();
    write(&served, 0, 512);
    served.child.kill().unwrap();
    served.child.wait().unwrap();
    drop(served);
    // (For example, a user has copied the directory by hard links.)
    let (bitmap, link) = (dir.path().join("i.bitmaps/b"), dir.path().join("link"));
    fs::hard_link(&bitmap, &link).unwrap();
    eventually("its locks are gone", || {
        let args = ["img", "bitmap", "--list", "-f", "raw", &image];
        let told = run(&args);
        let why = String::from_utf8_lossy(&told.stderr).into_owned();
        why.contains("another name").then_some(())
    });
    let mut served = disk.serve();
    write(&served, 4 << 20, 512);
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    fs::remove_file(link).unwrap();
    assert_eq!(listed(&["-f", "raw", &image]), []);
}

/// The image has lost its bitmaps, and its version does not support bitmaps any more.
#[test]
fn own_bitmap_stays_valid_when_the_image_can_have_none() {
    let dir = disk_dir();
    let image = as_arg(&dir.path().join("i"));
    let qemu = |args: &[&str]| drop(qemu_img(dir.path(), args));
    qemu(&["create", "-q", "-f", "qcow2", &image, "12M"]);
    let disk = Disk {
        image: image.clone(),
        serve: ["--format", "qcow2"].map(str::to_owned).to_vec(),
    };
    disk.bitmap(&["--add"], "o");
    let mut served = disk.serve();
    write(&served, 0, 512);
    served.child.kill().unwrap();
    served.child.wait().unwrap();
    drop(served);
    eventually("its locks are gone", || {
        let args = ["img", "bitmap", "--list", "-f", "qcow2", &image];
        run(&args).status.success().then_some(())
    });
    qemu(&["bitmap", "--remove", &image, "o"]);
    qemu(&["amend", "-o", "compat=0.10", &image]);
    let mut served = disk.serve();
    write(&served, 1 << 20, 512);
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    let io = ["-f", "qcow2", "-c", "write 6M 1M", &image];
    assert!(tool(dir.path(), "qemu-io", &io).status.success());
    let listed = listed(&["-f", "qcow2", &image]);
    assert!(!listed.is_empty());
    for (_, dirty, problem) in listed {
        assert!(problem.is_some() && dirty == SIZE, "{dirty} {problem:?}");
    }
}

#[test]
#[ignore = "needs root: another user's image"]
fn what_root_makes_is_the_owners() {
    use std::os::unix::fs::{MetadataExt, chown};
    const NOBODY: u32 = 65534;
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let image = dir.path().join("i");
    fs::write(&image, vec![0; SIZE as usize]).unwrap();
    for path in [dir.path(), &image] {
        chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let image = as_arg(&image);
    let bitmap = |what| stdout_of(&["img", "bitmap", what, "-f", "raw", &image, "b"]);
    let owner = |name: &str| fs::symlink_metadata(dir.path().join(name)).unwrap().uid();
    for what in ["--add", "--clear"] {
        bitmap(what);
        assert_eq!(
            [owner("i.bitmaps"), owner("i.bitmaps/b")],
            [NOBODY; 2],
            "{what}"
        );
    }
    bitmap("--remove");
    // Where the owner of the image cannot write, nothing is done.
    chown(dir.path(), Some(0), Some(0)).unwrap();
    let add = ["img", "bitmap", "--add", "-f", "raw", &image, "b"];
    refused(1, &add, &["as user 65534"]);
}
