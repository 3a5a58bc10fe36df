//! Tests of the load on a file.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Duration;

use fathom_load::{Engine, File, Load, Op, Options, Rw, Target};

fn run(file: File, load: Load) -> Result<fathom_load::Report, fathom_load::Error> {
    let target = Target::File(file);
    fathom_load::run(&Options { target, load }, &mut |_| {})
}

fn mixed(depth: u16) -> Load {
    Load {
        rw: Rw::RandRw,
        rwmixtrim: 3,
        rwmixzero: 3,
        fsync: 20,
        iodepth: depth,
        queues: 2,
        runtime: None,
        ramp: Duration::ZERO,
        number_ios: Some(2000),
        verify: true,
        ..Load::default()
    }
}

fn image() -> tempfile::NamedTempFile {
    // Do not use /tmp: if it is a tmpfs, it does not support zeroing a range.
    let image = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    image.as_file().set_len(16 << 20).unwrap();
    image
}

#[test]
fn both_engines_do_every_operation_and_verify() {
    for (engine, fixed, depth) in [
        (Engine::IoUring, false, 16),
        (Engine::IoUring, true, 16),
        (Engine::Psync, false, 1),
    ] {
        let image = image();
        let file = File {
            engine,
            overwrite: true,
            buffered: true,
            fixedbufs: fixed,
            registerfiles: fixed,
            ..File::new(image.path())
        };
        let report = run(file, mixed(depth)).unwrap();
        let total: u64 = report.operations.iter().map(|d| d.ios).sum();
        assert_eq!(total, 4000, "{engine:?}");
        for op in Op::ALL {
            assert!(report.operation(op).is_some(), "{engine:?} {op:?}");
        }
        assert!(report.verify.unwrap().checked > 1000);
    }
}

/// Linux AIO supports only these operations, and needs a file system with direct I/O. The file
/// system of /tmp may not support it.
#[test]
fn linux_aio_reads_writes_flushes_and_verifies() {
    let image = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    image.as_file().set_len(16 << 20).unwrap();
    let file = File {
        engine: Engine::Aio,
        ..File::new(image.path())
    };
    let load = Load {
        rwmixtrim: 0,
        rwmixzero: 0,
        ..mixed(16)
    };
    let report = run(file.clone(), load).unwrap();
    assert_eq!(report.engine, "libaio");
    for op in [Op::Read, Op::Write, Op::Flush] {
        assert!(report.operation(op).is_some(), "{op:?}");
    }
    assert!(report.verify.unwrap().checked > 1000);
    let refused = |file, load| run(file, load).unwrap_err().to_string();
    assert!(refused(file.clone(), mixed(16)).contains("no discards and no zeroes"));
    let buffered = File {
        buffered: true,
        ..file
    };
    assert!(refused(buffered, Load::default()).contains("waits in each call"));
}

#[test]
fn a_file_that_is_cut_short_is_one_clear_error() {
    let image = image();
    let path = image.path().to_owned();
    let load = Load {
        rw: Rw::RandRead,
        runtime: Some(Duration::from_secs(60)),
        ..Load::default()
    };
    let file = File {
        buffered: true,
        ..File::new(&path)
    };
    let (sender, reads) = channel();
    let reader = std::thread::spawn(move || {
        let target = Target::File(file);
        fathom_load::run(&Options { target, load }, &mut |progress| {
            if progress.completed > 0 {
                let _ = sender.send(());
            }
        })
    });
    reads.recv().expect("it reads");
    image.as_file().set_len(4096).unwrap();
    let error = reader.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("only 0 bytes were done"), "{error}");
    let missing = run(File::new("/nonexistent"), mixed(1)).unwrap_err();
    let text = missing.to_string();
    assert!(text.starts_with("cannot open /nonexistent: "), "{text}");
}

/// Runs some writes on a file, and returns the error message, if any.
fn write_to(path: &Path, change: impl FnOnce(&mut File, &mut Load)) -> Result<(), String> {
    let mut file = File {
        buffered: true,
        ..File::new(path)
    };
    let mut load = Load {
        rw: Rw::RandWrite,
        runtime: None,
        ramp: Duration::ZERO,
        number_ios: Some(10),
        ..Load::default()
    };
    change(&mut file, &mut load);
    run(file, load).map(drop).map_err(|error| error.to_string())
}

fn reads(_: &mut File, load: &mut Load) {
    load.rw = Rw::RandRead;
}

#[test]
fn data_is_not_overwritten_unless_that_is_wanted() {
    let image = image();
    let at = 8 << 20;
    image.as_file().write_all_at(b"precious", at).unwrap();
    let before = |file: &mut File, load: &mut Load| {
        load.size = Some(at);
        file.overwrite = false;
    };
    let refused = write_to(image.path(), |_, _| {}).unwrap_err();
    assert!(refused.contains("--overwrite"), "{refused}");
    assert!(refused.contains(&at.to_string()), "{refused}");
    let mut found = [0; 8];
    image.as_file().read_exact_at(&mut found, at).unwrap();
    assert_eq!(&found, b"precious");
    // The refused load wrote nothing at all. A range without data may be written.
    write_to(image.path(), before).unwrap();
    write_to(image.path(), before).expect_err("what the load before has written");
    write_to(image.path(), reads).unwrap();
    write_to(image.path(), |file, _| file.overwrite = true).unwrap();
}

#[test]
fn an_image_is_no_disk() {
    let dir = tempfile::tempdir().unwrap();
    for format in ["qcow2", "qed", "vmdk"] {
        let path = dir.path().join(format);
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", format])
            .args([path.as_os_str(), "64M".as_ref()])
            .status();
        assert!(made.expect("qemu-img is installed").success());
        let wanted = std::fs::read(&path).unwrap();
        for rw in [Rw::RandRead, Rw::RandWrite] {
            let load = |file: &mut File, load: &mut Load| (file.overwrite, load.rw) = (true, rw);
            let refused = write_to(&path, load).unwrap_err();
            assert!(
                refused.contains(&format!("looks like {format}")),
                "{refused}"
            );
        }
        assert!(std::fs::read(&path).unwrap() == wanted, "{format}");
    }
    let read_raw = |file: &mut File, load: &mut Load| {
        (file.raw, load.bs) = (true, 512);
        load.rw = Rw::RandRead;
    };
    write_to(&dir.path().join("qcow2"), read_raw).unwrap();
}

#[test]
fn what_qemu_has_is_left_alone() {
    let image = image();
    let mut qemu = Command::new("qemu-io")
        .args(["-f", "raw"])
        .arg(image.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("qemu-io is installed");
    let mut commands = qemu.stdin.take().unwrap();
    commands.write_all(b"length\n").unwrap();
    let mut answer = BufReader::new(qemu.stdout.as_mut().unwrap()).lines();
    assert!(
        answer.any(|line| line.unwrap().contains("16 MiB")),
        "it has opened it"
    );
    let overwrite = |file: &mut File, _: &mut Load| file.overwrite = true;
    let refused = write_to(image.path(), overwrite).unwrap_err();
    let holder = format!("in use by qemu-io (process {})", qemu.id());
    assert!(refused.contains(&holder), "{refused}");
    // A load that only reads does not need exclusive access.
    write_to(image.path(), reads).unwrap();
    drop(commands);
    qemu.wait().unwrap();
    write_to(image.path(), overwrite).unwrap();
}

/// QEMU cannot open a file for writing while a load writes to it.
#[test]
fn a_file_is_locked_while_it_is_written() {
    let image = image();
    let path = image.path().to_owned();
    let (sender, progress) = channel();
    let load = Load {
        rw: Rw::RandWrite,
        runtime: Some(Duration::from_secs(600)),
        ramp: Duration::ZERO,
        ..Load::default()
    };
    let stop = load.stop.clone();
    let target = Target::File(File {
        buffered: true,
        ..File::new(&path)
    });
    let options = Options { target, load };
    let writer = std::thread::spawn(move || {
        fathom_load::run(&options, &mut |p| {
            let _ = sender.send(p.completed);
        })
    });
    progress
        .iter()
        .find(|completed| *completed > 0)
        .expect("it writes");
    let qemu = Command::new("qemu-io")
        .args(["-f", "raw", "-c", "write 0 4k"])
        .arg(&path)
        .output()
        .expect("qemu-io is installed");
    assert!(!qemu.status.success());
    let error = String::from_utf8_lossy(&qemu.stderr).into_owned();
    assert!(error.contains("lock"), "{error}");
    // A load that is stopped early reports its measurements until then.
    stop.store(true, Ordering::Relaxed);
    let report = writer.join().unwrap().unwrap();
    assert!(report.runtime < 600.0);
    assert!(report.operation(Op::Write).is_some());
}

/// Needs root, like the tests of full file systems.
#[test]
fn a_mounted_device_is_left_alone() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (file, mount) = (dir.path().join("file"), dir.path().join("mnt"));
    std::fs::File::create(&file)
        .unwrap()
        .set_len(64 << 20)
        .unwrap();
    std::fs::create_dir(&mount).unwrap();
    let call = |program: &str, args: &[&std::ffi::OsStr]| {
        let output = Command::new(program).args(args).output().expect(program);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {args:?}: {errors}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    call("mkfs.ext4", &["-q".as_ref(), file.as_ref()]);
    let device = call(
        "losetup",
        &["-f".as_ref(), "--show".as_ref(), file.as_ref()],
    );
    let device: &Path = device.as_ref();
    call("mount", &[device.as_ref(), mount.as_ref()]);
    let overwrite = |file: &mut File, _: &mut Load| file.overwrite = true;
    let mounted = write_to(device, overwrite);
    let read = write_to(device, reads);
    call("umount", &[mount.as_ref()]);
    let unasked = write_to(device, |_, _| {});
    let asked = write_to(device, overwrite);
    call("losetup", &["-d".as_ref(), device.as_ref()]);
    let refused = mounted.unwrap_err();
    assert!(refused.contains("is mounted"), "{refused}");
    read.unwrap();
    let refused = unasked.unwrap_err();
    assert!(refused.contains("--overwrite"), "{refused}");
    asked.unwrap();
}
