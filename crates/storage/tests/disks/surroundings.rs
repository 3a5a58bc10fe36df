//! Disks on unusual files: missing, invalid, truncated, full, or in memory.

use crate::common::faulty::{Faults, Faulty, Injected};
use crate::common::model::{Model, SECTOR, plans};
use crate::common::{Ask, Guest};
use fathom_core::{Disk, DiskError, Engine, Op, Resize};
use fathom_storage::{Cache, EngineKind, FileDisk, FileOptions, MemoryDisk, NullDisk, engine};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use tempfile::NamedTempFile;

pub fn image(len: u64) -> NamedTempFile {
    let image = NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a file");
    image.as_file().set_len(len).expect("sized");
    image
}

pub fn with(cache: Cache) -> FileOptions {
    FileOptions {
        cache,
        ..FileOptions::default()
    }
}

pub fn open(path: &Path, options: FileOptions) -> Arc<FileDisk> {
    Arc::new(FileDisk::open(path, options).expect("opened"))
}

fn refused(path: &Path, options: FileOptions) -> String {
    let error = FileDisk::open(path, options).err().expect("refused");
    let line = error.to_string();
    assert!(line.starts_with(&*path.to_string_lossy()), "{line}");
    assert!(!line.contains('\n'), "{line}");
    line
}

pub fn uring() -> io::Result<Box<dyn Engine>> {
    engine(EngineKind::IoUring)
}

#[test]
fn what_is_no_disk_is_refused_with_one_clear_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let missing = folder.path().join("missing.img");
    assert!(refused(&missing, with(Cache::None)).contains("no such file"));
    assert!(refused(folder.path(), with(Cache::None)).contains("a directory"));
    let line = refused(Path::new("/dev/null"), with(Cache::None));
    assert!(line.contains("a character device"));
    let fifo = folder.path().join("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    assert!(made.expect("mkfifo runs").success());
    assert!(refused(&fifo, with(Cache::None)).contains("not a file"));
    let empty = image(0);
    assert!(refused(empty.path(), with(Cache::Writeback)).contains(": 0 bytes long"));
    let small = image(511);
    assert!(refused(small.path(), with(Cache::None)).contains(": 511 bytes long"));
    let native = FileOptions {
        engine: EngineKind::Native,
        ..with(Cache::Writeback)
    };
    assert!(refused(image(512).path(), native).contains("--cache none"));
}

#[test]
fn a_file_that_ends_within_a_sector_is_read_only() {
    let image = image(10 * 512);
    image
        .as_file()
        .write_all_at(&[7; 511], 5120)
        .expect("written");
    for cache in Cache::ALL {
        assert!(refused(image.path(), with(cache)).contains("the last sector has 511"));
        let options = FileOptions {
            read_only: true,
            ..with(cache)
        };
        let disk = open(image.path(), options);
        let info = disk.info();
        assert_eq!((info.size, info.block_size), (5632, 512));
        let mut guest = Guest::new(disk, uring);
        let mut last = vec![7; 511];
        last.push(0);
        assert_eq!(guest.read(10 * 512, 512), Ok(last));
        assert_eq!(guest.read(11 * 512, 512), Err(libc::EIO));
        guest.detach();
    }
    assert_eq!(image.as_file().metadata().expect("stat").len(), 5631);
}

#[test]
fn the_disk_is_as_large_as_its_file() {
    let image = image(10 * 512);
    for cache in Cache::ALL {
        let disk = open(image.path(), with(cache));
        let info = disk.info();
        assert_eq!((info.size, info.block_size), (5120, 512));
        assert_eq!(info.write_cache, cache != Cache::Writethrough);
        let mut guest = Guest::new(disk, uring);
        assert_eq!(guest.read(9 * 512, 512), Ok(vec![0; 512]));
        assert_eq!(guest.read(10 * 512, 512), Err(libc::EIO));
        assert_eq!(guest.write(9 * 512, &[7; 1024]), libc::EIO);
        guest.detach();
    }
    assert_eq!(image.as_file().metadata().expect("stat").len(), 5120);
}

#[test]
fn reading_past_a_truncated_end_fails_and_the_rest_is_served() {
    for cache in Cache::ALL {
        let image = image(1 << 20);
        let mut guest = Guest::new(open(image.path(), with(cache)), uring);
        assert_eq!(guest.write(0, &[1; 4096]), 0);
        image.as_file().set_len(10_000).expect("truncated");
        assert_eq!(guest.read(1 << 19, 4096), Err(libc::EIO));
        assert_eq!(guest.read(8192, 4096), Err(libc::EIO));
        assert_eq!(guest.read(0, 4096), Ok(vec![1; 4096]));
        guest.detach();
    }
}

#[test]
fn a_removed_file_is_served_on() {
    let image = image(1 << 20);
    let mut guest = Guest::new(open(image.path(), with(Cache::None)), uring);
    assert_eq!(guest.write(4096, &[1; 4096]), 0);
    image.close().expect("removed");
    assert_eq!(guest.read(4096, 4096), Ok(vec![1; 4096]));
    assert_eq!(guest.flush(), 0);
    guest.detach();
}

#[test]
fn a_read_only_disk_refuses_changes_and_flushes() {
    let image = image(1 << 20);
    let options = FileOptions {
        read_only: true,
        ..with(Cache::None)
    };
    let disk = open(image.path(), options);
    let info = disk.info();
    assert!(info.read_only && info.discard.is_none() && info.write_zeroes.is_none());
    let mut guest = Guest::new(disk, uring);
    assert_eq!(guest.read(0, 512), Ok(vec![0; 512]));
    assert_eq!(guest.write(0, &[1; 512]), libc::EROFS);
    assert_eq!(guest.run(Ask::new(Op::Discard, 0, 512)).0, libc::EROFS);
    assert_eq!(guest.run(Ask::new(Op::WriteZeroes, 0, 512)).0, libc::EROFS);
    assert_eq!(guest.flush(), 0);
    guest.detach();
}

fn resize(disk: &dyn Disk) -> Result<u64, DiskError> {
    disk.resize(&Resize {
        size: None,
        shrink: false,
        settle: &|| unreachable!("the file has the size already"),
    })
}

#[test]
fn a_resized_file_has_its_new_size() {
    let image = image(1 << 20);
    let disk = open(image.path(), with(Cache::None));
    let mut guest = Guest::new(disk.clone(), uring);
    image.as_file().set_len(2 << 20).expect("grown");
    assert_eq!(guest.read(1 << 20, 512), Err(libc::EIO));
    assert_eq!(resize(&*disk).expect("read"), 2 << 20);
    assert_eq!(guest.read(1 << 20, 512), Ok(vec![0; 512]));
    image.as_file().set_len(512).expect("shrunk");
    assert_eq!(resize(&*disk).expect("read"), 512);
    assert_eq!(guest.write(512, &[1; 512]), libc::EIO);
    assert_eq!(image.as_file().metadata().expect("stat").len(), 512);
    guest.detach();
}

#[test]
fn only_what_is_not_aligned_is_bounced() {
    let image = image(1 << 20);
    let disk = open(image.path(), with(Cache::None));
    let mut guest = Guest::new(disk.clone(), uring);
    for offset in [0, 512, 4096 + 1536] {
        assert_eq!(guest.write(offset, &[1; 1024]), 0);
        assert_eq!(guest.read(offset, 1024), Ok(vec![1; 1024]));
    }
    assert_eq!(disk.bounced(), 0);
    let mut odd = Ask::read(0, 1024);
    odd.segments = vec![(0, 100), (100, 924)];
    let (error, odd) = guest.run(odd);
    assert_eq!((error, disk.bounced()), (0, 1));
    assert_eq!(odd.data(), [1; 1024]);
    guest.detach();
}

#[test]
fn discards_and_zeroes_free_what_they_may() {
    for cache in Cache::ALL {
        let image = image(1 << 20);
        let disk = open(image.path(), with(cache));
        let mut guest = Guest::new(disk.clone(), uring);
        let allocated = || {
            use std::os::unix::fs::MetadataExt;
            image.as_file().sync_all().expect("synced");
            image.as_file().metadata().expect("stat").blocks() * 512
        };
        assert_eq!(guest.write(0, &[1; 1 << 20]), 0);
        let full = allocated();
        assert!(full >= 1 << 20);
        let mut zeroes = Ask::new(Op::WriteZeroes, 0, 1 << 20);
        zeroes.unmap = false;
        assert_eq!(guest.run(zeroes).0, 0);
        assert_eq!(allocated(), full);
        assert_eq!(guest.read(1 << 19, 4096), Ok(vec![0; 4096]));
        assert_eq!(guest.run(Ask::new(Op::Discard, 0, 1 << 19)).0, 0);
        assert!(allocated() <= full - (1 << 19));
        assert_eq!(guest.run(Ask::new(Op::WriteZeroes, 0, 1 << 20)).0, 0);
        assert!(allocated() <= full - (1 << 20));
        guest.detach();
    }
}

#[test]
fn without_discard_nothing_is_freed() {
    let image = image(1 << 20);
    let options = FileOptions {
        discard: false,
        ..with(Cache::None)
    };
    let disk = open(image.path(), options);
    assert_eq!(disk.info().discard, None);
    let mut guest = Guest::new(disk, uring);
    assert_eq!(guest.write(0, &[1; 1 << 20]), 0);
    assert_eq!(guest.run(Ask::new(Op::Discard, 0, 512)).0, libc::EOPNOTSUPP);
    assert_eq!(guest.run(Ask::new(Op::WriteZeroes, 0, 1 << 20)).0, 0);
    use std::os::unix::fs::MetadataExt;
    assert!(image.as_file().metadata().expect("stat").blocks() * 512 >= 1 << 20);
    guest.detach();
}

/// Makes an engine in which `failed` percent of the operations fail.
fn failing(failed: u64) -> impl FnOnce() -> io::Result<Box<dyn Engine>> + Send + 'static {
    let faults = Faults {
        short: 0,
        interrupted: 0,
        failed,
        delayed: 0,
        unit: 512,
    };
    move || {
        let injected = Arc::new(Injected::default());
        Ok(Box::new(Faulty::new(uring()?, faults, 1, injected)))
    }
}

#[test]
fn a_failed_flush_is_remembered_where_the_page_cache_forgets() {
    for cache in Cache::ALL {
        let image = image(1 << 20);
        let disk = open(image.path(), with(cache));
        let (mut bad, mut good) = (
            Guest::new(disk.clone(), failing(100)),
            Guest::new(disk.clone(), failing(0)),
        );
        assert_eq!(good.flush(), 0);
        assert_ne!(bad.flush(), 0);
        assert_eq!(good.write(0, &[1; 512]), 0, "it goes on serving");
        let forgotten = cache == Cache::None;
        assert_eq!(good.flush() == 0, forgotten);
        good.detach();
        bad.detach();
        assert_eq!(disk.deactivate().is_ok(), forgotten);
        drop(disk);
        let mut fresh = Guest::new(open(image.path(), with(cache)), uring);
        assert_eq!(fresh.flush(), 0, "reopened");
        fresh.detach();
    }
}

/// Runs random requests on the disk and compares their results and its final content with the
/// model.
fn property(name: &str, sectors: u64, mut disk: impl FnMut() -> Arc<dyn Disk>, kind: EngineKind) {
    let config = Config {
        cases: 24,
        failure_persistence: None,
        ..Config::default()
    };
    let requests = prop::collection::vec(plans(sectors, 2), 1..100);
    let disk = std::cell::RefCell::new(&mut disk);
    let outcome = TestRunner::new(config).run(&requests, |requests| {
        let disk = (disk.borrow_mut())();
        let mut guests: Vec<_> = (0..2)
            .map(|_| Guest::new(disk.clone(), move || engine(kind)))
            .collect();
        let mut model = Model::new(sectors);
        model.run(&mut guests, &requests);
        for first in (0..sectors).step_by(1024) {
            let len = (sectors - first).min(1024) * SECTOR;
            let content = guests[0].read(first * SECTOR, len).expect("read");
            model.check(first as usize, &content);
        }
        guests.into_iter().for_each(Guest::detach);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{name}, {kind}: {error}");
    }
}

#[test]
fn memory_keeps_what_is_written() {
    let disk = || Arc::new(MemoryDisk::new(4099 * SECTOR).expect("memory")) as Arc<dyn Disk>;
    property("memory", 4099, disk, EngineKind::IoUring);
}

#[test]
fn a_file_in_memory_keeps_what_is_written() {
    for kind in EngineKind::ALL {
        for cache in Cache::ALL {
            let image = NamedTempFile::new_in("/dev/shm").expect("a file in tmpfs");
            let disk = || {
                image.as_file().set_len(0).expect("emptied");
                image.as_file().set_len(4099 * SECTOR).expect("sized");
                let options = FileOptions {
                    engine: kind,
                    ..with(cache)
                };
                open(image.path(), options) as Arc<dyn Disk>
            };
            property(&format!("tmpfs, cache={cache}"), 4099, disk, kind);
        }
    }
}

#[test]
fn nothing_is_kept_by_nothing() {
    let disk: Arc<dyn Disk> = Arc::new(NullDisk::new(1 << 40));
    assert_eq!(disk.info().size, 1 << 40);
    let mut guest = Guest::new(disk, uring);
    assert_eq!(guest.write(1 << 39, &[1; 4096]), 0);
    assert_eq!(guest.read(1 << 39, 4096), Ok(vec![0xa5; 4096]));
    for op in [Op::Flush, Op::Discard, Op::WriteZeroes] {
        assert_eq!(guest.run(Ask::new(op, 0, 4096)).0, 0);
    }
    guest.detach();
}

#[test]
fn memory_is_bounded() {
    assert!(MemoryDisk::new(511).is_err());
    let too_much = MemoryDisk::new(1 << 50).err().expect("refused");
    assert!(too_much.to_string().contains("cannot map enough memory"));
    let mut guest = Guest::new(Arc::new(MemoryDisk::new(8192).expect("memory")), uring);
    assert_eq!(guest.read(8192, 512), Err(libc::EIO));
    assert_eq!(guest.write(u64::MAX - 511, &[1; 512]), libc::EIO);
    guest.detach();
}
