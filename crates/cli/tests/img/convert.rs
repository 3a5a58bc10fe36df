//! Tests `fathom img convert`, with qemu-img as the reference.

use crate::pair::sample;
use crate::place::{MIB, Place, raw};
use crate::support::{as_arg, eventually, fathom, listens, refused, run, stdout_of};
use crate::{create, qemu_img};
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};

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
    // QEMU creates tables of one cluster, but does not read them.
    ("qed", &["-o", "cluster_size=4k,table_size=2"]),
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

/// A file keeps its holes, and gets new ones where the source has zeroes.
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
    // First the whole chain, then only what the base image does not have.
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
    // The disk as an internal snapshot has saved it.
    qemu_img(&["snapshot", "-c", "s1", &target]);
    place.write("target", "qcow2", &["write -P 99 0 6M"]);
    let kept = place.path("kept");
    stdout_of(&["img", "convert", "-l", "s1", &target, &kept]);
    place.same("raw", &kept, &before);
    let none = ["img", "convert", "-l", "no", &target, &kept];
    refused(1, &none, &["no snapshot 'no'"]);
    // Several sources are concatenated.
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
        // The rest of the target is unchanged.
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
    refused(1, &args, &["1048576", "enlarge it"]);
    assert_eq!(fs::metadata(&small).unwrap().len(), MIB);
}

#[test]
fn names_may_be_any_bytes() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let odd = Path::new(&place.path("")).join(OsStr::from_bytes(b"\xff\xfe.qcow2"));
    let disk = Path::new(&disk);
    let cases: [(&[&str], &[&Path]); 3] = [
        (&["convert", "-O", "qcow2"], &[disk, &odd]),
        (&["compare"], &[&odd, disk]),
        (&["rebase", "-b", ""], &[&odd]),
    ];
    for (args, files) in cases {
        let output = fathom().arg("img").args(args).args(files).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {said}");
    }
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
    let twice = place.path("twice");
    refused(1, &["img", "convert", "-", "-", &twice], &["only once"]);
    refused(2, &["img", "compare", "-", "-"], &["only once"]);
    assert!(!Path::new(&twice).exists());

    let socket = place.path("s");
    let uri = format!("nbd+unix:///?socket={socket}");
    let server = |args: &[&str]| {
        let _ = fs::remove_file(&socket);
        let child = Command::new("nbdkit")
            .args(["-f", "-U", &socket])
            .args(args)
            .stderr(Stdio::null())
            .spawn();
        let child = child.expect("nbdkit is installed by `make setup`");
        eventually("nbdkit listens", || listens(socket.as_ref()).then_some(()));
        child
    };
    // The second server has no command for zeroes, so they must be sent as data.
    for kind in [
        &["memory", "20M"][..],
        &["--filter=nozero", "memory", "20M"],
    ] {
        let mut memory = server(kind);
        refused(1, &["img", "convert", &target, &uri], &["-n"]);
        stdout_of(&["img", "convert", "-n", &target, &uri]);
        let back = place.path("back");
        stdout_of(&["img", "convert", "-O", "qcow2", &uri, &back]);
        place.same("qcow2", &back, &disk);
        stdout_of(&["img", "compare", &uri, &disk]);
        memory.kill().unwrap();
        memory.wait().unwrap();
    }
    // The target's last block is only partly covered; its other bytes are unknown.
    let mut large = server(&[
        "--filter=blocksize-policy",
        "memory",
        "20M",
        "blocksize-minimum=4096",
        "blocksize-error-policy=error",
    ]);
    let odd = place.path("odd");
    fs::write(&odd, [7; 4096 + 512]).unwrap();
    let args = ["img", "convert", "-n", &odd, &uri];
    refused(1, &args, &["blocks of 4096 bytes", "4608 bytes"]);
    fs::write(&odd, [7; 8192]).unwrap();
    stdout_of(&args);
    large.kill().unwrap();
    large.wait().unwrap();
    // If a disk is full, the error says how many bytes are missing.
    let full = ["--filter=error", "memory", "20M", "error-pwrite=ENOSPC"];
    let mut full = server(&[&full[..], &["error-pwrite-rate=100%"]].concat());
    let args = ["img", "convert", "-n", &target, &uri];
    refused(1, &args, &["no space left", "more bytes are needed"]);
    full.kill().unwrap();
    full.wait().unwrap();
}

/// An interrupted or killed command leaves what was there before, or reports what it leaves.
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
        // The command has begun when it reports its progress.
        let mut told = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = told.next().expect("it has begun").unwrap();
        assert!(line.contains("progress"), "{line}");
        (child, told)
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
        let (child, _told) = begin(&[&disk, &target]);
        signal(&child, name);
        let ended = child.wait_with_output().unwrap();
        assert_eq!(ended.status.code(), status, "{name}: {ended:?}");
        assert_eq!(place.names(), names, "{name}");
    }
    create(&target, &["-q", "-f", "qcow2", "-o", "size=1M"]);
    let (child, told) = begin(&[&disk, &target]);
    signal(&child, "-INT");
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{ended:?}");
    let told: Vec<_> = told.map(Result::unwrap).collect();
    assert!(
        told.iter()
            .any(|line| line.contains("its old contents are lost")),
        "{told:?}"
    );
    // No other program may open the target meanwhile.
    let (child, _told) = begin(&[&disk, &target]);
    let other = Command::new("qemu-img").args(["info", &target]).output();
    let told = String::from_utf8_lossy(&other.unwrap().stderr).into_owned();
    assert!(told.contains("lock"), "the target is locked: {told}");
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
    convert(&[&disk, &disk], &["also a source"]);
    convert(&["-c", &disk, &other], &["cannot be compressed"]);
    convert(&["-B", &disk, &disk, &other], &["no backing file"]);
    convert(&["-f", "qcow2", &disk, &other], &["disk"]);
    convert(&["-l", "s", &disk, &other], &["no internal snapshots"]);
    convert(&[&place.path("none"), &other], &["none", "no such file"]);
    convert(&[&disk, &place.path("no/dir")], &["no such directory"]);
    convert(&["--bitmaps", &disk, &other], &["qcow2 to qcow2"]);
    convert(&[&disk], &["a source and a target"]);
}

/// A dangling link is followed, as a shell's redirection does.
#[test]
fn a_link_that_leads_nowhere_yet_leads_to_the_target_afterwards() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    fs::create_dir(place.path("sub")).unwrap();
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, place.path(name)).unwrap();
    link("sub/second", "first");
    link("target", "sub/second");
    stdout_of(&["img", "convert", "-O", "qcow2", &disk, &place.path("first")]);
    place.same("qcow2", &place.path("sub/target"), &disk);
    link("round", "round");
    let round = ["img", "convert", &disk, &place.path("round")];
    refused(1, &round, &["round"]);
}

/// Files that an image names are opened only in directories that the user allows.
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

#[test]
fn bitmaps_go_along_where_asked() {
    let place = Place::new();
    let image = place.image("image", "qcow2", &[], &["write -P 1 0 1M"]);
    qemu_img(&["bitmap", "--add", "-g", "32k", &image, "b0"]);
    place.write("image", "qcow2", &["write -P 2 5M 100k"]);
    let target = place.path("target");
    let args = ["img", "convert", "-O", "qcow2", "-o", "cluster_size=4k"];
    stdout_of(&[&args[..], &[&image, &target]].concat());
    let bitmaps = |image: &str| {
        let listed = stdout_of(&["img", "bitmap", "--list", "--json", image]);
        serde_json::from_str::<serde_json::Value>(&listed).unwrap()
    };
    assert_eq!(bitmaps(&target), serde_json::json!([]));
    stdout_of(&[&args[..], &["--bitmaps", &image, &target]].concat());
    place.sound("qcow2", &target);
    assert_eq!(bitmaps(&target), bitmaps(&image));
    assert_ne!(bitmaps(&target), serde_json::json!([]));
}

/// Progress is printed as lines if standard error is no terminal, or as events.
#[test]
fn it_says_how_far_it_is() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let target = place.path("target");
    let output = run(&["img", "convert", "-p", &disk, &target]);
    let lines = String::from_utf8(output.stderr).unwrap();
    assert!(
        lines.starts_with("0 %\n") && lines.ends_with("100 %\n"),
        "{lines}"
    );
    let output = run(&["img", "convert", &disk, &target]);
    assert!(output.stdout.is_empty() && output.stderr.is_empty());
    let events = stdout_of(&["img", "convert", "--json", &disk, &target]);
    let events: Vec<serde_json::Value> = events
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let (end, progress) = events.split_last().unwrap();
    assert_eq!(end["event"], "end");
    let done = progress.iter().map(|event| event["done"].as_u64().unwrap());
    assert!(done.is_sorted(), "{events:?}");
    assert_eq!(progress.last().unwrap()["done"], progress[0]["total"]);
}

/// Sectors that a server cannot read become zeroes, and the output names them.
#[test]
fn what_cannot_be_read_is_salvaged() {
    let place = Place::new();
    let disk = place.path("disk");
    fs::write(&disk, vec![7; 2 << 20]).unwrap();
    let args = ["--filter", "fault:error=EIO,op=read,range=700k+1k"];
    let bad = crate::support::nbd::Nbd::start(&disk, &args);
    let target = place.path("target");
    let uri = bad.uri();
    refused(
        1,
        &["img", "convert", &uri, &target],
        &["offset", "cannot read"],
    );
    let output = run(&["img", "convert", "--salvage", &uri, &target]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{told}");
    assert_eq!(told.matches("replaced by zeroes").count(), 2, "{told}");
    let mut expected = vec![7; 2 << 20];
    expected[700 << 10..701 << 10].fill(0);
    assert!(fs::read(&target).unwrap() == expected);
}

/// Options that scripts pass to qemu-img; some of them have no effect here.
#[test]
fn options_of_qemu_img_are_understood() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let target = place.path("target");
    let convert = ["img", "convert", "-O", "qcow2"];
    for options in [
        &["-t", "unsafe", "-W"][..],
        &["-t", "directsync", "-T", "directsync"],
        &["-p", "-q", "-C"],
    ] {
        let said = run(&[&convert, options, &[&disk, &target]].concat());
        assert!(said.status.success(), "{options:?}: {said:?}");
        assert_eq!(said.stderr, b"", "{options:?}");
        place.same("qcow2", &target, &disk);
    }
    stdout_of(&["img", "compare", "-p", "-q", "-T", "unsafe", &disk, &target]);
    let names = stdout_of(&[&convert[..], &["-o", "help"]].concat());
    assert!(names.contains("cluster_size"), "{names}");
}

/// The existing target is not changed.
#[test]
fn a_target_of_a_size_that_is_too_small_is_refused() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let target = place.image("target", "qcow2", &[], &["write -P 1 0 1M"]);
    let before = fs::read(&target).unwrap();
    for size in ["size=1M", "size=12582912"] {
        let args = ["img", "convert", "-O", "qcow2", "-o", size];
        let args = [&args, &[&*disk, &*target][..]].concat();
        refused(1, &args, &["-o size", "12586496 bytes"]);
        assert!(fs::read(&target).unwrap() == before);
    }
}

#[test]
fn several_sources_cannot_have_one_backing_file() {
    let place = Place::new();
    let (base, top) = place.chain("qcow2");
    let target = place.path("target");
    let args = ["img", "convert", "-O", "qcow2", "-B", &base, "-F", "qcow2"];
    for target in [&*target, "-"] {
        let args = [&args[..], &[&top, &top, target]].concat();
        refused(1, &args, &["one source"]);
    }
    assert!(!Path::new(&target).exists());
}

/// Locks prevent most of these cases. With -U nothing of the source is locked.
#[test]
fn sources_are_not_data_files_of_their_targets() {
    let place = Place::new();
    let disk = place.path("disk");
    fs::write(&disk, vec![7; MIB as usize]).unwrap();
    std::os::unix::fs::symlink(&disk, place.path("link")).unwrap();
    let target = place.path("target");
    let convert = ["img", "convert", "-U", "-f", "raw", "-O", "qcow2"];
    for name in [&*disk, &place.path("link")] {
        let options = format!("data_file={name}");
        let args = [&convert[..], &["-o", &options, &disk, &target]].concat();
        refused(1, &args, &["also a source"]);
        assert!(!Path::new(&target).exists());
    }
    stdout_of(&[
        "img",
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "data_file=data",
        &target,
        "1M",
    ]);
    let args = ["-n", "--data-file", &disk, &disk, &target];
    refused(1, &[&convert[..], &args].concat(), &["also a source"]);
    assert!(fs::read(&disk).unwrap() == vec![7; MIB as usize]);
}
