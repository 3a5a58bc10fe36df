//! Checks encrypted disks: in use, as mirrors, with snapshots and commits, after kills and
//! upgrades.

use crate::driver::with_disk;
use crate::exercise::{Random, differ, exercise};
use crate::keep;
use crate::kinds::{SIZE, qemu_img, tool};
use crate::mirror::{after_a_kill, complete, served_uri, start, write_in_order, written};
use crate::snapshots::snapshot;
use crate::support::{
    Served, as_arg, check_refusal, disk_dir, eventually, fathom, pass, refused, short_dir,
    stdout_of,
};
use serde_json::Value;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;

const SECRET: &str = "correct horse";

/// Writes a key to a file. Returns the location of the key as Fathom's options name it.
fn key(dir: &Path, name: &str, key: &str) -> String {
    let path = dir.join(name);
    fs::write(&path, key).unwrap();
    format!("file:{}", as_arg(&path))
}

/// Returns the options by which QEMU opens an encrypted image with the key in the file `key`.
fn opens(dir: &Path, format: &str, image: &str) -> [String; 4] {
    let key = match format {
        "luks" => "key-secret=s",
        _ => "encrypt.format=luks,encrypt.key-secret=s",
    };
    let secret = format!("secret,id=s,file={}", as_arg(&dir.join("key")));
    let options = format!("driver={format},file.filename={image},{key}");
    ["--object".into(), secret, "--image-opts".into(), options]
}

/// Returns the contents of an encrypted image, as QEMU reads them.
fn decrypted(dir: &Path, format: &str, image: &str) -> Vec<u8> {
    let flat = as_arg(&dir.join("flat"));
    let opens = opens(dir, format, image);
    let mut args = vec!["convert", "-O", "raw"];
    args.extend(opens.iter().map(String::as_str));
    args.push(&flat);
    qemu_img(dir, &args);
    if format == "qcow2" {
        let args: Vec<_> = ["check"]
            .into_iter()
            .chain(opens.iter().map(String::as_str))
            .collect();
        qemu_img(dir, &args);
    }
    fs::read(flat).unwrap()
}

/// Returns whether the image has an unencrypted sector, as the test writes them: one byte value
/// throughout, and not zero.
fn shows(image: &str) -> bool {
    let image = fs::read(image).unwrap();
    let is_plain = |sector: &[u8]| sector[0] != 0 && sector.iter().all(|byte| *byte == sector[0]);
    image.chunks_exact(512).any(is_plain)
}

#[test]
fn disks_become_encrypted_and_stay_so_while_they_are_used() {
    let targets = [
        ("luks", "iter-time=10"),
        (
            "qcow2",
            "encrypt.format=luks,encrypt.iter-time=10,cluster_size=4k",
        ),
        (
            "qcow2",
            "encrypt.format=luks,encrypt.iter-time=10,extended_l2=on",
        ),
    ];
    for (n, (format, options)) in targets.into_iter().enumerate() {
        eprintln!("{format} {options}");
        let dir = disk_dir();
        let dir = dir.path();
        let (image, target) = (as_arg(&dir.join("i")), as_arg(&dir.join("target")));
        let (layer, key) = (as_arg(&dir.join("layer")), key(dir, "key", SECRET));
        fs::write(&image, vec![0; SIZE as usize]).unwrap();
        let mut model = vec![0; SIZE as usize];
        let mut random = Random::new(1700 + n);
        let args = [&["--cache", "writeback"][..], &["--iothreads", "2"]].concat();
        let mut served = Served::start(&image, &args);
        with_disk(&served.arg("s"), 2, |disk| {
            exercise(disk, &mut model, &mut random);
            start(
                &served,
                &target,
                &["-O", format, "-o", options, "--key", &key, "--wait"],
            );
            exercise(disk, &mut model, &mut random);
            complete(&served, &["--transient"]);
            assert_eq!(differ(&disk.contents(), &model), None, "{options}");
            exercise(disk, &mut model, &mut random);
            // The overlay of a snapshot is encrypted, too.
            snapshot(&served, &layer, &["--transient"]);
            exercise(disk, &mut model, &mut random);
            assert_eq!(differ(&disk.contents(), &model), None, "{options}");
            stdout_of(&["commit", &served.api(), &target, "--quiet", "--transient"]);
            exercise(disk, &mut model, &mut random);
            assert_eq!(differ(&disk.contents(), &model), None, "{options}");
        });
        let info: Value =
            serde_json::from_str(&stdout_of(&["img", "info", "--json", "-U", &layer])).unwrap();
        assert_eq!(info["encrypted"], true);
        let api = stdout_of(&["disk", "show", &served.api(), "--json"]);
        assert!(!api.contains(SECRET), "{api}");
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        assert!(!served.log().contains(SECRET));
        let then = decrypted(dir, format, &target);
        assert_eq!(differ(&then, &model), None, "{options}");
        assert!(!shows(&target) && !shows(&layer));
        // The function finds data that is not encrypted.
        let plain = as_arg(&dir.join("plain"));
        fs::write(&plain, &model).unwrap();
        assert!(shows(&plain));
        // QEMU writes to the image, and then the server reads it.
        let opens = opens(dir, format, &target);
        let mut io: Vec<_> = opens.iter().map(String::as_str).collect();
        io.extend(["-c", "write -P 99 100k 300k", "-c", "write -P 98 5M 512"]);
        assert!(tool(dir, "qemu-io", &io).status.success());
        model[100 << 10..400 << 10].fill(99);
        model[5 << 20..(5 << 20) + 512].fill(98);
        let args = ["--format", format, "--key", &key];
        let mut served = Served::start(&target, &args);
        with_disk(&served.arg("s"), 1, |disk| {
            assert_eq!(differ(&disk.contents(), &model), None, "{options}");
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    }
}

#[test]
fn whenever_the_server_is_killed_nothing_is_lost() {
    let dir = disk_dir();
    let dir = dir.path();
    let key = key(dir, "key", SECRET);
    let mut served = keep::start(short_dir(), "");
    for (round, format) in ["luks", "qcow2"].into_iter().cycle().take(8).enumerate() {
        let image = as_arg(&dir.join(format!("i{round}")));
        let options = match format {
            "luks" => "iter-time=10",
            _ => "encrypt.format=luks,encrypt.iter-time=10,cluster_size=4k",
        };
        let zeroes = as_arg(&dir.join("zeroes"));
        fs::write(&zeroes, vec![0; 4 << 20]).unwrap();
        let convert = [
            "img", "convert", "-q", "--key", &key, "-f", "raw", "-O", format, "-o",
        ];
        stdout_of(&[&convert[..], &[options, &zeroes, &image]].concat());
        let add = [
            "disk",
            "add",
            "--server",
            &served.api(),
            "d",
            &image,
            "--format",
            format,
        ];
        stdout_of(&[&add[..], &["--key", &key]].concat());
        let log = dir.join("written");
        let load = write_in_order(&served_uri(&served), &log);
        eventually("writes", || {
            (written(&log) > 50 * (1 + round)).then_some(())
        });
        served = keep::again(served, "KILL", "");
        drop(load);
        after_a_kill(&served, &log, 0);
        let kept = fs::read_to_string(served.path("disks/d.toml")).unwrap();
        assert!(kept.contains(&key) && !kept.contains(SECRET), "{kept}");
        stdout_of(&["disk", "remove", &served.api(), "--disk", "d", "--force"]);
    }
}

#[test]
fn keys_are_needed_and_go_with_the_disk() {
    let dir = disk_dir();
    let dir = dir.path();
    let image = as_arg(&dir.join("i"));
    let good = key(dir, "key", SECRET);
    let bad = key(dir, "bad", "another");
    let create = [
        "img",
        "create",
        "-q",
        "--key",
        &good,
        "-f",
        "luks",
        "-o",
        "iter-time=10",
        &image,
    ];
    stdout_of(&[&create[..], &["4M"]].concat());
    let socket = as_arg(&dir.join("s"));
    let serve = [
        "serve",
        &image,
        "--vhost-user",
        &socket,
        "--api",
        "none",
        "--format",
        "luks",
    ];
    refused(1, &serve, &["encrypted", "--key"]);
    refused(
        1,
        &[&serve[..], &["--key", &bad]].concat(),
        &["no given key"],
    );
    // The server runs the key's command before it enters the sandbox.
    let prints = format!("command:cat {}", as_arg(&dir.join("key")));
    let mut served = Served::start(&image, &["--format", "luks", "--key", &prints]);
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    refused(
        1,
        &[&serve[..], &["--key", "command:false"]].concat(),
        &["command:false"],
    );
    // A key that only this process has open cannot be handed over to a successor.
    let open = File::open(dir.join("key")).unwrap();
    let by_descriptor = "fd:3";
    let mut command = fathom();
    pass(&mut command, open.as_raw_fd());
    let mut served = Served::start_by(
        command,
        &image,
        &["--format", "luks", "--key", by_descriptor],
    );
    let upgrade = crate::support::run(&["upgrade", &served.api()]);
    let said = String::from_utf8_lossy(&upgrade.stderr).into_owned();
    check_refusal(upgrade.status, &said, 1, &["fd:", "file:PATH"]);
    // The key stays with a disk that the server opens again.
    let layer = as_arg(&dir.join("layer"));
    snapshot(&served, &layer, &["--transient"]);
    with_disk(&served.arg("s"), 1, |disk| assert_eq!(disk.size(), 4 << 20));
    assert_eq!(served.terminate().0, Some(0), "{}", served.log());
    // A key in a file can be handed over. (The overlay is given up.)
    let args = ["--format", "luks", "--key", &good, "--allow-superseded"];
    let served = Served::start(&image, &args);
    served.upgrade();
    with_disk(&served.arg("s"), 1, |disk| assert_eq!(disk.size(), 4 << 20));
    stdout_of(&["quit", &served.api()]);
    // The API runs no programs, and accepts no descriptors as keys.
    let served = Served::waiting("", "");
    let api = served.api();
    let add = [
        "disk", "add", "--server", &api, "d", &image, "--format", "luks", "--key",
    ];
    for key in ["command:cat /etc/hostname", "fd:0"] {
        refused(
            1,
            &[&add[..], &[key]].concat(),
            &["only the server's command line"],
        );
    }
    refused(1, &[&add[..], &[&bad]].concat(), &["no given key"]);
    stdout_of(&[&add[..], &[&good]].concat());
    // NBD clients may access ranges that are not aligned.
    let uri = served_uri(&served);
    let script = "\
import nbd, sys
disk = nbd.NBD()
disk.connect_uri(sys.argv[1])
disk.pwrite(b'x' * 100, 1000)
disk.zero(50, 1020)
assert disk.pread(100, 1000) == b'x' * 20 + bytes(50) + b'x' * 30
";
    let done = tool(dir, "/usr/bin/python3", &["-c", script, &uri]);
    assert!(done.status.success(), "{done:?}");
}
