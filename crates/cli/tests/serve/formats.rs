//! Checks qcow2 and QED images: QEMU makes them, a driver of another project uses them, and QEMU
//! reads them afterwards.

use crate::driver::{Request, with_disk};
use crate::exercise::{Random, differ, exercise};
use crate::kinds::{ENGINES, Kind, SIZE, qemu_img, qemu_io, tool};
use crate::support::{Served, as_arg, disk_dir, fathom, refused, stdout_of};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

fn served(dir: &Path, args: &[&str]) -> Served {
    Served::start(&as_arg(&dir.join("i")), args)
}

#[test]
fn what_qemu_wrote_is_read() {
    for kind in Kind::all() {
        eprintln!("{kind:?}");
        let dir = kind.dir();
        let dir = dir.path();
        kind.make(dir);
        let expected = kind.contents(dir, None);
        let before = fs::read(dir.join("i")).unwrap();
        let readonly = [&kind.serve_args()[..], &["--readonly"]].concat();
        let mut server = served(dir, &readonly);
        let read = with_disk(&server.arg("s"), 2, |disk| {
            let refused = disk.all(&[Request::Discard {
                offset: 0,
                len: 512,
            }]);
            assert!(refused[0].is_err());
            disk.contents()
        });
        assert_eq!(differ(&read, &expected), None, "{kind:?}");
        assert_eq!(server.terminate().0, Some(0), "{}", server.log());
        let after = fs::read(dir.join("i")).unwrap();
        assert!(after == before, "{kind:?}: it was written to");
    }
}

#[test]
fn what_is_written_is_what_qemu_reads() {
    for kind in Kind::all() {
        eprintln!("{kind:?}");
        let dir = kind.dir();
        let dir = dir.path();
        kind.make(dir);
        let mut model = kind.contents(dir, None);
        let snapshot = kind.snapshot(dir);
        let base = fs::read(dir.join("base")).unwrap();
        let mut random = Random::new(kind.number);
        let data = as_arg(&dir.join("data.raw"));
        let mut server = served(dir, &kind.serve_writable(&data));
        // Each connection opens the image for use and releases it.
        for _ in 0..2 {
            with_disk(&server.arg("s"), 2, |disk| {
                assert_eq!(disk.size(), SIZE);
                exercise(disk, &mut model, &mut random);
                assert_eq!(differ(&disk.contents(), &model), None, "{kind:?}");
            });
        }
        assert_eq!(server.terminate().0, Some(0), "{}", server.log());
        kind.is_clean(dir);
        assert_eq!(differ(&kind.contents(dir, None), &model), None, "{kind:?}");
        assert!(
            kind.snapshot(dir) == snapshot,
            "{kind:?}: the snapshot has changed"
        );
        assert!(fs::read(dir.join("base")).unwrap() == base);
        if kind.has("data_file_raw") {
            let data = fs::read(dir.join("data.raw")).unwrap();
            assert_eq!(
                differ(&data, &model),
                None,
                "{kind:?}: the data file is not the disk"
            );
        }
    }
}

#[test]
fn images_made_here_are_served() {
    for kind in Kind::all() {
        eprintln!("{kind:?}");
        let dir = kind.dir();
        let dir = dir.path();
        let image = as_arg(&dir.join("i"));
        let mut args = vec!["img", "create", "--quiet", "-f", kind.format];
        if !kind.options.is_empty() {
            args.extend(["-o", kind.options]);
        }
        stdout_of(&[&args[..], &[&image, "12M"]].concat());
        let data = as_arg(&dir.join("data.raw"));
        let mut server = served(dir, &kind.serve_writable(&data));
        let mut model = vec![0; SIZE as usize];
        let mut random = Random::new(100 + kind.number);
        with_disk(&server.arg("s"), 1, |disk| {
            exercise(disk, &mut model, &mut random)
        });
        assert_eq!(server.terminate().0, Some(0), "{}", server.log());
        kind.is_clean(dir);
        assert_eq!(differ(&kind.contents(dir, None), &model), None, "{kind:?}");
    }
}

/// Makes the chain `i` (qcow2) on `second` (QED, in a subdirectory) on `third` (qcow2, in the other
/// directory) on `raw`. Returns the path of `i`.
fn make_chain(dir: &Path, elsewhere: &Path) -> PathBuf {
    qemu_img(elsewhere, &["create", "-q", "-f", "raw", "raw", "4M"]);
    qemu_io(elsewhere, "raw", "raw", &["write -P 1 0 4M"]);
    let create = |dir: &Path, format, image: &str, below: &str, below_is, size| {
        let args = [
            "create", "-q", "-f", format, "-b", below, "-F", below_is, image, size,
        ];
        qemu_img(dir, &args);
    };
    create(elsewhere, "qcow2", "third", "raw", "raw", "6M");
    qemu_io(
        elsewhere,
        "third",
        "qcow2",
        &["write -P 2 1M 64k", "write -P 2 5M 64k"],
    );
    fs::create_dir(dir.join("sub")).unwrap();
    let third = as_arg(&elsewhere.join("third"));
    create(&dir.join("sub"), "qed", "second", &third, "qcow2", "8M");
    qemu_io(&dir.join("sub"), "second", "qed", &["write -P 3 2M 64k"]);
    create(dir, "qcow2", "i", "sub/second", "qed", "12M");
    qemu_io(dir, "i", "qcow2", &["write -P 4 3M 64k"]);
    dir.join("i")
}

#[test]
fn a_chain_is_served_from_where_it_may_be() {
    let (dir, elsewhere) = (disk_dir(), disk_dir());
    let image = make_chain(dir.path(), elsewhere.path());
    let kind = Kind {
        format: "qcow2",
        options: "",
        number: 0,
    };
    let mut model = kind.contents(dir.path(), None);
    let socket = as_arg(&dir.path().join("s"));
    let serve = [
        "serve",
        &as_arg(&image),
        "--format",
        "qcow2",
        "--vhost-user",
        &socket,
    ];
    refused(1, &serve, &["second: ", "third", "--allow-dir"]);
    let allowed = as_arg(elsewhere.path());
    let mut server = served(dir.path(), &["--format", "qcow2", "--allow-dir", &allowed]);
    with_disk(&server.arg("s"), 1, |disk| {
        assert_eq!(differ(&disk.contents(), &model), None);
        // All images that the disk needs are locked, and QEMU respects the locks.
        for (dir, image) in [
            (elsewhere.path(), "raw"),
            (elsewhere.path(), "third"),
            (dir.path(), "i"),
        ] {
            let format = if image == "raw" { "raw" } else { "qcow2" };
            let write = ["-f", format, "-c", "write 0 512", image];
            let output = tool(dir, "qemu-io", &write);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(said.contains("lock"), "{image}: {said}");
        }
        exercise(disk, &mut model, &mut Random::new(5));
        assert_eq!(differ(&disk.contents(), &model), None);
    });
    assert_eq!(server.terminate().0, Some(0), "{}", server.log());
    kind.is_clean(dir.path());
    assert_eq!(differ(&kind.contents(dir.path(), None), &model), None);
    qemu_io(elsewhere.path(), "raw", "raw", &["read -P 1 0 4M"]);
}

#[test]
fn a_part_of_a_raw_image_is_a_disk() {
    const START: u64 = 1 << 20;
    let dir = disk_dir();
    let file = File::create_new(dir.path().join("i")).unwrap();
    file.set_len(START + SIZE + 4096).unwrap();
    file.write_all_at(&vec![0xaa; 1 << 20], 0).unwrap();
    file.write_all_at(&[0xbb; 4096], START + SIZE).unwrap();
    let (start, size) = (START.to_string(), SIZE.to_string());
    for aio in ENGINES {
        let args = ["--offset", &start, "--size", &size, "--aio", aio];
        let mut server = served(dir.path(), &args);
        let mut model = fs::read(dir.path().join("i")).unwrap();
        let model = &mut model[START as usize..(START + SIZE) as usize];
        with_disk(&server.arg("s"), 2, |disk| {
            assert_eq!(disk.size(), SIZE);
            exercise(disk, model, &mut Random::new(7));
            let past = disk.all(&[Request::Write {
                offset: SIZE,
                data: vec![1; 512],
            }]);
            assert!(past[0].is_err());
        });
        refused(1, &["resize", &server.api()], &["--offset"]);
        assert_eq!(server.terminate().0, Some(0), "{}", server.log());
        let after = fs::read(dir.path().join("i")).unwrap();
        assert_eq!(after.len() as u64, START + SIZE + 4096);
        assert_eq!(
            differ(&after[START as usize..][..SIZE as usize], model),
            None,
            "{aio}"
        );
        assert!(after[..START as usize].iter().all(|b| *b == 0xaa), "{aio}");
        assert!(
            after[(START + SIZE) as usize..].iter().all(|b| *b == 0xbb),
            "{aio}"
        );
    }
    // Without a size, the disk ends with the file.
    let server = served(dir.path(), &["--offset", &start]);
    with_disk(&server.arg("s"), 1, |disk| {
        assert_eq!(disk.size(), SIZE + 4096)
    });
}

#[test]
fn the_daemon_knows_what_it_serves() {
    let dir = disk_dir();
    qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", "i", "12M"]);
    let server = served(dir.path(), &["--format", "qcow2", "--metadata-cache", "1M"]);
    assert!(
        server
            .log()
            .contains("(12 MiB, qcow2, io_uring, cache=none)")
    );
    let info: Value = serde_json::from_str(&stdout_of(&["info", &server.api(), "--json"])).unwrap();
    assert_eq!(
        (&info["format"], &info["size"]),
        (&"qcow2".into(), &SIZE.into())
    );
    let resized = stdout_of(&["resize", &server.api()]);
    assert_eq!(
        resized,
        "the disk has 12 MiB (12582912 bytes)
"
    );
    // QEMU can write to the image, which is not locked while no front-end uses the disk.
    qemu_io(dir.path(), "i", "qcow2", &["write -P 7 0 64k"]);
    with_disk(&server.arg("s"), 1, |disk| {
        assert_eq!(differ(&disk.contents()[..65536], &[7; 65536]), None);
        let image = as_arg(&dir.path().join("i"));
        let args = ["img", "resize", "-f", "qcow2", &image, "+1M"];
        refused(1, &args, &["i: ", "in use by fathom"]);
    });
}

#[test]
fn damaged_compressed_data_is_an_error_of_its_cluster() {
    // Offset of the first data cluster in a new image of QEMU.
    const DATA: u64 = 5 << 16;
    for compression in ["zlib", "zstd"] {
        let dir = disk_dir();
        let option = format!("compression_type={compression}");
        qemu_img(
            dir.path(),
            &["create", "-q", "-f", "qcow2", "-o", &option, "i", "12M"],
        );
        let write = ["write -c -P 5 0 64k", "write -c -P 6 64k 64k"];
        qemu_io(dir.path(), "i", "qcow2", &write);
        let file = File::options().write(true).open(dir.path().join("i"));
        let file = file.unwrap();
        assert!(file.metadata().unwrap().len() > DATA);
        file.write_all_at(&[0xff; 16], DATA).unwrap();
        let mut server = served(dir.path(), &["--format", "qcow2"]);
        with_disk(&server.arg("s"), 1, |disk| {
            let read = |offset| Request::Read { offset, len: 65536 };
            let outcomes = disk.all(&[read(0), read(65536), read(0), read(131072)]);
            let [damaged, sound, again, empty] = &outcomes[..] else {
                panic!("four");
            };
            assert!(damaged.is_err() && again.is_err(), "{compression}");
            assert!(sound.as_ref().unwrap().iter().all(|b| *b == 6));
            assert!(empty.as_ref().unwrap().iter().all(|b| *b == 0));
            // The cluster can be overwritten, because a write of all of it does not need the old
            // data.
            let data = vec![7; 65536];
            let outcomes = disk.all(&[Request::Write { offset: 0, data }]);
            assert_eq!(outcomes, [Ok(Vec::new())]);
            assert_eq!(disk.all(&[read(0)]), [Ok(vec![7; 65536])]);
        });
        assert_eq!(server.terminate().0, Some(0), "{}", server.log());
        let log = server.log();
        assert_eq!(log.matches("ERROR").count(), 1, "{log}");
        assert!(
            log.contains("i: the compressed cluster at 0x50000"),
            "{log}"
        );
    }
}

/// Runs `qemu-img check`, and returns its status: 0 for a sound image, 2 for errors, 3 for leaked
/// clusters. The kernel may hold a killed server's locks for a moment longer.
fn check_of_killed(dir: &Path, format: &str) -> (i32, String) {
    crate::support::eventually("a check", || {
        let checked = tool(dir, "qemu-img", &["check", "-f", format, "i"]);
        let said = [checked.stdout, checked.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        let status = checked.status.code().expect("no signal");
        assert!(status != 1 || said.contains("lock"), "{said}");
        (status != 1).then_some((status, said))
    })
}

#[test]
fn a_killed_server_loses_space_at_most() {
    for (format, options) in [
        ("qcow2", "cluster_size=4k"),
        ("qed", ""),
        ("qcow2", "lazy_refcounts=on"),
    ] {
        let dir = disk_dir();
        let mut args = vec!["create", "-q", "-f", format];
        if !options.is_empty() {
            args.extend(["-o", options]);
        }
        qemu_img(dir.path(), &[&args[..], &["i", "1G"]].concat());
        for round in 0..3 {
            let mut server = served(dir.path(), &["--format", format]);
            let mut bench = fathom()
                .args([
                    "bench",
                    "--vhost-user",
                    &server.arg("s"),
                    "--rw",
                    "randwrite",
                ])
                .args(["--bs", "4k", "--iodepth", "32", "--runtime", "10m"])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let control = server.api();
            crate::support::eventually("requests", || {
                let info = stdout_of(&["info", &control, "--json"]);
                let info: Value = serde_json::from_str(&info).unwrap();
                (info["workers"][0]["requests"].as_u64() > Some(500 << round)).then_some(())
            });
            server.child.kill().unwrap();
            server.child.wait().unwrap();
            bench.kill().unwrap();
            bench.wait().unwrap();
            // Lazy refcounts are wrong now, and the image is marked as dirty.
            let (status, said) = check_of_killed(dir.path(), format);
            let lazy = options.contains("lazy");
            assert!(status != 2 || lazy, "{format} {options}: {said}");
        }
        // The next server continues with the image, and leaves no errors in it.
        let mut server = served(dir.path(), &["--format", format]);
        with_disk(&server.arg("s"), 1, |disk| {
            let data = vec![9; 4096];
            let done = disk.all(&[Request::Write { offset: 0, data }, Request::Flush]);
            assert!(done.iter().all(Result::is_ok));
        });
        assert_eq!(server.terminate().0, Some(0), "{}", server.log());
        let (status, said) = check_of_killed(dir.path(), format);
        assert_ne!(status, 2, "{format} {options}: {said}");
        qemu_io(dir.path(), "i", format, &["read -P 9 0 4k"]);
    }
}

/// A killed QEMU leaves a mark in the image. The refcounts of its qcow2 image are missing as well.
#[test]
fn an_image_that_qemu_left_dirty_is_repaired_first() {
    for (format, options, at, bit) in [
        ("qcow2", "lazy_refcounts=on", 79, 1),
        ("qed", "cluster_size=64k", 16, 2),
    ] {
        let dir = disk_dir();
        let create = ["create", "-q", "-f", format, "-o", options, "i", "64M"];
        qemu_img(dir.path(), &create);
        let killed = ["write -P 5 0 1M", "sigraise 9"].map(|command| ["-c", command]);
        let args = [&["-f", format], killed.as_flattened(), &["i"]].concat();
        tool(dir.path(), "qemu-io", &args);
        let is_dirty = || fs::read(dir.path().join("i")).unwrap()[at] & bit != 0;
        assert!(is_dirty(), "{format}");
        let mut server = served(dir.path(), &["--format", format]);
        with_disk(&server.arg("s"), 1, |disk| {
            let (offset, data) = (20 << 20, vec![9; 4096]);
            let done = disk.all(&[Request::Write { offset, data }, Request::Flush]);
            assert!(done.iter().all(Result::is_ok));
        });
        assert_eq!(server.terminate().0, Some(0), "{}", server.log());
        assert!(server.log().contains("not closed cleanly"), "{format}");
        assert!(!is_dirty(), "{format}");
        let (status, said) = check_of_killed(dir.path(), format);
        assert_eq!(status, 0, "{format}: {said}");
        let reads = ["read -P 5 0 1M", "read -P 9 20M 4k"];
        qemu_io(dir.path(), "i", format, &reads);
    }
}

/// The server does not record bitmaps whose names are invalid for it. Bitmaps that are not recorded
/// miss writes, so the server marks them as in use. No bitmap is lost.
#[test]
fn enabled_bitmaps_are_in_use_afterwards() {
    let dir = disk_dir();
    let dir = dir.path();
    qemu_img(dir, &["create", "-q", "-f", "qcow2", "i", "8M"]);
    for name in ["the first", "off", "the second"] {
        qemu_img(dir, &["bitmap", "--add", "i", name]);
        qemu_io(dir, "i", "qcow2", &["write -P 1 0 1M"]);
    }
    qemu_img(dir, &["bitmap", "--disable", "i", "off"]);
    let flags = || {
        let info = qemu_img(dir, &["info", "--output=json", "i"]);
        let info: Value = serde_json::from_str(&info).unwrap();
        info["format-specific"]["data"]["bitmaps"].clone()
    };
    let off = flags()[1].clone();
    for told in [1, 0] {
        let mut server = served(dir, &["--format", "qcow2"]);
        let write = Request::Write {
            offset: 4 << 20,
            data: vec![3; 4096],
        };
        with_disk(&server.arg("s"), 1, |disk| {
            assert!(disk.all(&[write]).iter().all(Result::is_ok));
        });
        assert_eq!(server.terminate().0, Some(0));
        // The server warns once: afterwards the bitmaps are marked as in use.
        assert_eq!(server.log().matches("2 enabled bitmaps").count(), told);
        let in_use = serde_json::json!(["in-use", "auto"]);
        let now = flags();
        assert_eq!((&now[0]["flags"], &now[2]["flags"]), (&in_use, &in_use));
        assert_eq!(now[1], off);
        let checked = tool(dir, "qemu-img", &["check", "i"]);
        assert_eq!(checked.status.code(), Some(0), "{checked:?}");
        stdout_of(&["img", "check", &as_arg(&dir.join("i"))]);
    }
    let listed = stdout_of(&["img", "bitmap", "--list", &as_arg(&dir.join("i"))]);
    assert_eq!(listed.matches("in-use").count(), 2, "{listed}");
    qemu_img(dir, &["bitmap", "--remove", "i", "the first"]);
    stdout_of(&[
        "img",
        "bitmap",
        "--remove",
        &as_arg(&dir.join("i")),
        "the second",
    ]);
    qemu_img(dir, &["check", "i"]);
    assert_eq!(flags(), serde_json::json!([off]));
}

/// A virtual machine of another hypervisor can run at once. A stream then copies the data of its
/// disk.
#[test]
fn images_of_other_programs_are_read_and_left_behind() {
    for (format, options) in [
        ("vmdk", "subformat=twoGbMaxExtentSparse"),
        ("vmdk", "subformat=streamOptimized"),
        ("vhdx", "subformat=dynamic"),
        ("vdi", "static=on"),
        ("vpc", "subformat=dynamic,force_size=on"),
    ] {
        let dir = disk_dir();
        let dir = dir.path();
        let path = |name: &str| as_arg(&dir.join(name));
        qemu_img(dir, &["create", "-q", "-f", "raw", "raw", "12M"]);
        qemu_io(
            dir,
            "raw",
            "raw",
            &["write -P 7 100k 3M", "write -P 8 9M 64k"],
        );
        let convert = ["convert", "-f", "raw", "-O", format, "-o", options];
        qemu_img(dir, &[&convert[..], &["raw", "image"]].concat());
        let mut model = fs::read(dir.join("raw")).unwrap();
        let served = Served::start(&path("image"), &["--format", format, "--readonly"]);
        with_disk(&served.arg("s"), 2, |disk| {
            assert_eq!(differ(&disk.contents(), &model), None, "{format}");
        });
        drop(served);
        refused(
            1,
            &[
                "serve",
                &path("image"),
                "--format",
                format,
                "--nbd",
                "unix:n",
            ],
            &["can only be read"],
        );
        let create = [
            "create", "-q", "-f", "qcow2", "-b", "image", "-F", format, "i",
        ];
        qemu_img(dir, &create);
        let mut served = Served::start(&path("i"), &["--format", "qcow2"]);
        let mut random = Random::new(31);
        with_disk(&served.arg("s"), 2, |disk| {
            exercise(disk, &mut model, &mut random);
            stdout_of(&["stream", "start", &served.api(), "--wait", "--quiet"]);
            fs::remove_file(dir.join("image")).unwrap();
            exercise(disk, &mut model, &mut random);
            assert_eq!(differ(&disk.contents(), &model), None, "{format}");
        });
        assert_eq!(served.terminate().0, Some(0), "{}", served.log());
        let (flat, i) = (path("flat"), path("i"));
        qemu_img(dir, &["convert", "-f", "qcow2", "-O", "raw", &i, &flat]);
        assert_eq!(differ(&fs::read(flat).unwrap(), &model), None, "{format}");
    }
}
