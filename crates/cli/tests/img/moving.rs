//! `fathom img convert | compare | rebase | commit`: what moves data, with qemu-img as the judge.

use crate::pair::sample;
use crate::support::nbd::tool;
use crate::support::{as_arg, disk_dir, eventually, fathom, refused, run, stdout_of};
use crate::{create, qemu_img};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

struct Place(TempDir);

impl Place {
    fn new() -> Place {
        Place(disk_dir())
    }

    fn path(&self, name: &str) -> String {
        as_arg(&self.0.path().join(name))
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        let name = |e: fs::DirEntry| e.file_name().into_string().unwrap();
        let mut names: Vec<_> = entries.map(|e| name(e.unwrap())).collect();
        names.sort();
        names
    }

    /// A new image with these writes of qemu-io.
    fn image(&self, name: &str, format: &str, args: &[&str], writes: &[&str]) -> String {
        let path = self.path(name);
        qemu_img(&[&["create", "-q", "-f", format], args, &[&path, "20M"]].concat());
        self.write(name, format, writes);
        path
    }

    fn write(&self, name: &str, format: &str, writes: &[&str]) {
        let mut args = vec!["-f", format];
        writes.iter().for_each(|write| args.extend(["-c", write]));
        let path = self.path(name);
        let done = tool(self.0.path(), "qemu-io", &[&args[..], &[&path]].concat());
        assert!(done.status.success(), "{done:?}");
    }

    /// Base, image on it, and what its disk reads as.
    fn chain(&self, format: &str) -> (String, String) {
        let writes = ["write -P 1 0 4M", "write -P 2 8M 1M", "write -z 12M 1M"];
        let base = self.image("base", "qcow2", &[], &writes);
        let on = ["-b", &base, "-F", "qcow2"];
        let writes = [
            "write -P 9 1M 64k",
            "write -z 8200k 100k",
            "write -P 8 18M 1000k",
            "write -P 7 3000k 512",
        ];
        let top = self.image("top", format, &on, &writes);
        let before = self.path("before");
        qemu_img(&["convert", "-f", format, "-O", "raw", &top, &before]);
        (base, top)
    }

    fn same(&self, format: &str, image: &str, raw: &str) {
        qemu_img(&["compare", "-f", format, "-F", "raw", image, raw]);
    }

    fn sound(&self, format: &str, image: &str) {
        if format != "raw" {
            qemu_img(&["check", "-q", "-f", format, image]);
        }
    }
}

/// A raw disk with holes, zeroes, data that can be compressed, and data that cannot; its length is
/// no multiple of a cluster.
fn raw(place: &Place, name: &str) -> String {
    let path = place.path(name);
    let mut file = fs::File::create(&path).unwrap();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |len: usize| -> Vec<u8> {
        let next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        };
        std::iter::repeat_with(next).take(len).collect()
    };
    let at = |file: &mut fs::File, offset: u64, bytes: &[u8]| {
        std::os::unix::fs::FileExt::write_all_at(file, bytes, offset).unwrap();
    };
    at(&mut file, 0, &random(700_000));
    at(&mut file, 2 * MIB, &vec![0; 300_000]);
    at(&mut file, 3 * MIB + 512, &b"compressible ".repeat(40_000));
    at(&mut file, 7 * MIB - 1000, &random(3000));
    at(&mut file, 9 * MIB, &random(2_000_000));
    file.set_len(12 * MIB + 7 * 512).unwrap();
    at(&mut file, 12 * MIB + 6 * 512, &[5; 512]);
    path
}

/// Formats of targets with their options, for convert.
const TARGETS: &[(&str, &[&str])] = &[
    ("raw", &[]),
    ("qcow2", &[]),
    ("qed", &[]),
    ("qcow2", &["-c"]),
    (
        "qcow2",
        &["-c", "-o", "compression_type=zstd,cluster_size=16k"],
    ),
    ("qcow2", &["-o", "cluster_size=512,compat=0.10"]),
    ("qcow2", &["-o", "extended_l2=on,cluster_size=128k"]),
    ("raw", &["-S", "0"]),
    ("raw", &["-o", "preallocation=falloc"]),
    ("qcow2", &["-o", "preallocation=metadata"]),
    ("qcow2", &["-o", "cluster_size=2M", "-S", "64k"]),
    ("qcow2", &["-S", "0", "-m", "1"]),
    ("qcow2", &["-c", "-o", "cluster_size=512"]),
    ("qcow2", &["-c", "-o", "cluster_size=2M", "-m", "64"]),
    ("qcow2", &["-o", "refcount_bits=1"]),
    ("qcow2", &["-t", "none", "-T", "none"]),
    ("qcow2", &["-t", "writethrough", "--aio", "threads"]),
    ("qed", &["-o", "cluster_size=4k,table_size=1"]),
];

#[test]
fn what_is_converted_is_the_same_disk() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let compressed = place.path("compressed");
    qemu_img(&[
        "convert",
        "-c",
        "-f",
        "raw",
        "-O",
        "qcow2",
        &disk,
        &compressed,
    ]);
    let qed = place.path("qed");
    qemu_img(&["convert", "-f", "raw", "-O", "qed", &disk, &qed]);
    for (format, options) in sample(TARGETS, 7) {
        for source in [&disk, &compressed, &qed] {
            let target = place.path("target");
            let args = ["img", "convert", "-O", format];
            stdout_of(&[&args, *options, &[source, &target]].concat());
            place.same(format, &target, &disk);
            place.sound(format, &target);
            fs::remove_file(&target).unwrap();
        }
    }
}

/// A file keeps its holes, and has new ones where the source has zeroes.
#[test]
fn zeroes_take_no_space() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let blocks = |path: &str| std::os::unix::fs::MetadataExt::blocks(&fs::metadata(path).unwrap());
    for (format, mine, theirs) in [("raw", "a", "b"), ("qcow2", "c", "d")] {
        let (mine, theirs) = (place.path(mine), place.path(theirs));
        stdout_of(&["img", "convert", "-O", format, &disk, &mine]);
        qemu_img(&["convert", "-f", "raw", "-O", format, &disk, &theirs]);
        let (mine, theirs) = (blocks(&mine), blocks(&theirs));
        assert!(mine <= theirs + theirs / 8, "{format}: {mine} {theirs}");
    }
}

#[test]
fn chains_snapshots_and_several_images_are_converted() {
    let place = Place::new();
    let (base, top) = place.chain("qcow2");
    let before = place.path("before");
    let target = place.path("target");
    // All of it, and only what the base has not.
    stdout_of(&["img", "convert", "-O", "qcow2", &top, &target]);
    place.same("qcow2", &target, &before);
    let over = place.path("over");
    let backing = ["-B", &base, "-F", "qcow2"];
    stdout_of(
        &[
            &["img", "convert", "-O", "qcow2"],
            &backing[..],
            &[&top, &over],
        ]
        .concat(),
    );
    place.same("qcow2", &over, &before);
    let data = |image: &str| {
        let map = qemu_img(&["map", "--output=json", image]);
        let map: serde_json::Value = serde_json::from_str(&map).unwrap();
        let own = map.as_array().unwrap().iter();
        let own = own.filter(|e| e["depth"] == 0 && e["data"] == true);
        own.map(|e| e["length"].as_u64().unwrap()).sum::<u64>()
    };
    assert!(data(&over) <= data(&top), "the base's data is not copied");
    // As a snapshot has kept it.
    qemu_img(&["snapshot", "-c", "s1", &target]);
    place.write("target", "qcow2", &["write -P 99 0 6M"]);
    let kept = place.path("kept");
    stdout_of(&["img", "convert", "-l", "s1", &target, &kept]);
    place.same("raw", &kept, &before);
    let none = ["img", "convert", "-l", "no", &target, &kept];
    refused(1, &none, &["no snapshot 'no'"]);
    // One behind the other.
    let (mine, theirs) = (place.path("mine"), place.path("theirs"));
    let disk = raw(&place, "disk");
    stdout_of(&["img", "convert", "-O", "qcow2", &disk, &before, &mine]);
    qemu_img(&["convert", "-O", "raw", "-f", "raw", &disk, &before, &theirs]);
    place.same("qcow2", &mine, &theirs);
}

#[test]
fn what_is_there_is_written_to() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    for format in ["raw", "qcow2", "qed"] {
        let target = place.image("target", format, &[], &["write -P 255 0 20M"]);
        let args = ["img", "convert", "-n", "-O", format];
        stdout_of(&[&args[..], &[&disk, &target]].concat());
        // The rest is what it was.
        let larger = place.path("larger");
        let mut bytes = fs::read(&disk).unwrap();
        bytes.resize(20 << 20, 255);
        fs::write(&larger, &bytes).unwrap();
        place.same(format, &target, &larger);
        place.sound(format, &target);
    }
    let small = place.path("small");
    qemu_img(&["create", "-q", "-f", "raw", &small, "1M"]);
    let args = ["img", "convert", "-n", &disk, &small];
    refused(1, &args, &["1048576", "make it larger"]);
    assert_eq!(fs::metadata(&small).unwrap().len(), MIB);
}

#[test]
fn pipes_and_servers_are_images_too() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let target = place.path("target");
    let mut child = fathom()
        .args(["img", "convert", "-f", "raw", "-O", "qcow2", "-", &target])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(&fs::read(&disk).unwrap()).unwrap();
    drop(input);
    assert!(child.wait().unwrap().success());
    place.same("qcow2", &target, &disk);
    let output = run(&["img", "convert", &target, "-"]);
    assert!(output.status.success() && output.stdout == fs::read(&disk).unwrap());
    let args = ["img", "convert", "-O", "qcow2", &target, "-"];
    refused(1, &args, &["raw disk only"]);

    let socket = place.path("s");
    let uri = format!("nbd+unix:///?socket={socket}");
    let server = |args: &[&str]| {
        let _ = fs::remove_file(&socket);
        let child = Command::new("nbdkit")
            .args(["-f", "-U", &socket])
            .args(args)
            .spawn();
        let child = child.expect("nbdkit is installed by `make setup`");
        eventually("nbdkit listens", || fs::metadata(&socket).ok());
        child
    };
    let mut memory = server(&["memory", "20M"]);
    refused(1, &["img", "convert", &target, &uri], &["-n"]);
    stdout_of(&["img", "convert", "-n", &target, &uri]);
    let back = place.path("back");
    stdout_of(&["img", "convert", "-O", "qcow2", &uri, &back]);
    place.same("qcow2", &back, &disk);
    stdout_of(&["img", "compare", &uri, &disk]);
    memory.kill().unwrap();
    memory.wait().unwrap();
    // A full disk says how much was missing.
    let full = ["--filter=error", "memory", "20M", "error-pwrite=ENOSPC"];
    let mut full = server(&[&full[..], &["error-pwrite-rate=100%"]].concat());
    let args = ["img", "convert", "-n", &target, &uri];
    refused(1, &args, &["no space is left", "bytes more are needed"]);
    full.kill().unwrap();
    full.wait().unwrap();
}

/// Who is interrupted or killed leaves what was there before, or says what it leaves.
#[test]
fn an_unfinished_target_is_not_there() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let names = place.names();
    let target = place.path("target");
    let begin = |args: &[&str]| {
        let mut child = fathom()
            .args(["img", "convert", "--rate", "300k", "--json", "-O", "qcow2"])
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // It has begun when it tells how far it is.
        let mut line = String::new();
        let stdout = child.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).unwrap();
        assert!(line.contains("progress"), "{line}");
        child
    };
    let signal = |child: &std::process::Child, name: &str| {
        let pid = child.id().to_string();
        assert!(
            Command::new("kill")
                .args([name, &pid])
                .status()
                .unwrap()
                .success()
        );
    };
    for (name, status) in [("-INT", Some(130)), ("-TERM", Some(130)), ("-KILL", None)] {
        let child = begin(&[&disk, &target]);
        signal(&child, name);
        let ended = child.wait_with_output().unwrap();
        assert_eq!(ended.status.code(), status, "{name}: {ended:?}");
        assert_eq!(place.names(), names, "{name}");
    }
    create(&target, &["-q", "-f", "qcow2", "-o", "size=1M"]);
    let child = begin(&[&disk, &target]);
    signal(&child, "-INT");
    let ended = child.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(130), "{told}");
    // Nobody else may have it meanwhile.
    let child = begin(&[&disk, &target]);
    let other = Command::new("qemu-img").args(["info", &target]).output();
    assert!(!other.unwrap().status.success(), "the target is locked");
    signal(&child, "-INT");
    child.wait_with_output().unwrap();
}

#[test]
fn what_cannot_be_converted_is_told_in_one_line() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let other = place.path("other");
    let convert = |args: &[&str], words: &[&str]| {
        refused(1, &[&["img", "convert"], args].concat(), words);
        assert_eq!(place.names(), ["disk"]);
    };
    convert(&[&disk, &disk], &["is read from, too"]);
    convert(&["-c", &disk, &other], &["cannot be written compressed"]);
    convert(&["-B", &disk, &disk, &other], &["no backing file"]);
    convert(&["-f", "qcow2", &disk, &other], &["disk"]);
    convert(&["-l", "s", &disk, &other], &["no internal snapshots"]);
    convert(&[&place.path("none"), &other], &["none", "No such file"]);
    convert(&[&disk, &place.path("no/dir")], &["No such file"]);
    convert(&["--bitmaps", &disk, &other], &["qcow2 to qcow2"]);
    convert(&[&disk], &["a source and a target"]);
}

#[test]
fn disks_are_compared_as_qemu_img_does() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let bytes = fs::read(&disk).unwrap();
    let image = place.path("image");
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", &disk, &image]);
    let other = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes.clone();
        change(&mut bytes);
        let path = place.path(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let others = [
        disk.clone(),
        other("first", &|b| b[0] ^= 1),
        other("last", &|b| *b.last_mut().unwrap() ^= 1),
        other("hole", &|b| b[5 << 20] = 1),
        other("two", &|b| {
            b[10_000_000] ^= 4;
            b[4_000_000] ^= 4;
        }),
        other("longer", &|b| b.resize(14 << 20, 0)),
        other("longer-data", &|b| b.resize(14 << 20, 3)),
        other("shorter", &|b| b.truncate(11 << 20)),
        place.path("none"),
    ];
    for (n, other) in others.iter().enumerate() {
        // What QEMU takes for the same, strictly, depends on how it has asked the file system.
        let strict = ["-s", "-f", "raw", "-F", "raw"];
        let strict = if matches!(n, 0 | 5 | 7) {
            &strict[..]
        } else {
            &strict[1..]
        };
        for (one, two, args) in [
            (&image, other, &["-f", "qcow2", "-F", "raw"][..]),
            (other, &image, &["-f", "raw", "-F", "qcow2"]),
            (&disk, other, strict),
        ] {
            let args = [&["compare"], args, &[one, two]].concat();
            let theirs = tool(place.0.path(), "qemu-img", &args);
            let mine = run(&[&["img"], &args[..]].concat());
            assert_eq!(mine.status.code(), theirs.status.code(), "{args:?}");
            let text =
                |output: &std::process::Output| String::from_utf8(output.stdout.clone()).unwrap();
            assert_eq!(text(&mine), text(&theirs), "{args:?}");
        }
    }
}

#[test]
fn a_rebased_disk_reads_as_before() {
    for format in ["qcow2", "qed"] {
        let place = Place::new();
        let writes = ["write -P 1 0 2M", "write -P 3 9M 1M", "write -P 4 12M 2M"];
        let other = place.image("other", "raw", &[], &writes);
        fs::File::options()
            .write(true)
            .open(&other)
            .and_then(|file| file.set_len(13 * MIB))
            .unwrap();
        for (args, has) in [
            (&["-b", "other", "-F", "raw"][..], Some("other")),
            (&["-b", ""], None),
            (&["-b", "base", "-F", "qcow2"], Some("base")),
        ] {
            let (_, top) = place.chain(format);
            stdout_of(&[&["img", "rebase"], args, &[&top]].concat());
            place.same(format, &top, &place.path("before"));
            place.sound(format, &top);
            let info = qemu_img(&["info", "--output=json", &top]);
            let info: serde_json::Value = serde_json::from_str(&info).unwrap();
            assert_eq!(info["backing-filename"].as_str(), has);
        }
        // Only the name, whatever the file holds.
        let (_, top) = place.chain(format);
        let to = ["-u", "-b", "gone", "-F", "raw"];
        stdout_of(&[&["img", "rebase"], &to[..], &[&top]].concat());
        let info = qemu_img(&["info", &top]);
        assert!(info.contains("backing file: gone"), "{info}");
        if format == "qcow2" {
            let (_, top) = place.chain(format);
            qemu_img(&["bitmap", "--add", &top, "b0"]);
            stdout_of(&["img", "rebase", "-b", "other", "-F", "raw", &top]);
            place.same(format, &top, &place.path("before"));
            place.sound(format, &top);
            assert!(qemu_img(&["info", &top]).contains("b0"));
        }
        let (base, top) = place.chain(format);
        let rebase = |args: &[&str], words: &[&str]| {
            refused(1, &[&["img", "rebase"], args].concat(), words);
            place.same(format, &top, &place.path("before"));
        };
        rebase(&["-b", "gone", "-F", "raw", &top], &["gone"]);
        rebase(&["-b", "other", &top], &["-F"]);
        rebase(&["-b", &top, "-F", format, &top], &["its own backing file"]);
        rebase(&["-b", "", &place.path("before")], &["raw images"]);
        let loops = ["-b", &top, "-F", format, &base];
        rebase(&loops, &["loop"]);
    }
}

#[test]
fn what_is_committed_is_in_the_base() {
    for format in ["qcow2", "qed"] {
        let place = Place::new();
        let before = place.path("before");
        let (base, top) = place.chain(format);
        stdout_of(&["img", "commit", "-q", &top]);
        place.same("qcow2", &base, &before);
        place.same(format, &top, &before);
        place.sound("qcow2", &base);
        place.sound(format, &top);
        if format == "qcow2" {
            let map = qemu_img(&["map", &top]);
            assert!(!map.contains("top"), "the image is empty: {map}");
        }
        // To one further below, which is shorter.
        let (base, top) = place.chain(format);
        let bottom = place.path("bottom");
        qemu_img(&["create", "-q", "-f", "raw", &bottom, "3M"]);
        qemu_img(&["rebase", "-f", "qcow2", "-b", &bottom, "-F", "raw", &base]);
        stdout_of(&["img", "commit", "-b", &bottom, &top]);
        place.same("raw", &bottom, &before);
        place.same(format, &top, &before);
        let none = place.path("none");
        let args = ["img", "commit", "-b", &none, &top];
        refused(1, &args, &["not among its backing files"]);
    }
    let place = Place::new();
    let alone = place.image("alone", "qcow2", &[], &[]);
    refused(1, &["img", "commit", &alone], &["has no backing file"]);
}

/// A kill at any instant leaves a disk that reads as before, in images that are sound but for lost
/// space.
#[test]
fn killed_tools_lose_nothing() {
    let rounds = if std::env::var_os("FATHOM_ROUNDS").is_some() {
        200
    } else {
        12
    };
    let sound = |image: &str| {
        // The kernel may still have it for the one that was killed.
        let checked = eventually("its locks are gone", || {
            let checked = run(&["img", "check", "-q", image]);
            let told = String::from_utf8_lossy(&checked.stderr).contains("in use");
            (!told).then_some(checked)
        });
        assert!(matches!(checked.status.code(), Some(0 | 3)), "{checked:?}");
    };
    let mut killed = 0;
    for round in 0..rounds {
        let place = Place::new();
        let (base, top) = place.chain("qcow2");
        let before = place.path("before");
        let (commit, rebase) = (["commit", &top], ["rebase", "-b", "", &top]);
        let args: &[&str] = if round % 2 == 0 { &commit } else { &rebase };
        let mut child = fathom()
            .arg("img")
            .args(args)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_micros(2000 + round * 37_000 % 60_000));
        child.kill().unwrap();
        killed += u32::from(!child.wait().unwrap().success());
        sound(&base);
        sound(&top);
        place.same("qcow2", &top, &before);
        // And it can be done again.
        stdout_of(&[&["img"], args].concat());
        place.same("qcow2", &top, &before);
    }
    assert!(killed > 0, "none was killed before it had ended");
}

/// Names that an image gives are looked for where the user allows it.
#[test]
fn files_elsewhere_are_opened_only_when_that_is_allowed() {
    let (place, elsewhere) = (Place::new(), Place::new());
    let base = elsewhere.image("base", "qcow2", &[], &["write -P 1 0 1M"]);
    let top = place.image("top", "qcow2", &["-b", &base, "-F", "qcow2"], &[]);
    let target = place.path("target");
    let args = ["img", "convert", &top, &target];
    refused(1, &args, &["--allow-dir"]);
    assert!(!Path::new(&target).exists());
    let allow = ["--allow-dir", &as_arg(elsewhere.0.path())];
    stdout_of(&[&args[..2], &allow, &args[2..]].concat());
    place.same("qcow2", &top, &target);
}
