//! Compares `fathom img bitmap` with `qemu-img bitmap`: QEMU reads the same bitmaps.

use crate::pair::{io, sample};
use crate::place::Place;
use crate::support::{as_arg, disk_dir, eventually, fathom, listens, refused, run, stdout_of};
use crate::{create, qemu_img};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

const OPTIONS: &[&str] = &[
    "cluster_size=64k",
    "cluster_size=512",
    "cluster_size=4k,refcount_bits=64,lazy_refcounts=on",
    "cluster_size=16k,extended_l2=on",
    "cluster_size=2M",
    "data_file={dir}/data,data_file_raw=on",
];

/// Two equal images of 8 MiB and 512 bytes.
struct Pair(TempDir);

impl Pair {
    fn new(options: &str) -> Pair {
        let pair = Pair(disk_dir());
        for which in ["mine", "theirs"] {
            let dir = as_arg(&pair.0.path().join(which));
            std::fs::create_dir(&dir).expect("a directory");
            let options = format!("size=8389120,{}", options.replace("{dir}", &dir));
            create(&pair.path(which), &["-q", "-f", "qcow2", "-o", &options]);
        }
        pair
    }

    fn path(&self, which: &str) -> String {
        as_arg(&self.0.path().join(which).join("i"))
    }

    /// Runs `bitmap ARGS IMAGE NAME` on both images, each with its own tool.
    ///
    /// `{}` in an argument stands for the image.
    fn both(&self, args: &[&str], name: &str) {
        let run = |which: &str, img: &dyn Fn(&[&str])| {
            let path = self.path(which);
            let args: Vec<String> = args.iter().map(|a| a.replace("{}", &path)).collect();
            let mut all: Vec<&str> = vec!["bitmap"];
            all.extend(args.iter().map(String::as_str));
            all.extend([path.as_str(), name]);
            img(&all);
        };
        run("mine", &|args| {
            stdout_of(&[&["img"], args].concat());
        });
        run("theirs", &|args| {
            qemu_img(args);
        });
        self.compare(&format!("{args:?}"));
    }

    /// Writes the same data to both images; their bitmaps record the writes.
    fn write(&self, commands: &[&str]) {
        for which in ["mine", "theirs"] {
            io(&self.path(which), "qcow2", commands);
        }
    }

    /// Asserts that QEMU lists the same bitmaps for both images and finds no errors.
    fn compare(&self, what: &str) {
        let [mine, theirs] = ["mine", "theirs"].map(|which| {
            let path = self.path(which);
            qemu_img(&["check", &path]);
            bitmaps(&path)
        });
        assert_eq!(mine, theirs, "{what}");
        let listed = stdout_of(&["img", "bitmap", "--list", "--json", &self.path("mine")]);
        let mut listed: Value = serde_json::from_str(&listed).expect("JSON");
        for bitmap in listed.as_array_mut().expect("an array") {
            bitmap.as_object_mut().expect("an object").remove("count");
        }
        let info = stdout_of(&["img", "info", "--json", &self.path("mine")]);
        let info: Value = serde_json::from_str(&info).expect("JSON");
        let own = &info["format-specific"]["data"]["bitmaps"];
        assert_eq!(own.as_array(), mine.as_ref(), "{what}");
        assert_eq!(listed, Value::Array(mine.unwrap_or_default()), "{what}");
    }

    /// Asserts that QEMU sees the same dirty ranges in both, and Fathom counts as many bytes.
    fn compare_bits(&self, name: &str) {
        let [mine, theirs] = ["mine", "theirs"].map(|which| dirty(&self.path(which), name));
        assert_eq!(mine, theirs, "{name}");
        let listed = stdout_of(&["img", "bitmap", "--list", "--json", &self.path("mine")]);
        let listed: Value = serde_json::from_str(&listed).expect("JSON");
        let all = listed.as_array().expect("an array");
        let own = all.iter().find(|b| b["name"] == name).expect("listed");
        let sum: u64 = mine.iter().map(|(_, len)| len).sum();
        assert_eq!(own["count"].as_u64(), Some(sum), "{name}");
    }
}

/// Returns the bitmaps that `qemu-img info` lists.
fn bitmaps(path: &str) -> Option<Vec<Value>> {
    let info = qemu_img(&["info", "--output=json", path]);
    let info: Value = serde_json::from_str(&info).expect("JSON");
    let all = info["format-specific"]["data"]["bitmaps"].as_array();
    all.cloned()
}

pub struct Server(pub Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns offsets and lengths of a bitmap's dirty ranges, as QEMU's NBD client sees them.
fn dirty(path: &str, name: &str) -> Vec<(u64, u64)> {
    let dir = crate::support::short_dir();
    let socket = as_arg(&dir.path().join("s"));
    let server = Command::new("qemu-nbd")
        .args(["-r", "-t", "-f", "qcow2", "-B", name, "-k", &socket, path])
        .stdin(Stdio::null())
        .spawn();
    let _server = Server(server.expect("qemu-nbd is installed by `make setup`"));
    eventually("a server", || listens(socket.as_ref()).then_some(()));
    let map = format!("--map=qemu:dirty-bitmap:{name}");
    let uri = format!("nbd+unix:///?socket={socket}");
    let output = Command::new("nbdinfo")
        .args(["--json", &map, &uri])
        .output();
    let output = output.expect("nbdinfo is installed by `make setup`");
    assert!(output.status.success(), "{output:?}");
    let all: Vec<Value> = serde_json::from_slice(&output.stdout).expect("JSON");
    let number = |entry: &Value, key: &str| entry[key].as_u64().expect("a number");
    let is_dirty = |entry: &&Value| number(entry, "type") == 1;
    let range = |entry: &Value| (number(entry, "offset"), number(entry, "length"));
    let mut dirty: Vec<(u64, u64)> = Vec::new();
    for (start, len) in all.iter().filter(is_dirty).map(range) {
        match dirty.last_mut() {
            Some((before, n)) if *before + *n == start => *n += len,
            _ => dirty.push((start, len)),
        }
    }
    dirty
}

/// Data committed into an image becomes dirty in its bitmaps that record writes, as with QEMU.
///
/// Data of an interrupted commit becomes dirty, too, and also data in a base image that the commit
/// has enlarged.
#[test]
fn a_commit_is_recorded_in_the_bases_bitmaps() {
    let place = Place::new();
    let base = place.image("base", "qcow2", &[], &["write -P 1 0 4M"]);
    qemu_img(&["bitmap", "--add", "-g", "64k", &base, "coarse"]);
    qemu_img(&["bitmap", "--add", "-g", "512", &base, "fine"]);
    qemu_img(&["bitmap", "--add", "--disable", "-g", "64k", &base, "off"]);
    place.write("base", "qcow2", &["write -P 2 10M 64k"]);
    let writes = ["write -P 3 1M 128k", "write -z 2M 1M", "write -P 4 19M 1M"];
    let top = place.image("top", "qcow2", &["-b", &base, "-F", "qcow2"], &writes);
    qemu_img(&["resize", "-q", &top, "24M"]);
    place.write("top", "qcow2", &["write -P 5 20M 1M", "write -P 6 23M 1M"]);
    let copy = |from: &str, to: &str| std::fs::copy(place.path(from), place.path(to)).unwrap();
    copy("base", "base.0");
    copy("top", "top.0");

    let slow = ["img", "commit", "--rate", "100k", "--json", &top];
    let mut killed = fathom().args(slow).stdout(Stdio::piped()).spawn().unwrap();
    let mut told = BufReader::new(killed.stdout.take().unwrap()).lines();
    told.next().expect("it has begun").unwrap();
    killed.kill().unwrap();
    killed.wait().unwrap();
    eventually("its locks are gone", || {
        run(&["img", "info", &base]).status.success().then_some(())
    });
    let all = || ["coarse", "fine", "off"].map(|name| dirty(&base, name));
    let half = all();

    copy("base.0", "base");
    copy("top.0", "top");
    qemu_img(&["commit", "-q", &top]);
    let by_qemu = all();
    copy("base.0", "base");
    copy("top.0", "top");
    stdout_of(&["img", "commit", "-q", &top]);
    let ours = all();
    assert_eq!(ours, by_qemu);
    assert_eq!(ours[0].len(), 5, "{ours:?}");
    assert_eq!(half, ours);
    place.sound("qcow2", &base);
}

#[test]
fn bitmaps_are_what_qemu_makes_of_them() {
    for options in sample(OPTIONS, 3) {
        let pair = Pair::new(options);
        pair.both(&["--add"], "first");
        pair.both(&["--add", "-g", "512"], "fine");
        pair.both(&["--add", "--disable", "-g", "1M"], "coarse");
        pair.write(&["write 1000k 3000k", "write 5M 512", "write 8388608 512"]);
        pair.compare("written");
        for name in ["first", "fine", "coarse"] {
            pair.compare_bits(name);
        }
        pair.both(&["--add", "--merge", "fine", "--merge", "first"], "both");
        pair.compare_bits("both");
        pair.both(&["--merge", "fine"], "coarse");
        pair.both(&["--clear", "--merge", "coarse", "--disable"], "fine");
        pair.both(&["--disable"], "first");
        pair.write(&["write 6M 70k", "discard 2M 64k"]);
        for name in ["first", "fine", "coarse", "both"] {
            pair.compare_bits(name);
        }
        pair.both(&["--remove"], "coarse");
        pair.both(&["--enable"], "first");
        pair.both(&["--clear"], "both");
        // All of the image, because bits that are all alike are not stored.
        pair.write(&["write 0 8389120"]);
        pair.both(&["--add", "-g", "512", "--merge", "first"], "all");
        for name in ["first", "both", "all"] {
            pair.compare_bits(name);
        }
        pair.write(&["write 0 512"]);
        pair.compare("after another write");
        for name in ["first", "fine", "both", "all"] {
            pair.both(&["--remove"], name);
        }
        assert_eq!(bitmaps(&pair.path("mine")), None);
    }
}

#[test]
fn bitmaps_are_merged_from_other_images() {
    let (pair, other) = (Pair::new("cluster_size=4k"), Pair::new("cluster_size=64k"));
    other.both(&["--add", "-g", "4k"], "source");
    other.write(&["write 1M 1M", "write 3000k 5k"]);
    let source = other.path("theirs");
    let merge = ["--add", "--merge", "source", "-b", &source, "-F", "qcow2"];
    pair.both(&merge, "copy");
    pair.compare_bits("copy");
    // Merges a bitmap of the same image, which is given by its name.
    let image = pair.path("mine");
    let merge = ["img", "bitmap", "--add", "--merge", "copy", "-b", &image];
    stdout_of(&[&merge[..], &[&image, "again"]].concat());
    assert_eq!(dirty(&image, "again"), dirty(&image, "copy"));
}

#[test]
fn what_cannot_be_done_changes_nothing() {
    let pair = Pair::new("cluster_size=64k");
    let (image, path) = (pair.path("mine"), |name: &str| {
        as_arg(&pair.0.path().join(name))
    });
    pair.both(&["--add"], "a");
    let (old, raw, small) = (path("old"), path("raw"), path("small"));
    create(&old, &["-q", "-f", "qcow2", "-o", "compat=0.10,size=1M"]);
    create(&raw, &["-q", "-o", "size=1M"]);
    create(&small, &["-q", "-f", "qcow2", "-o", "size=1M"]);
    qemu_img(&["bitmap", "--add", &small, "s"]);
    let long = "x".repeat(1024);
    let before = std::fs::read(&image).expect("the image");
    let cases: &[(&[&str], &[&str])] = &[
        (&["--add", &image, "a"], &["already"]),
        (&["--remove", &image, "b"], &["no bitmap 'b'"]),
        (&["--clear", &image, "b"], &["no bitmap 'b'"]),
        (&["--merge", "b", &image, "a"], &["no bitmap 'b'"]),
        // If one action fails, the actions before it have no effect either.
        (
            &["--disable", "--clear", "--add", &image, "a"],
            &["already"],
        ),
        (&["--add", "-g", "3k", &image, "b"], &["power of two"]),
        (&["--add", "-g", "256", &image, "b"], &["512"]),
        (&["--add", "-g", "4G", &image, "b"], &["2G"]),
        (&["--add", &image, ""], &["1 to 1023"]),
        (&["--add", &image, &long], &["1 to 1023"]),
        (&["--disable", &old, "b"], &["next to"]),
        (&["--disable", &raw, "b"], &["next to"]),
        (&["--add", "-f", "qcow2", &raw, "b"], &["not a qcow2 image"]),
        (
            &["--merge", "s", "-b", &small, &image, "a"],
            &["1048576 bytes"],
        ),
        (
            &["--merge", "x", "-b", &small, &image, "a"],
            &["no bitmap 'x'"],
        ),
        (&[&image, "a"], &["--add"]),
    ];
    for (args, words) in cases {
        refused(1, &[&["img", "bitmap"], *args].concat(), words);
    }
    let usage: &[&[&str]] = &[
        &["--add", &image],
        &["--list", &image, "a"],
        &["--list", "--add", &image],
        &["--remove", "-g", "4k", &image, "a"],
        &["--clear", "-b", &small, &image, "a"],
    ];
    for args in usage {
        refused(2, &[&["img", "bitmap"], *args].concat(), &[]);
    }
    assert!(std::fs::read(&image).expect("the image") == before);
}

/// QEMU was using the bitmap when it was killed.
#[test]
fn a_bitmap_that_misses_writes_is_only_removed() {
    let pair = Pair::new("cluster_size=64k");
    let image = pair.path("mine");
    stdout_of(&["img", "bitmap", "--add", &image, "lost"]);
    stdout_of(&["img", "bitmap", "--add", &image, "other"]);
    let mut user = Command::new("qemu-io");
    let user = user.args(["-f", "qcow2", &image]).stdin(Stdio::piped());
    let mut user = Server(user.stdout(Stdio::null()).spawn().expect("qemu-io"));
    let listed = || stdout_of(&["img", "bitmap", "--list", "-U", &image]);
    eventually("it is in use", || listed().contains("in-use").then_some(()));
    refused(1, &["img", "bitmap", "--list", &image], &["in use"]);
    refused(
        1,
        &["img", "bitmap", "--clear", &image, "lost"],
        &["in use"],
    );
    user.0.kill().expect("killed");
    drop(user);
    for change in ["--clear", "--enable", "--disable"] {
        let args = ["img", "bitmap", change, &image, "lost"];
        refused(1, &args, &["only be removed"]);
    }
    let args = ["img", "bitmap", "--add", "--merge", "lost", &image, "new"];
    refused(1, &args, &["only be removed"]);
    stdout_of(&["img", "bitmap", "--remove", &image, "lost"]);
    let left = bitmaps(&image).expect("bitmaps");
    assert_eq!(left.len(), 1);
    assert_eq!(left[0]["name"], "other");
    qemu_img(&["check", &image]);
}

/// A bitmap may have 512 MiB of bits, and not one bit more.
#[test]
fn the_largest_bitmap_is_qemus() {
    let dir = disk_dir();
    let path = |name: &str| as_arg(&dir.path().join(name));
    let (image, copy, larger) = (path("i"), path("copy"), path("larger"));
    let size = 2_u64 << 40;
    create(
        &image,
        &["-q", "-f", "qcow2", "-o", &format!("size={size}")],
    );
    stdout_of(&["img", "bitmap", "--add", "-g", "512", &image, "own"]);
    qemu_img(&["bitmap", "--add", "-g", "512", &image, "theirs"]);
    io(
        &image,
        "qcow2",
        &["write 1M 64k", &format!("write {} 512", size - 512)],
    );
    let args = ["img", "convert", "-f", "qcow2", "-O", "qcow2", "--bitmaps"];
    stdout_of(&[&args[..], &[&image, &copy]].concat());
    for name in ["own", "theirs"] {
        assert_eq!(dirty(&copy, name), [(1 << 20, 64 << 10), (size - 512, 512)]);
    }
    qemu_img(&["check", &copy]);
    let size = format!("size={}", size + 512);
    create(&larger, &["-q", "-f", "qcow2", "-o", &size]);
    let add = ["bitmap", "--add", "-g", "512", &larger, "b"];
    refused(1, &[&["img"], &add[..]].concat(), &["granularity"]);
    let theirs = Command::new("qemu-img").args(add).output();
    assert!(!theirs.expect("qemu-img").status.success());
}
