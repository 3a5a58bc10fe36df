//! Tests the tools of libnbd and QEMU, and fio.

use super::support::nbd::{Nbd, make_image, prints, tool};
use super::support::{as_arg, disk_dir, stdout_of};
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

const SIZE: u64 = 64 << 20;

/// Creates a sparse file with data at the start, in the middle and at the very end.
fn sparse_file(dir: &Path) -> String {
    let path = dir.join("sparse");
    let file = fs::File::create(&path).unwrap();
    file.set_len(SIZE).unwrap();
    let data: Vec<u8> = (0..3u32 << 18)
        .flat_map(|n| n.wrapping_mul(0x9e37_79b9).to_be_bytes())
        .collect();
    for offset in [0, 20 << 20, SIZE - data.len() as u64] {
        file.write_all_at(&data, offset).unwrap();
    }
    as_arg(&path)
}

fn same(a: &str, b: &str) {
    assert!(
        fs::read(a).unwrap() == fs::read(b).unwrap(),
        "{a} and {b} differ"
    );
}

#[test]
fn nbdinfo_tells_what_the_disk_is() {
    let dir = disk_dir();
    let image = make_image(dir.path(), "qcow2", SIZE);
    let nbd = Nbd::start(&image, &["--format", "qcow2"]);
    let info = prints(dir.path(), "nbdinfo", &["--json", &nbd.uri()]);
    for fact in [
        r#""protocol": "newstyle-fixed""#,
        r#""TLS": false"#,
        r#""structured": true"#,
        r#""base:allocation""#,
        r#""is_read_only": false"#,
        r#""is_rotational": false"#,
        r#""can_cache": true"#,
        r#""can_df": true"#,
        r#""can_fast_zero": false"#,
        r#""can_flush": true"#,
        r#""can_fua": true"#,
        r#""can_multi_conn": true"#,
        r#""can_trim": true"#,
        r#""can_zero": true"#,
        r#""block_size_minimum": 1"#,
        r#""block_size_maximum": 33554432"#,
        r#""export-size": 67108864"#,
    ] {
        assert!(info.contains(fact), "no {fact} in {info}");
    }
    let map = prints(dir.path(), "nbdinfo", &["--map", "--totals", &nbd.uri()]);
    assert!(map.contains("67108864 100.0%   3 hole,zero"), "{map}");
    drop(nbd);
    let nbd = Nbd::start(&image, &["--format", "qcow2", "--readonly", "--no-discard"]);
    let info = prints(dir.path(), "nbdinfo", &["--json", &nbd.uri()]);
    for fact in [
        r#""is_read_only": true"#,
        r#""can_trim": false"#,
        r#""can_zero": false"#,
    ] {
        assert!(info.contains(fact), "no {fact} in {info}");
    }
}

#[test]
fn nbdcopy_copies_in_and_out_and_keeps_holes() {
    let dir = disk_dir();
    let (source, back) = (sparse_file(dir.path()), as_arg(&dir.path().join("back")));
    let image = make_image(dir.path(), "qcow2", SIZE);
    let memory = Nbd::start("memory:64M", &["--iothreads", "2"]);
    let qcow2 = Nbd::start(&image, &["--format", "qcow2"]);
    // Copies a file to memory, from there to qcow2 at another server, and from there to a file.
    for (from, to) in [
        (source.clone(), memory.uri()),
        (memory.uri(), qcow2.uri()),
        (qcow2.uri(), back.clone()),
    ] {
        prints(
            dir.path(),
            "nbdcopy",
            &["--connections=4", "--requests=64", &from, &to],
        );
    }
    same(&source, &back);
    let used = |path: &str| fs::metadata(path).unwrap().blocks() * 512;
    for path in [&back, &image] {
        assert!(
            used(path) < SIZE / 2,
            "{path} is not sparse: {}",
            used(path)
        );
    }
    for nbd in [&memory, &qcow2] {
        let map = prints(dir.path(), "nbdinfo", &["--map", "--totals", &nbd.uri()]);
        let holes = map.lines().find(|line| line.contains("hole,zero"));
        let holes = holes.and_then(|line| line.split_whitespace().next());
        let holes: u64 = holes.expect("holes").parse().unwrap();
        assert!(holes > SIZE / 2, "{map}");
    }
}

/// Returns the extents that qemu-img reports, without their offsets in a file.
fn map(dir: &Path, args: &[&str]) -> String {
    prints(dir, "qemu-img", &[&["map", "--output=json"], args].concat())
}

#[test]
fn qemus_tools_convert_compare_map_and_write() {
    let dir = disk_dir();
    let source = sparse_file(dir.path());
    for (format, disk) in [
        ("raw", make_image(dir.path(), "raw", SIZE)),
        ("qcow2", make_image(dir.path(), "qcow2", SIZE)),
        ("qed", make_image(dir.path(), "qed", SIZE)),
        ("memory", format!("memory:{SIZE}")),
    ] {
        let is_file = format != "memory";
        let args: &[&str] = if is_file { &["--format", format] } else { &[] };
        let mut nbd = Nbd::start(&disk, args);
        let uri = nbd.uri();
        let convert = [
            "convert", "-n", "-W", "-m", "8", "-f", "raw", "-O", "raw", &source, &uri,
        ];
        prints(dir.path(), "qemu-img", &convert);
        let compare = ["compare", "-s", "-f", "raw", "-F", "raw", &source, &uri];
        prints(dir.path(), "qemu-img", &compare);
        let ours = map(dir.path(), &["-f", "raw", &uri]);
        assert!(
            ours.contains(r#""zero": true"#) && ours.contains(r#""data": true"#),
            "{ours}"
        );
        let io = [
            "-f",
            "raw",
            &uri,
            "-c",
            "write -P 0x11 1M 64k",
            "-c",
            "write -f -P 0x22 2M 64k",
            "-c",
            "write -z -u 3M 1M",
            "-c",
            "write -z 5M 1M",
            "-c",
            "discard 7M 1M",
            "-c",
            "aio_write -P 0x33 8M 4M",
            "-c",
            "aio_read -P 0 3M 1M",
            "-c",
            "aio_flush",
            "-c",
            "flush",
            "-c",
            "read -P 0x11 1M 64k",
            "-c",
            "read -P 0x22 2M 64k",
            "-c",
            "read -P 0 3M 1M",
            "-c",
            "read -P 0 5M 1M",
            "-c",
            "read -P 0x33 8M 4M",
        ];
        let said = prints(dir.path(), "qemu-io", &io);
        assert!(!said.contains("failed"), "{format}: {said}");
        assert_eq!(nbd.terminate().0, Some(0), "{}", nbd.log());
        if is_file {
            let io = [
                "-r",
                "-f",
                format,
                &disk,
                "-c",
                "read -P 0x33 8M 4M",
                "-c",
                "read -P 0 5M 1M",
            ];
            let said = prints(dir.path(), "qemu-io", &io);
            assert!(!said.contains("failed"), "{format}: {said}");
        }
        if ["qcow2", "qed"].contains(&format) {
            prints(
                dir.path(),
                "qemu-img",
                &["check", "-q", "-f", format, &disk],
            );
        }
    }
}

/// The clients of QEMU 8.2 and newer request extended headers. A single request of more than 4 GiB
/// shows that extended headers are in use.
#[test]
fn qemu_uses_extended_headers() {
    let dir = disk_dir();
    let mut nbd = Nbd::start("memory:16G", &[]);
    let io = [
        "-T",
        "nbd_receive_option_reply",
        "-T",
        "nbd_send_request",
        "-f",
        "raw",
        &nbd.uri(),
        "-c",
        "write -P 1 6G 1M",
        "-c",
        "read -P 1 6G 1M",
        "-c",
        "map",
    ];
    let output = tool(dir.path(), "qemu-io", &io);
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(
        output.status.success() && !said.contains("failed"),
        "{said}"
    );
    let agreed = |line: &&str| line.contains("extended") && line.contains("(ack)");
    assert!(said.lines().any(|line| agreed(&line)), "{said}");
    let long = |line: &str| line.contains("block status") && line.contains("17179869184");
    assert!(said.lines().any(long), "{said}");
    assert_eq!(nbd.terminate().0, Some(0), "{}", nbd.log());
}

#[test]
fn fio_finds_what_it_wrote() {
    let dir = disk_dir();
    let qcow2 = make_image(dir.path(), "qcow2", SIZE);
    for (disk, args) in [("memory:64M", &[][..]), (&qcow2, &["--format", "qcow2"])] {
        let nbd = Nbd::start(disk, args);
        let uri = format!("--uri={}", nbd.uri());
        let fio = [
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--rw=randrw",
            "--bsrange=512-128k",
            "--iodepth=32",
            "--size=64M",
            "--io_size=64M",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--fsync=50",
            "--trim_percentage=5",
            "--trim_verify_zero=0",
        ];
        prints(dir.path(), "fio", &fio);
    }
}

/// Fathom's own client with every form of replies, on several connections to several workers.
#[test]
fn the_load_generator_finds_what_it_wrote() {
    let dir = disk_dir();
    let raw = make_image(dir.path(), "raw", SIZE);
    for (disk, args) in [
        ("memory:64M", &["--iothreads", "2"][..]),
        (&raw, &["--cache", "none"]),
    ] {
        let nbd = Nbd::start(disk, args);
        for replies in ["simple", "structured", "extended"] {
            let mixed = [
                "--rw",
                "randrw",
                "--rwmixtrim",
                "5",
                "--rwmixzero",
                "5",
                "--fsync",
                "30",
            ];
            for shape in [
                ["--bs", "4k", "--iodepth", "64"],
                ["--bs", "1M", "--iodepth", "8"],
            ] {
                let form = ["--replies", replies, "--queues", "3"];
                nbd.verify(300, &[&mixed[..], &shape, &form].concat());
            }
        }
        stdout_of(&["bench", "--nbd", &nbd.uri(), "--info"]);
    }
}
