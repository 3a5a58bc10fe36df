//! Checks that no program writes by mistake to an image that a disk has left for a newer one.

use crate::driver::{Request, with_disk};
use crate::keep;
use crate::kinds::{qemu_img, tool};
use crate::mirror;
use crate::snapshots::snapshot;
use crate::support::{Served, as_arg, disk_dir, fathom, refused, run, short_dir, stdout_of};
use crate::tenants;
use rustix::fs::{XattrFlags, getxattr, setxattr};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

const MARK: &str = "user.fathom.superseded";
const SIZE: u64 = 4 << 20;

/// Returns the mark of an image's file, or null if the file has no mark.
fn mark(path: &str) -> Value {
    let mut bytes = vec![0; 4096];
    match getxattr(path, MARK, bytes.as_mut_slice()) {
        Ok(len) => serde_json::from_slice(&bytes[..len]).unwrap(),
        Err(error) => {
            assert_eq!(error, rustix::io::Errno::NODATA, "{path}");
            Value::Null
        }
    }
}

fn set_mark(path: &str, value: &[u8]) {
    setxattr(path, MARK, value, XattrFlags::empty()).unwrap();
}

fn raw(path: &str) {
    fs::write(path, vec![7; SIZE as usize]).unwrap();
}

fn write(served: &Served, byte: u8) {
    with_disk(&served.arg("s"), 1, |disk| {
        let data = vec![byte; 4096];
        let all = [Request::Write { offset: 0, data }, Request::Flush];
        assert!(disk.all(&all).iter().all(Result::is_ok));
    });
}

fn first_byte(path: &str) -> u8 {
    let mut byte = [0];
    let file = File::open(path).unwrap();
    file.read_exact_at(&mut byte, 0).unwrap();
    byte[0]
}

/// Checks that `fathom serve` with these arguments is refused because `newer` has superseded the
/// image.
fn check_refused(image: &str, more: &[&str], newer: &str) {
    let dir = short_dir();
    let socket = as_arg(&dir.path().join("s"));
    let serve = ["serve", image, "--vhost-user", &socket];
    let words = [image, "superseded by", newer, "--allow-superseded"];
    refused(1, &[&serve, more].concat(), &words);
}

#[test]
fn image_below_a_snapshot_is_not_written_again() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (image, layer) = (path("i"), path("layer"));
    raw(&image);
    let mut served = Served::start(&image, &[]);
    write(&served, 1);
    assert_eq!(mark(&image), Value::Null);
    snapshot(&served, &layer, &["--transient"]);
    let found = mark(&image);
    assert_eq!(found["image"], *layer);
    assert!(found["definition"].is_null(), "{found}");
    write(&served, 2);
    assert_eq!(served.terminate().0, Some(0));
    assert_eq!(first_byte(&image), 1);
    // The same command line is refused.
    check_refused(&image, &[], &layer);
    check_refused(&image, &["--format", "raw", "--cache", "writeback"], &layer);
    // The image can be used read-only, and as the backing image of the newer image.
    let mut served = Served::start(&image, &["--readonly"]);
    assert_eq!(served.terminate().0, Some(0));
    let mut served = Served::start(&layer, &["--format", "qcow2"]);
    write(&served, 3);
    assert_eq!(served.terminate().0, Some(0));
    assert_eq!((first_byte(&image), mark(&image)), (1, found));
    // A user may allow writes to the image.
    let mut served = Served::start(&image, &["--allow-superseded"]);
    assert_ne!(mark(&image), Value::Null, "nobody has used it");
    write(&served, 4);
    assert_eq!(served.terminate().0, Some(0));
    assert_eq!((first_byte(&image), mark(&image)), (4, Value::Null));
    let mut served = Served::start(&image, &[]);
    assert_eq!(served.terminate().0, Some(0));
}

#[test]
fn completed_mirror_supersedes_its_source_only() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (image, target) = (path("i"), path("t"));
    raw(&image);
    raw(&target);
    set_mark(&target, br#"{"image":"elsewhere","disk":"d","time":5}"#);
    check_refused(&target, &[], "elsewhere");
    let mut served = Served::start(&image, &[]);
    mirror::start(&served, &target, &["--wait"]);
    assert_eq!(mark(&image), Value::Null);
    assert_eq!(mark(&target)["image"], "elsewhere", "it may be given up");
    mirror::complete(&served, &["--transient"]);
    assert_eq!(mark(&image)["image"], *target);
    assert_eq!(mark(&target), Value::Null);
    write(&served, 1);
    assert_eq!(served.terminate().0, Some(0));
    check_refused(&image, &[], &target);
    let mut served = Served::start(&target, &[]);
    assert_eq!(served.terminate().0, Some(0));
}

#[test]
fn base_of_a_completed_commit_is_the_disks_image_again() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (base, layer) = (path("base"), path("layer"));
    raw(&base);
    let mut served = Served::start(&base, &[]);
    snapshot(&served, &layer, &["--transient"]);
    write(&served, 2);
    assert_eq!(mark(&base)["image"], *layer);
    // (A job runs only while the image is in use.)
    with_disk(&served.arg("s"), 1, |_| {
        stdout_of(&["commit", &served.api(), &base, "--transient", "--quiet"]);
    });
    assert_eq!(
        (mark(&base), &mark(&layer)["image"]),
        (Value::Null, &json!(base))
    );
    write(&served, 3);
    assert_eq!(served.terminate().0, Some(0));
    check_refused(&layer, &["--format", "qcow2"], &base);
    let mut served = Served::start(&base, &[]);
    assert_eq!(served.terminate().0, Some(0));
    assert_eq!(first_byte(&base), 3);
}

fn add(served: &Served, name: &str, image: &str, more: &[&str]) {
    let (api, socket) = (served.api(), served.arg("s"));
    let args = ["disk", "add", "--server", &api, name, image];
    stdout_of(&[&args[..], &["--vhost-user", &socket], more].concat());
}

#[test]
fn superseded_image_of_a_persistent_disk_is_not_served() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (image, layer) = (path("i"), path("layer"));
    raw(&image);
    let served = keep::start(short_dir(), "");
    add(&served, "d", &image, &[]);
    snapshot(&served, &layer, &[]);
    let found = mark(&image);
    assert_eq!(
        (&found["image"], &found["disk"]),
        (&json!(layer), &json!("d"))
    );
    assert!(found["definition"].is_null(), "{found}");
    write(&served, 2);
    let served = keep::again(served, "KILL", "");
    let info = stdout_of(&["info", &served.api(), "--json"]);
    assert!(info.contains(&layer), "{info}");
    let (api, more) = (served.api(), served.arg("more"));
    let other = ["disk", "add", "--server", &api, "e", &image];
    let other = [&other[..], &["--vhost-user", &more]].concat();
    let words = ["superseded by", &*layer, "allow-superseded"];
    refused(1, &other, &words);
    stdout_of(&["disk", "remove", &api, "--disk", "d"]);
    // With `--allow-superseded`, another disk gets the image, and the mark is removed.
    add(&served, "e", &image, &["--allow-superseded"]);
    write(&served, 5);
    assert_eq!(mark(&image), Value::Null);
    drop(served);
    assert_eq!(first_byte(&image), 5);
}

/// The server dies when the old image is marked and the definition is not yet written. Both images
/// have the same data then.
#[test]
fn switch_that_the_server_did_not_live_to_finish_is_forgotten() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let image = path("i");
    raw(&image);
    let served = keep::start(short_dir(), "");
    add(&served, "d", &image, &[]);
    let definition = served.arg("disks/d.toml");
    let unfinished = |definition: &str| {
        let mark = json!({ "image": "newer", "disk": "d", "time": 1, "definition": definition });
        set_mark(&image, mark.to_string().as_bytes());
    };
    let is_served = |served: &Served| {
        let info = run(&["info", &served.api(), "--json"]);
        String::from_utf8_lossy(&info.stdout).contains(&image)
    };
    unfinished(&definition);
    let served = keep::again(served, "KILL", "");
    assert!(is_served(&served), "{}", served.log());
    assert_eq!(mark(&image), Value::Null);
    // A mark that names another definition counts.
    unfinished("/elsewhere/d.toml");
    let served = keep::again(served, "KILL", "");
    assert!(!is_served(&served));
    assert!(served.log().contains("superseded by newer"));
    assert_ne!(mark(&image), Value::Null);
    // A disk of the command line has no such definition.
    unfinished(&definition);
    drop(served);
    check_refused(&image, &[], "newer");
}

#[test]
fn failed_switch_leaves_no_mark() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let image = path("i");
    raw(&image);
    let served = keep::start(short_dir(), "");
    add(&served, "d", &image, &[]);
    // The definition cannot be written.
    let file = served.path("disks/d.toml");
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    refused(
        1,
        &["snapshot", &served.api(), &path("layer")],
        &["not switched"],
    );
    assert_eq!(mark(&image), Value::Null);
    write(&served, 6);
    write(&served, 7);
    assert_eq!(first_byte(&image), 7);
}

#[test]
fn damaged_mark_counts() {
    let dir = disk_dir();
    let image = as_arg(&dir.path().join("i"));
    raw(&image);
    for value in [&b"{"[..], &[b'x'; 3000]] {
        set_mark(&image, value);
        check_refused(&image, &[], "the mark is damaged");
    }
    stdout_of(&["img", "info", &image]);
}

#[test]
fn img_shows_marks_warns_and_removes_them_from_new_images() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let image = path("i");
    let marked = || set_mark(&image, br#"{"image":"newer","disk":"d","time":5}"#);
    qemu_img(dir.path(), &["create", "-f", "qcow2", "i", "4M"]);
    marked();
    let info = stdout_of(&["img", "info", &image]);
    assert!(info.contains("superseded by: newer (disk 'd')"), "{info}");
    let info: Value =
        serde_json::from_str(&stdout_of(&["img", "info", &image, "--output", "json"])).unwrap();
    assert_eq!(
        info["superseded"],
        json!({ "image": "newer", "disk": "d", "time": 5 })
    );
    let output = run(&["img", "resize", &image, "8M"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success() && said.contains("superseded by newer"),
        "{said}"
    );
    assert_ne!(mark(&image), Value::Null);
    // A file that is overwritten is a new image without a mark.
    raw(&path("raw"));
    let overwrite: &[&[&str]] = &[
        &["img", "create", "-f", "qcow2", &image, "4M"],
        &[
            "img",
            "convert",
            "-f",
            "raw",
            "-O",
            "qcow2",
            &path("raw"),
            &image,
        ],
    ];
    for args in overwrite {
        marked();
        let output = run(args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.success() && !said.contains("superseded"),
            "{said}"
        );
        assert_eq!(mark(&image), Value::Null, "{args:?}");
    }
    // The base of a commit gets all data of the newer image, so its mark is removed.
    qemu_img(
        dir.path(),
        &["create", "-f", "qcow2", "-b", "i", "-F", "qcow2", "above"],
    );
    assert!(
        tool(dir.path(), "qemu-io", &["-c", "write 0 64k", "above"])
            .status
            .success()
    );
    marked();
    let output = run(&["img", "commit", &path("above")]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success() && !said.contains("superseded"),
        "{said}"
    );
    assert_eq!(mark(&image), Value::Null);
}

/// A tenant's process gets the image from its supervisor.
#[test]
fn tenant_does_not_get_a_superseded_image() {
    let dir = disk_dir();
    let image = as_arg(&dir.path().join("i"));
    raw(&image);
    set_mark(&image, br#"{"image":"newer","disk":"d","time":5}"#);
    let served = tenants::start(short_dir(), &[]);
    let (api, socket) = (served.api(), served.arg("s"));
    let args = ["disk", "add", "--server", &api, "d", &image];
    let args = [&args[..], &["--vhost-user", &socket]].concat();
    refused(1, &args, &["superseded by newer"]);
    assert_ne!(mark(&image), Value::Null);
    stdout_of(&[&args[..], &["--allow-superseded"]].concat());
    write(&served, 3);
    assert_eq!(mark(&image), Value::Null);
}

struct Loop(String);

impl Loop {
    fn of(file: &str) -> Loop {
        let made = tool(Path::new("/"), "losetup", &["--find", "--show", file]);
        assert!(made.status.success(), "{made:?}");
        Loop(String::from_utf8_lossy(&made.stdout).trim().to_owned())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        tool(Path::new("/"), "losetup", &["--detach", &self.0]);
    }
}

#[test]
#[ignore = "needs root: loop devices"]
fn device_is_marked_in_the_directory_of_definitions() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    for name in ["one", "other", "t"] {
        raw(&path(name));
    }
    let device = Loop::of(&path("one"));
    // Without such a directory, the command warns that nothing prevents the use of the old device.
    let mut served = Served::start(&device.0, &[]);
    mirror::start(&served, &path("t"), &["--wait"]);
    let mut complete = fathom();
    complete.args(["mirror", "complete", &served.api(), "-q", "--transient"]);
    let output = complete.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success() && said.contains("disks-dir"),
        "{said}"
    );
    assert_eq!(served.terminate().0, Some(0));
    let served = keep::start(short_dir(), "");
    add(&served, "d", &device.0, &[]);
    mirror::start(&served, &path("t"), &["--wait"]);
    mirror::complete(&served, &[]);
    write(&served, 1);
    let served = keep::again(served, "KILL", "");
    let (api, more) = (served.api(), served.arg("more"));
    let refuse = |image: &str, name: &str| {
        let args = ["disk", "add", "--server", &api, name, image];
        let args = [&args[..], &["--vhost-user", &more]].concat();
        refused(1, &args, &["superseded by", &path("t")]);
    };
    refuse(&device.0, "e");
    // Another loop device on the same file is the same device.
    let again = Loop::of(&path("one"));
    refuse(&again.0, "f");
    drop((again, device));
    let other = Loop::of(&path("other"));
    let args = ["disk", "add", "--server", &api, "g", &other.0];
    stdout_of(&[&args[..], &["--vhost-user", &more]].concat());
}
