//! Tests archives of images, with qemu-img as the reference.

use crate::place::{MIB, Place, raw};
use crate::qemu_img;
use crate::support::nbd::tool;
use crate::support::{Kept, eventually, fathom, refused, run, stdout_of};
use fathom_archive::Manifest;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Runs `img archive --json`. Returns the last line of its output.
fn archived(args: &[&str]) -> Value {
    let said = stdout_of(&[&["img", "archive", "--json"], args].concat());
    serde_json::from_str(said.lines().last().expect("an end")).expect("JSON")
}

fn manifest(archive: &str, name: &str) -> String {
    format!("{archive}/images/{name}.manifest")
}

/// Returns the paths of the stripes of an archive in a directory.
fn stripes(archive: &str) -> Vec<PathBuf> {
    let Ok(dirs) = fs::read_dir(format!("{archive}/stripes")) else {
        return Vec::new();
    };
    let files = dirs.flat_map(|dir| fs::read_dir(dir.unwrap().path()).unwrap());
    let files = files.map(|file| file.unwrap().path());
    // The files that a killed writer leaves have other names.
    let is_whole = |file: &PathBuf| file.file_name().is_some_and(|name| name.len() == 64);
    let mut files: Vec<_> = files.filter(is_whole).collect();
    files.sort();
    files
}

/// Restores the manifest to every format and compares the results with `disk`.
fn in_all_formats(place: &Place, manifest: &str, disk: &str) {
    for format in ["raw", "qcow2", "qed"] {
        let back = place.path(&format!("back.{format}"));
        stdout_of(&["img", "restore", "-O", format, manifest, &back]);
        place.sound(format, &back);
        place.same(format, &back, disk);
        fs::remove_file(&back).unwrap();
    }
}

#[test]
fn what_was_archived_is_restored() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let archive = place.path("a/b/archive");
    for size in ["64k", "1M", "16M"] {
        let told = archived(&["--stripe-size", size, &disk, &archive, size]);
        assert_eq!(told["size"], fs::metadata(&disk).unwrap().len(), "{told}");
        in_all_formats(&place, &manifest(&archive, size), &disk);
    }
    // An archive of a backing chain has the data that its guest sees, for each format of the
    // images.
    for format in ["qcow2", "qed"] {
        let place = Place::new();
        let (_, top) = place.chain(format);
        let archive = place.path("archive");
        let told = archived(&[&top, &archive, "top"]);
        assert_eq!(told["size"], 20 * MIB);
        assert!(told["read"].as_u64().unwrap() < 10 * MIB, "{told}");
        in_all_formats(&place, &manifest(&archive, "top"), &place.path("before"));
    }
}

/// Zeroes take no space, neither in an archive nor in the restored image.
#[test]
fn holes_stay_holes() {
    let place = Place::new();
    let image = place.image(
        "image",
        "qcow2",
        &[],
        &["write -P 1 5M 64k", "write -z 9M 1M"],
    );
    let (archive, back) = (place.path("archive"), place.path("back"));
    let told = archived(&[&image, &archive, "image"]);
    assert_eq!(told["zero-stripes"], 19, "{told}");
    assert_eq!(told["read"], 65_536, "{told}");
    stdout_of(&["img", "restore", &manifest(&archive, "image"), &back]);
    let used = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&back).unwrap()) * 512;
    assert!(used <= 128 << 10, "{used} bytes are used");
    // An existing target is overwritten wherever it has to be.
    fs::write(&back, vec![7; 20 << 20]).unwrap();
    stdout_of(&["img", "restore", "-n", &manifest(&archive, "image"), &back]);
    qemu_img(&["compare", "-F", "raw", &image, &back]);
    fs::write(&back, vec![7; 20 << 20]).unwrap();
    stdout_of(&[
        "img",
        "restore",
        "-n",
        "-S",
        "0",
        &manifest(&archive, "image"),
        &back,
    ]);
    qemu_img(&["compare", "-F", "raw", &image, &back]);
}

#[test]
fn images_share_what_is_the_same() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let archive = place.path("archive");
    let one = archived(&["--stripe-size", "64k", &disk, &archive, "one"]);
    let count = stripes(&archive).len();
    assert_eq!(one["new-stripes"], count, "{one}");
    // Each of two stripes changes in one place.
    place.write(
        "disk",
        "raw",
        &["write -P 77 100 512", "write -P 78 9500k 512"],
    );
    let two = archived(&["--stripe-size", "64k", &disk, &archive, "two"]);
    assert_eq!(two["new-stripes"], 2, "{two}");
    assert_eq!(stripes(&archive).len(), count + 2);
    in_all_formats(&place, &manifest(&archive, "two"), &disk);
    refused(
        1,
        &["img", "archive", &disk, &archive, "two"],
        &["two.manifest", "already exists", "--force"],
    );
    archived(&["--force", "--stripe-size", "1M", &disk, &archive, "two"]);
    in_all_formats(&place, &manifest(&archive, "two"), &disk);
    let listed = stdout_of(&["img", "archive", "--list", "--json", &archive]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let sizes = |at: usize| (&listed[at]["name"], &listed[at]["stripe-size"]);
    assert_eq!(sizes(0), (&"one".into(), &65_536.into()));
    assert_eq!(sizes(1), (&"two".into(), &MIB.into()));
    let listed = stdout_of(&["img", "archive", "--list", &archive]);
    assert!(
        listed.lines().nth(1).unwrap().starts_with("one "),
        "{listed}"
    );
}

/// The format is the one that docs/archive.md describes: the zstd program reads a stripe.
#[test]
fn stripes_are_frames_of_zstd() {
    let place = Place::new();
    let disk = place.path("disk");
    fs::write(&disk, b"some text, again and again. ".repeat(2400)).unwrap();
    let archive = place.path("archive");
    archived(&["--stripe-size", "64k", "-f", "raw", &disk, &archive, "x"]);
    let mut disk = fs::read(&disk).unwrap();
    // A guest sees whole sectors.
    disk.resize(disk.len().next_multiple_of(512), 0);
    let mut found = Vec::new();
    for stripe in stripes(&archive) {
        let object = fs::read(&stripe).unwrap();
        assert_eq!(object[..6], *b"FStr\x01\x01");
        fs::write(place.path("frame.zst"), &object[16..]).unwrap();
        let output = Command::new("zstd")
            .args(["-dc", &place.path("frame.zst")])
            .output();
        found.push(output.expect("zstd is installed by `make setup`").stdout);
    }
    found.sort_by_key(Vec::len);
    assert!(
        found == [&disk[65_536..], &disk[..65_536]],
        "not what was put"
    );
}

/// A killed archiving leaves nothing that could be mistaken for an image. The next one resumes with
/// the stripes that exist.
#[test]
fn what_was_killed_goes_on() {
    let place = Place::new();
    let disk = place.path("disk");
    let mut bytes = Vec::new();
    (0..24 << 18).for_each(|at: u32| bytes.extend(at.wrapping_mul(2_654_435_761).to_le_bytes()));
    fs::write(&disk, bytes).unwrap();
    let archive = place.path("archive");
    let args = [
        "--stripe-size",
        "64k",
        "-f",
        "raw",
        &disk,
        &archive,
        "image",
    ];
    let mut child = fathom()
        .args(["img", "archive"])
        .args(args)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    eventually("there are some stripes", || {
        (stripes(&archive).len() > 5).then_some(())
    });
    child.kill().unwrap();
    let ended = child.wait().unwrap();
    assert_eq!(ended.code(), None, "it was faster than the test");
    assert_eq!(
        stdout_of(&["img", "archive", "--list", &archive])
            .lines()
            .count(),
        1
    );
    let back = place.path("back");
    let restore = ["img", "restore", &manifest(&archive, "image"), &back];
    refused(1, &restore, &["image.manifest", "not found"]);
    let told = archived(&args);
    let known = told["known-stripes"].as_u64().unwrap();
    let new = told["new-stripes"].as_u64().unwrap();
    assert!(known > 5 && new > 0 && known + new == 384, "{told}");
    stdout_of(&restore);
    place.same("raw", &back, &disk);
}

/// Restoring a damaged archive fails with one line and leaves no target.
#[test]
fn a_damaged_archive_is_not_restored() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let archive = place.path("archive");
    archived(&["--stripe-size", "1M", &disk, &archive, "image"]);
    let back = place.path("back");
    let manifest = manifest(&archive, "image");
    let names = place.names();
    let restore = |words: &[&str]| {
        for format in ["raw", "qcow2"] {
            let args = ["img", "restore", "-O", format, &manifest, &back];
            refused(1, &args, words);
            assert_eq!(place.names(), names);
        }
    };
    let all = stripes(&archive);
    let (victim, other) = (&all[3], &all[5]);
    let name = victim.file_name().unwrap().to_str().unwrap();
    let before = fs::read(victim).unwrap();
    let mut changed = before.clone();
    let middle = changed.len() / 2;
    changed[middle] ^= 1;
    // A frame that decompresses to far more bytes than a stripe has.
    fs::write(place.path("zeroes"), vec![0; 64 << 20]).unwrap();
    let zstd = Command::new("zstd")
        .args(["-c", &place.path("zeroes")])
        .output();
    let mut bomb = before[..16].to_vec();
    bomb[5] = 1;
    bomb.extend(zstd.unwrap().stdout);
    fs::remove_file(place.path("zeroes")).unwrap();
    for (content, word) in [
        (changed, "damaged"),
        (before[..before.len() - 1].to_vec(), "damaged"),
        (Vec::new(), "truncated"),
        (fs::read(other).unwrap(), "damaged"),
        (bomb, "cannot be decompressed"),
        (vec![0; 3 << 20], "more than"),
    ] {
        fs::write(victim, content).unwrap();
        restore(&[name, word]);
    }
    fs::remove_file(victim).unwrap();
    restore(&[name, "lost"]);
    // The lost stripe is stored again, the others are not.
    let told = archived(&["--force", &disk, &archive, "image"]);
    assert_eq!(told["new-stripes"], 1, "{told}");
    let before = fs::read(&manifest).unwrap();
    for at in (0..before.len()).step_by(7) {
        let mut changed = before.clone();
        changed[at] ^= 1;
        fs::write(&manifest, changed).unwrap();
        refused(
            1,
            &["img", "restore", &manifest, &back],
            &["image.manifest"],
        );
    }
    fs::write(&manifest, &before[..100]).unwrap();
    restore(&["image.manifest", "damaged"]);
    let listed = stdout_of(&["img", "archive", "--list", &archive]);
    assert!(listed.contains("damaged"), "{listed}");
    fs::write(&manifest, &before).unwrap();
    in_all_formats(&place, &manifest, &disk);
}

#[test]
fn damaged_stripe_is_replaced_when_known_stripes_are_verified() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let archive = place.path("archive");
    archived(&["--stripe-size", "1M", &disk, &archive, "image"]);
    let victim = &stripes(&archive)[3];
    let mut changed = fs::read(victim).unwrap();
    let middle = changed.len() / 2;
    changed[middle] ^= 1;
    fs::write(victim, &changed).unwrap();
    // The stripe counts as known because its length is correct.
    let told = archived(&["--stripe-size", "1M", &disk, &archive, "second"]);
    assert_eq!(told["new-stripes"], 0, "{told}");
    let (second, back) = (manifest(&archive, "second"), place.path("back"));
    let words = [
        "damaged",
        "second",
        "stripe",
        "of the disk",
        "--verify-known",
    ];
    refused(1, &["img", "restore", &second, &back], &words);
    let args = [
        "--stripe-size",
        "1M",
        "--verify-known",
        &disk,
        &archive,
        "third",
    ];
    let told = archived(&args);
    assert_eq!(told["new-stripes"], 1, "{told}");
    assert_eq!(told["repaired-stripes"], 1, "{told}");
    for name in ["image", "second", "third"] {
        in_all_formats(&place, &manifest(&archive, name), &disk);
    }
}

#[test]
fn what_cannot_be_is_told_in_one_line() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let archive = place.path("archive");
    let refuse = |args: &[&str], words: &[&str]| {
        refused(1, &[&["img", "archive"], args].concat(), words);
    };
    refuse(&[&disk, &archive], &["an image, an archive"]);
    refuse(
        &[&place.path("none"), &archive, "x"],
        &["none", "no such file"],
    );
    for name in ["../x", "", ".x", "a b", "a/b", "a#1"] {
        refuse(&[&disk, &archive, name], &["not a name, which has"]);
    }
    refuse(
        &[&disk, "https://127.0.0.1/x", "x"],
        &["cannot be written to"],
    );
    refuse(&[&disk, "gs://bucket/x", "x"], &["not an address"]);
    refuse(&["--list", &place.path("none")], &["not found"]);
    refuse(&["--list", &archive, "x"], &["name only the archive"]);
    fs::write(place.path("profile"), "0 1\n5 1\nfive\n").unwrap();
    let profile = ["--profile", &place.path("profile"), &disk, &archive, "x"];
    refuse(&profile, &["profile:3", "'five'"]);
    fs::write(place.path("profile"), "0 1\n5242880000 1\n").unwrap();
    refuse(&profile, &["stripe 5000"]);
    assert!(stripes(&archive).is_empty());
    refused(
        2,
        &["img", "archive", "--stripe-size", "100k", "a", "b", "c"],
        &["power of two"],
    );
    archived(&[&disk, &archive, "image"]);
    let manifest = manifest(&archive, "image");
    let before = fs::read(&manifest).unwrap();
    let restore = |args: &[&str], words: &[&str]| {
        refused(1, &[&["img", "restore", &manifest], args].concat(), words);
    };
    restore(&[&manifest], &["also a source"]);
    restore(&["-"], &["standard output"]);
    restore(&["-n", &place.path("new")], &["no such file"]);
    assert_eq!(fs::read(&manifest).unwrap(), before);
}

/// If a disk is full, the error says how many bytes are missing, and no target is left.
#[test]
fn a_full_disk_is_told() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let archive = place.path("archive");
    archived(&["-f", "raw", &disk, &archive, "image"]);
    let small = place.path("small");
    fs::create_dir(&small).unwrap();
    let script = "mount -t tmpfs -o size=1M none \"$SMALL\" && cd \"$SMALL\" || exit 9\n\
                  \"$@\"; status=$?; find . -type f ! -path './a/stripes/*'; exit $status";
    for (args, words) in [
        (
            &["img", "restore", &manifest(&archive, "image"), "back"][..],
            &["back: no space left", "more bytes are needed"][..],
        ),
        (
            &["img", "archive", "-f", "raw", &disk, "a", "image"],
            &["a/stripes/", "no space left"],
        ),
    ] {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh"]);
        let output = command
            .arg(env!("CARGO_BIN_EXE_fathom"))
            .args(args)
            .env("SMALL", &small)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        crate::support::check_refusal(output.status, &said, 1, words);
        let left = String::from_utf8_lossy(&output.stdout);
        assert!(
            !left.contains("back") && !left.contains("manifest"),
            "{left}"
        );
    }
}

/// `img manifest` describes the bytes of a file, like an archive of the raw file.
#[test]
fn a_manifest_is_of_the_bytes_as_they_are() {
    let place = Place::new();
    let image = place.image("image", "qcow2", &[], &["write -P 1 0 3M"]);
    let (archive, file) = (place.path("archive"), place.path("image.manifest"));
    stdout_of(&["img", "manifest", &image, &file]);
    archived(&["-f", "raw", &image, &archive, "image"]);
    // Compares everything except the time and the hash over the whole manifest.
    let same = |one: &str, two: &str| {
        let bytes = [one, two].map(|path| {
            let mut bytes = fs::read(path).unwrap();
            bytes[24..32].fill(0);
            bytes[..bytes.len() - 32].to_vec()
        });
        bytes[0] == bytes[1]
    };
    assert!(same(&file, &manifest(&archive, "image")));
    refused(
        1,
        &["img", "manifest", &image, &file],
        &["already exists", "--force"],
    );
    stdout_of(&["img", "manifest", "--force", "-f", "qcow2", &image, &file]);
    archived(&["--force", &image, &archive, "image"]);
    assert!(same(&file, &manifest(&archive, "image")));
    refused(
        1,
        &["img", "manifest", "--force", &place.path("none"), &file],
        &["none", "no such file"],
    );
    fs::write(place.path("profile"), "3145728 1\n0 1\n").unwrap();
    let profile = ["--force", "--profile", &place.path("profile")];
    let args = [&["img", "manifest"], &profile[..], &[&image, &file]].concat();
    stdout_of(&args);
    let bytes = fs::read(&file).unwrap();
    assert_eq!(
        bytes[bytes.len() - 40..bytes.len() - 32],
        [3, 0, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!(
        place.names(),
        ["archive", "image", "image.manifest", "profile"]
    );
    // A file need not consist of whole sectors.
    let odd = place.path("odd");
    let bytes: Vec<u8> = (0..200_001_u32).map(|at| (at / 3) as u8).collect();
    fs::write(&odd, &bytes).unwrap();
    for cache in ["writeback", "none"] {
        let args = ["--force", "--stripe-size", "64k", "-T", cache, &odd, &file];
        stdout_of(&[&["img", "manifest"], &args[..]].concat());
        let manifest = Manifest::parse(&fs::read(&file).unwrap()).unwrap();
        assert_eq!(manifest.size(), 200_001);
        for (index, stripe) in (0..).zip(bytes.chunks(64 << 10)) {
            assert!(manifest.verify(index, stripe), "{cache}: {index}");
        }
    }
}

/// A web server without support for archives suffices to read one.
#[test]
fn an_archive_is_restored_from_a_web_server() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    archived(&["-f", "raw", &disk, &place.path("archive"), "image"]);
    let log = place.path("log");
    let mut python = Command::new("python3");
    python
        .args(["-u", "-m", "http.server", "--bind", "127.0.0.1", "0"])
        .current_dir(place.0.path())
        .stdout(fs::File::create(&log).unwrap())
        .stderr(Stdio::null());
    let _server = Kept(
        python
            .spawn()
            .expect("python3 is installed by `make setup`"),
    );
    let port = eventually("the server says where it is", || {
        let said = fs::read_to_string(&log).unwrap();
        let (_, rest) = said.split_once(" port ")?;
        rest.split_once(' ').map(|(port, _)| port.to_owned())
    });
    let base = format!("http://127.0.0.1:{port}/archive");
    let back = place.path("back");
    stdout_of(&["img", "restore", &manifest(&base, "image"), &back]);
    place.same("raw", &back, &disk);
    refused(
        1,
        &["img", "restore", &manifest(&base, "other"), &back],
        &["other.manifest", "not found"],
    );
    fs::remove_file(&stripes(&place.path("archive"))[2]).unwrap();
    fs::remove_file(&back).unwrap();
    refused(
        1,
        &["img", "restore", &manifest(&base, "image"), &back],
        &["http://127.0.0.1", "lost"],
    );
    assert!(!place.names().contains(&"back".to_owned()));
}

/// Interrupts an archiving with SIGINT.
#[test]
fn who_interrupts_leaves_nothing() {
    let place = Place::new();
    let disk = place.path("disk");
    fs::write(
        &disk,
        (0..8_u32 << 20)
            .flat_map(|at| (at ^ 0x5bd1_e995).to_le_bytes())
            .collect::<Vec<_>>(),
    )
    .unwrap();
    let archive = place.path("archive");
    let args = [
        "img",
        "archive",
        "--stripe-size",
        "64k",
        "-f",
        "raw",
        &disk,
        &archive,
        "x",
    ];
    let child = fathom().args(args).stderr(Stdio::piped()).spawn().unwrap();
    eventually("there is a stripe", || {
        (!stripes(&archive).is_empty()).then_some(())
    });
    let pid = child.id().to_string();
    tool(place.0.path(), "kill", &["-INT", &pid]);
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{ended:?}");
    assert_eq!(
        stdout_of(&["img", "archive", "--list", &archive])
            .lines()
            .count(),
        1
    );
    assert!(run(&args).status.success());
}

/// Examples of file systems without hard links are FAT and SMB mounts.
#[test]
fn file_systems_without_links_have_archives() {
    let place = Place::new();
    let disk = raw(&place, "disk");
    let (archive, file) = (place.path("archive"), place.path("file"));
    let without_links = |args: &[&str]| {
        let inject = ["-f", "-qq", "-e", "trace=link,linkat"];
        let mut strace = Command::new("strace");
        strace
            .args(inject)
            .args(["-e", "inject=link,linkat:error=EPERM"]);
        strace.args(["-o", &place.path("trace")]);
        strace
            .arg(env!("CARGO_BIN_EXE_fathom"))
            .arg("img")
            .args(args);
        let output = strace
            .output()
            .expect("strace is installed by `make setup`");
        (
            output.status,
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    for args in [
        &["archive", "-q", "-f", "raw", &disk, &archive, "image"][..],
        &["manifest", &disk, &file],
    ] {
        let (status, said) = without_links(args);
        assert!(status.success(), "{said}");
        let trace = fs::read_to_string(place.path("trace")).unwrap();
        assert!(trace.contains("INJECTED"), "{trace}");
        let (status, said) = without_links(args);
        crate::support::check_refusal(status, &said, 1, &["already exists"]);
    }
    in_all_formats(&place, &manifest(&archive, "image"), &disk);
    assert_eq!(place.names(), ["archive", "disk", "file", "trace"]);
}
