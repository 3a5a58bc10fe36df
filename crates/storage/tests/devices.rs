//! Tests on real block devices and a full file system. The tests need root, for loop devices and
//! mounts.

mod common;

use common::model::{Model, SECTOR, plans};
use common::{Ask, Guest};
use fathom_core::{Disk, Io, IoKind, Op, RequestId, Token, Wait};
use fathom_files::gate;
use fathom_files::lasting::{Sameness, compare, lasting_id};
use fathom_storage::engine::DEVICE_DISCARD;
use fathom_storage::{Cache, EngineKind, FileDisk, FileOptions, engine};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::fs::OpenOptions;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::{NamedTempFile, TempDir};

const SECTORS: u64 = 4096;

fn run(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output();
    let output = output.unwrap_or_else(|e| panic!("{program}: {e}"));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {error}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// A loop device, detached when this value is dropped.
struct Loop {
    device: PathBuf,
    image: NamedTempFile,
}

impl Loop {
    fn new(sector_size: u32, args: &[&str]) -> Loop {
        let image = NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a file");
        image.as_file().set_len(SECTORS * SECTOR).expect("sized");
        Loop::of(image, sector_size, args)
    }

    fn of(image: NamedTempFile, sector_size: u32, args: &[&str]) -> Loop {
        let size = sector_size.to_string();
        let path = image.path().to_string_lossy().into_owned();
        let mut all = vec!["--find", "--show", "--sector-size", &size];
        all.extend(args);
        all.push(&path);
        let device = run("losetup", &all).into();
        Loop { device, image }
    }

    fn open(&self, kind: EngineKind, cache: Cache) -> Arc<FileDisk> {
        let options = FileOptions {
            cache,
            engine: kind,
            ..FileOptions::default()
        };
        Arc::new(FileDisk::open(&self.device, options).expect("opened"))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run("losetup", &["--detach", &self.device.to_string_lossy()]);
    }
}

fn property(sector_size: u32, kind: EngineKind, cache: Cache) {
    let config = Config {
        cases: 6,
        failure_persistence: None,
        ..Config::default()
    };
    let requests = prop::collection::vec(plans(SECTORS, 2), 1..100);
    let outcome = TestRunner::new(config).run(&requests, |requests| {
        let device = Loop::new(sector_size, &[]);
        let disk = device.open(kind, cache);
        let info = disk.info();
        prop_assert_eq!((info.size, info.block_size), (SECTORS * SECTOR, 512));
        prop_assert_eq!(info.physical_block_size, sector_size);
        disk.activate().expect("activated");
        let mut guests: Vec<_> = (0..2)
            .map(|_| Guest::new(disk.clone(), move || engine(kind)))
            .collect();
        let mut model = Model::new(SECTORS);
        model.run(&mut guests, &requests);
        guests.into_iter().for_each(Guest::detach);
        disk.deactivate().expect("deactivated");
        drop(disk);
        let content = std::fs::read(&device.device).expect("read");
        model.check(0, &content);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{sector_size}, {kind}, cache={cache}: {error}");
    }
}

#[test]
#[ignore = "needs root: loop devices"]
fn devices_with_large_blocks() {
    property(4096, EngineKind::IoUring, Cache::None);
    property(4096, EngineKind::Native, Cache::None);
    property(4096, EngineKind::Threads, Cache::None);
    property(4096, EngineKind::IoUring, Cache::Writeback);
}

#[test]
#[ignore = "needs root: loop devices"]
fn devices_with_small_blocks() {
    property(512, EngineKind::IoUring, Cache::None);
    property(512, EngineKind::Native, Cache::None);
    property(512, EngineKind::Threads, Cache::Writethrough);
}

#[test]
#[ignore = "needs root: loop devices"]
fn discards_reach_the_device() {
    for kind in EngineKind::ALL {
        let device = Loop::new(512, &[]);
        let mut guest = Guest::new(device.open(kind, Cache::None), move || engine(kind));
        assert_eq!(guest.write(0, &[1; 1 << 20]), 0);
        let allocated = || {
            use std::os::unix::fs::MetadataExt;
            device.image.as_file().sync_all().expect("synced");
            device.image.as_file().metadata().expect("stat").blocks() * 512
        };
        let full = allocated();
        assert_eq!(guest.run(Ask::new(Op::Discard, 0, 1 << 20)).0, 0);
        let left = allocated();
        assert!(left + (1 << 20) <= full, "{kind}: {full} -> {left}");
        guest.detach();
    }
}

#[test]
#[ignore = "needs root: loop devices"]
fn a_read_only_device_is_refused_for_writing() {
    let device = Loop::new(512, &["--read-only"]);
    let options = FileOptions::default();
    let error = FileDisk::open(&device.device, options.clone()).err();
    let line = error.expect("refused").to_string();
    assert!(line.contains("--readonly"), "{line}");
    let options = FileOptions {
        read_only: true,
        ..options
    };
    assert!(FileDisk::open(&device.device, options).is_ok());
}

#[test]
#[ignore = "needs root: loop devices"]
fn device_discards_reach_the_device() {
    for kind in EngineKind::ALL {
        let device = Loop::new(512, &[]);
        std::fs::write(&device.device, vec![1; 1 << 20]).expect("written");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&device.device);
        let file = file.expect("opened");
        let mut engine = engine(kind).expect("an engine");
        let discard = Io {
            kind: IoKind::Allocate {
                mode: DEVICE_DISCARD,
            },
            file: engine.add_file(file.as_fd()).expect("added"),
            offset: 4096,
            len: 8192,
            iov: std::ptr::null(),
            iov_len: 0,
        };
        // SAFETY: the operation uses no memory.
        unsafe { engine.push(discard, Token::request(RequestId(1), 0)) };
        let mut out = Vec::new();
        while out.is_empty() {
            engine.submit(Wait::Forever, &mut out).expect("submitted");
        }
        assert_eq!(out[0].result, 0, "{kind}");
        let content = std::fs::read(&device.device).expect("read");
        assert!(content[4096..12288].iter().all(|b| *b == 0));
        assert!(content[..4096].iter().all(|b| *b == 1));
        assert!(content[12288..1 << 20].iter().all(|b| *b == 1));
    }
}

/// A small file system, unmounted when this value is dropped.
struct Mount {
    folder: TempDir,
    _image: NamedTempFile,
}

impl Mount {
    fn new(make: &str, options: &str) -> Mount {
        let image = NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a file");
        image.as_file().set_len(32 << 20).expect("sized");
        let folder = tempfile::tempdir().expect("a folder");
        let path = image.path().to_string_lossy();
        let target = folder.path().to_string_lossy();
        run(make, &["-q", "-F", &path]);
        run("mount", &["-o", options, &path, &target]);
        Mount {
            folder,
            _image: image,
        }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Another test may be starting a program, which has this process's files open until it
        // executes.
        let folder = self.folder.path().to_string_lossy();
        run("umount", &["--lazy", &folder]);
    }
}

#[test]
#[ignore = "needs root: mounts"]
fn a_full_file_system_fails_writes_and_serves_on() {
    let mount = Mount::new("mkfs.ext4", "loop");
    for kind in EngineKind::ALL {
        for cache in Cache::ALL {
            if kind == EngineKind::Native && cache != Cache::None {
                continue;
            }
            let path = mount.path().join("disk.img");
            let file = std::fs::File::create(&path).expect("created");
            file.set_len(64 << 20).expect("sparse");
            let options = FileOptions {
                cache,
                engine: kind,
                ..FileOptions::default()
            };
            let disk = Arc::new(FileDisk::open(&path, options).expect("opened"));
            let mut guest = Guest::new(disk, move || engine(kind));
            let piece = vec![1; 1 << 20];
            let mut errors = (0..64).map(|i| guest.write(i << 20, &piece));
            let error = errors.find(|error| *error != 0);
            assert_eq!(error, Some(libc::ENOSPC), "{kind}, cache={cache}");
            drop(errors);
            assert_eq!(guest.read(0, 1 << 20), Ok(piece.clone()));
            assert_eq!(guest.write(0, &piece), 0, "allocated already");
            assert_eq!(guest.run(Ask::new(Op::Discard, 0, 8 << 20)).0, 0);
            assert_eq!(guest.write(63 << 20, &piece), 0, "there is room again");
            assert_eq!(guest.flush(), 0);
            guest.detach();
            std::fs::remove_file(&path).expect("removed");
        }
    }
}

/// Writes more to a file than the device has room for. Returns whether flushes then fail through
/// the file itself, and through two further opens of it.
fn are_losses_reported(path: &Path) -> Vec<bool> {
    let file = OpenOptions::new().read(true).write(true).open(path);
    let file = file.expect("opened");
    let more = (0..2).map(|_| gate::open_again(&file, false).expect("open the file again"));
    let all: Vec<_> = more.chain([file.try_clone().expect("the same")]).collect();
    for piece in 0..20 {
        file.write_all_at(&[1; 1 << 20], piece << 20)
            .expect("cached");
    }
    all.iter().map(|file| file.sync_data().is_err()).collect()
}

/// Each worker of a disk flushes through its own open file because of this behaviour.
#[test]
#[ignore = "needs root: loop devices"]
fn kernel_reports_lost_writes_to_each_open_file() {
    let full = tempfile::tempdir().expect("a folder");
    let target = full.path().to_string_lossy();
    run("mount", &["-t", "tmpfs", "-o", "size=8M", "none", &target]);
    let image = NamedTempFile::new_in(full.path()).expect("a file");
    image.as_file().set_len(64 << 20).expect("sparse");
    let device = Loop::of(image, 512, &[]);
    assert_eq!(are_losses_reported(&device.device), [true; 3]);
    let folder = tempfile::tempdir().expect("a folder");
    let (from, to) = (device.device.to_string_lossy(), folder.path());
    run("mkfs.ext4", &["-q", &from]);
    run("mount", &[&from, &to.to_string_lossy()]);
    let path = to.join("file");
    let file = std::fs::File::create(&path).expect("created");
    file.set_len(32 << 20).expect("sparse");
    assert_eq!(are_losses_reported(&path), [true; 3]);
    run("umount", &["--lazy", &to.to_string_lossy()]);
    drop(device);
    run("umount", &["--lazy", &target]);
}

#[test]
#[ignore = "needs root: loop devices"]
fn device_is_known_by_its_file_whatever_its_number() {
    let identity = |device: &Path| {
        let file = std::fs::File::open(device).expect("opened");
        lasting_id(&file)
            .expect("examined")
            .expect("a loop device has one")
    };
    let (one, other) = (Loop::new(512, &[]), Loop::new(512, &[]));
    let first = identity(&one.device);
    assert_eq!(compare(&first, &identity(&one.device)), Sameness::Same);
    let of_other = identity(&other.device);
    assert_eq!(compare(&first, &of_other), Sameness::Different);
    let path = one.image.path().to_string_lossy().into_owned();
    let again = run("losetup", &["--find", "--show", &path]);
    let shifted = run("losetup", &["--find", "--show", "--offset", "4096", &path]);
    let ids = [&again, &shifted].map(|device| identity(Path::new(device)));
    for device in [again, shifted] {
        run("losetup", &["--detach", &device]);
    }
    assert_eq!(compare(&first, &ids[0]), Sameness::Same);
    assert_eq!(compare(&first, &ids[1]), Sameness::Different);
}
