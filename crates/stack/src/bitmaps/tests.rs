use super::header::Header;
use super::*;
use crate::tap::Tap;
use fathom_core::testing::{PollEngine, SIZE as DISK, TestDisk};
use fathom_core::{Channel, Cx, Disk, Op};
use std::fs;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use tempfile::TempDir;

const BLOCK: u64 = 64 << 10;
const SIZE: u64 = 100 * BLOCK + 512;

/// Marks nothing, because no request is in flight.
fn idle() -> Result<(), String> {
    Ok(())
}

/// An image with its bitmaps, as one process uses them.
struct Host {
    dir: TempDir,
    boot: &'static str,
}

impl Host {
    fn new() -> Host {
        let host = Host {
            dir: tempfile::tempdir().unwrap(),
            boot: "one",
        };
        fs::write(host.image(), b"disk").unwrap();
        host
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("disk.raw")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join("bitmaps").join(name)
    }

    fn idle(&self) -> Bitmaps {
        let place = Place {
            dir: self.dir.path().join("bitmaps"),
            image: Some(self.image()),
            data: None,
            of: None,
            boot: self.boot.into(),
        };
        Bitmaps::new(Ok(place), None)
    }

    fn used(&self) -> Bitmaps {
        let bitmaps = self.idle();
        host_open(self, &bitmaps);
        bitmaps
    }

    fn left(&self) -> Option<Left> {
        Some(Left::of(&fs::metadata(self.image()).unwrap(), 0))
    }

    /// Creates a host with one bitmap.
    fn with_one() -> (Host, Bitmaps) {
        let host = Host::new();
        let bitmaps = host.used();
        bitmaps.add("a", SIZE, None, &mut idle).unwrap();
        (host, bitmaps)
    }
}

fn host_close(host: &Host, bitmaps: &Bitmaps) {
    bitmaps.close(|| Ok(()), || host.left()).unwrap();
}

fn host_open(host: &Host, bitmaps: &Bitmaps) {
    bitmaps.open(SIZE, host.left()).unwrap();
}

fn mark(bitmaps: &Bitmaps, offset: u64, len: u64) {
    bitmaps
        .marked()
        .1
        .iter()
        .for_each(|bitmap| bitmap.mark(offset, len));
}

/// Returns the dirty bytes and the problem of the only bitmap.
fn only(bitmaps: &Bitmaps) -> (u64, Option<String>) {
    let all = bitmaps.list(SIZE).unwrap();
    let [only] = &all[..] else {
        panic!("{all:?}");
    };
    (only.dirty, only.problem.clone())
}

fn parts(dirty: &Dirty, size: u64) -> Vec<(u64, bool)> {
    let (mut at, mut parts) = (0, Vec::new());
    while at < size {
        let (is, end) = dirty.part(at..size);
        parts.push((end, is));
        at = end;
    }
    parts
}

#[test]
fn what_was_marked_is_told_by_the_block() {
    let (_host, bitmaps) = Host::with_one();
    mark(&bitmaps, 2 * BLOCK - 1, 2);
    mark(&bitmaps, 100 * BLOCK, 512);
    mark(&bitmaps, 7, 0);
    let told = parts(&bitmaps.dirty("a"), SIZE);
    let expected = [
        (BLOCK, false),
        (3 * BLOCK, true),
        (100 * BLOCK, false),
        (SIZE, true),
    ];
    assert_eq!(told, expected);
    // Space by which the disk has grown was not recorded before.
    let grown = parts(&bitmaps.dirty("a"), SIZE + BLOCK);
    assert_eq!(grown.last(), Some(&(SIZE + BLOCK, true)));
    assert_eq!(parts(&bitmaps.dirty("none"), SIZE), [(SIZE, true)]);
}

#[test]
fn nothing_is_lost_by_a_process_that_is_killed() {
    let (host, bitmaps) = Host::with_one();
    mark(&bitmaps, 5 * BLOCK, 1);
    // The process loses its memory and its lock, without any cleanup.
    drop(bitmaps);
    assert_eq!(only(&host.used()), (BLOCK, None));
    assert_eq!(only(&host.idle()), (BLOCK, None));
}

#[test]
fn bitmap_is_all_dirty_after_a_crash_until_a_backup() {
    let (mut host, bitmaps) = Host::with_one();
    drop(bitmaps);
    host.boot = "two";
    for _ in 0..2 {
        let (dirty, problem) = only(&host.used());
        assert_eq!(
            (dirty, problem.unwrap().contains("went down")),
            (SIZE, true)
        );
    }
    let bitmaps = host.used();
    bitmaps.begin_successor("a").unwrap();
    assert_eq!(parts(&bitmaps.dirty("a"), SIZE), [(SIZE, true)]);
    mark(&bitmaps, 0, 1);
    bitmaps.advance("a", None, SIZE).unwrap();
    assert_eq!(only(&bitmaps), (BLOCK, None));
    // A crash while no process uses the bitmap has no effect.
    host_close(&host, &bitmaps);
    host.boot = "three";
    assert_eq!(only(&host.used()), (BLOCK, None));
}

#[test]
fn whoever_changes_the_image_otherwise_is_noticed() {
    let (host, bitmaps) = Host::with_one();
    // The disk's users change the image while the bitmap is in use.
    fs::write(host.image(), b"more").unwrap();
    host_close(&host, &bitmaps);
    assert_eq!(only(&host.idle()), (0, None));
    let file = File::options().write(true).open(host.image()).unwrap();
    // File system timestamps are coarse.
    std::thread::sleep(std::time::Duration::from_millis(20));
    file.write_all_at(b"x", 0).unwrap();
    let (dirty, problem) = only(&host.used());
    assert_eq!(
        (dirty, problem.unwrap().contains("another program")),
        (SIZE, true)
    );
}

#[test]
fn a_file_that_is_cut_off_is_noticed() {
    let (host, bitmaps) = Host::with_one();
    let file = File::options().write(true).open(host.file("a")).unwrap();
    file.set_len(4096).unwrap();
    mark(&bitmaps, 0, 1);
    assert_eq!(only(&bitmaps).0, SIZE);
    assert_eq!(parts(&bitmaps.dirty("a"), SIZE), [(SIZE, true)]);
    host_close(&host, &bitmaps);
    let (dirty, problem) = only(&host.used());
    assert_eq!(
        (dirty, problem.unwrap().contains("truncated")),
        (SIZE, true)
    );
    // The truncation is detected even if the file has its full length again.
    let (host, bitmaps) = Host::with_one();
    let file = File::options().write(true).open(host.file("a")).unwrap();
    let len = file.metadata().unwrap().len();
    file.set_len(4096).unwrap();
    mark(&bitmaps, 0, 1);
    file.set_len(len).unwrap();
    drop(bitmaps);
    assert_eq!(only(&host.used()).0, SIZE);
}

#[test]
fn a_successor_counts_only_when_the_bitmap_advances() {
    let (host, bitmaps) = Host::with_one();
    mark(&bitmaps, 0, 1);
    assert!(
        bitmaps
            .advance("a", None, SIZE)
            .unwrap_err()
            .contains("no backup with the bitmap")
    );
    bitmaps.begin_successor("a").unwrap();
    mark(&bitmaps, BLOCK, 1);
    assert!(bitmaps.list(SIZE).unwrap()[0].successor.is_some());
    bitmaps.drop_successor("a");
    assert_eq!(only(&bitmaps), (2 * BLOCK, None));
    // A process dies while the successor is in use.
    bitmaps.begin_successor("a").unwrap();
    mark(&bitmaps, 2 * BLOCK, 1);
    drop(bitmaps);
    let bitmaps = host.used();
    assert_eq!(only(&bitmaps), (3 * BLOCK, None));
    assert!(bitmaps.advance("a", None, SIZE).is_err() && !host.file(".a.next").exists());
    // The successor stays valid while no process uses the disk.
    bitmaps.begin_successor("a").unwrap();
    mark(&bitmaps, 4 * BLOCK, 1);
    host_close(&host, &bitmaps);
    bitmaps.list(SIZE).unwrap();
    host_open(&host, &bitmaps);
    mark(&bitmaps, 6 * BLOCK, 1);
    host_close(&host, &bitmaps);
    bitmaps.advance("a", None, SIZE).unwrap();
    assert_eq!(only(&bitmaps), (2 * BLOCK, None));
    // The successor is dropped if another process uses the disk.
    host_open(&host, &bitmaps);
    bitmaps.begin_successor("a").unwrap();
    host_close(&host, &bitmaps);
    host_close(&host, &host.used());
    assert!(!host.file(".a.next").exists() && bitmaps.advance("a", None, SIZE).is_err());
    drop(bitmaps);
    let bitmaps = host.used();
    bitmaps.begin_successor("a").unwrap();
    mark(&bitmaps, 9 * BLOCK, 1);
    bitmaps.advance("a", None, SIZE).unwrap();
    mark(&bitmaps, 10 * BLOCK, 1);
    drop(bitmaps);
    let told = parts(&host.used().dirty("a"), SIZE);
    assert_eq!(
        told,
        [(9 * BLOCK, false), (11 * BLOCK, true), (SIZE, false)]
    );
}

#[test]
fn a_bitmap_may_begin_with_a_backup() {
    let host = Host::new();
    let bitmaps = host.used();
    bitmaps.begin_successor("new").unwrap();
    mark(&bitmaps, 0, 1);
    host_close(&host, &bitmaps);
    assert_eq!(bitmaps.list(SIZE).unwrap(), []);
    bitmaps.advance("new", None, SIZE).unwrap();
    assert_eq!(only(&bitmaps), (BLOCK, None));
    assert!(bitmaps.begin_successor("../x").is_err());
    bitmaps.remove("new", SIZE).unwrap();
    assert!(bitmaps.remove("new", SIZE).is_err() && !host.file("").exists());
}

#[test]
fn what_is_none_of_ours_is_left_alone() {
    let (host, bitmaps) = Host::with_one();
    host_close(&host, &bitmaps);
    let precious = host.dir.path().join("precious");
    fs::write(&precious, vec![b'x'; 100_000]).unwrap();
    // Files of others in the directory must not block the disk.
    std::os::unix::fs::symlink(&precious, host.file("b")).unwrap();
    fs::hard_link(&precious, host.file("c")).unwrap();
    fs::copy(&precious, host.file("d")).unwrap();
    fs::create_dir(host.file("e")).unwrap();
    fs::create_dir(host.file(".f.new")).unwrap();
    let user = host.used();
    assert_eq!(only(&user), (0, None));
    assert_eq!(fs::read(&precious).unwrap(), vec![b'x'; 100_000]);
    assert_eq!(fs::read(host.file("d")).unwrap(), vec![b'x'; 100_000]);
    // Two processes cannot use the bitmaps at once.
    let second = host.idle();
    assert!(second.list(SIZE).unwrap_err().contains("another process"));
    user.begin_successor("a").unwrap();
    assert!(second.open(SIZE, host.left()).is_err() && host.file(".a.next").exists());
    host_close(&host, &user);
    assert_eq!(only(&host.used()), (0, None));
}

#[test]
fn a_backup_that_is_not_the_last_one_is_not_advanced_to() {
    let (_host, bitmaps) = Host::with_one();
    mark(&bitmaps, 0, 1);
    let first = bitmaps.begin_successor("a").unwrap();
    mark(&bitmaps, BLOCK, 1);
    let second = bitmaps.begin_successor("a").unwrap();
    assert!(bitmaps.advance("a", Some(first), SIZE).is_err());
    assert_eq!(only(&bitmaps), (2 * BLOCK, None));
    bitmaps.advance("a", Some(second), SIZE).unwrap();
    assert_eq!(only(&bitmaps), (0, None));
}

#[test]
fn what_is_cut_off_and_grows_again_is_dirty() {
    let (_host, bitmaps) = Host::with_one();
    bitmaps.mark_from(99 * BLOCK);
    bitmaps.resized(99 * BLOCK);
    assert_eq!(only(&bitmaps).0, 2 * BLOCK);
    bitmaps.resized(SIZE);
    let told = parts(&bitmaps.dirty("a"), SIZE);
    assert_eq!(told, [(99 * BLOCK, false), (SIZE, true)]);
}

#[test]
fn one_that_cannot_be_used_is_given_up_for_the_disks_users() {
    let (host, bitmaps) = Host::with_one();
    host_close(&host, &bitmaps);
    // The file has a second link, through which another program may use it.
    std::fs::copy(host.file("a"), host.file("b")).unwrap();
    std::fs::hard_link(host.file("b"), host.file(".link")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(host.file("socket")).unwrap();
    assert_eq!(only(&host.used()), (0, None));
    assert!(!host.file("b").exists() && host.file(".link").exists());
    // A file that is not a bitmap is never removed.
    assert!(host.file("socket").exists());
}

#[test]
fn headers_that_lie_are_no_bitmaps() {
    let (host, bitmaps) = Host::with_one();
    host_close(&host, &bitmaps);
    let file = File::options()
        .read(true)
        .write(true)
        .open(host.file("a"))
        .unwrap();
    let good = Header::read(&file).unwrap().unwrap();
    let bad = [
        Header {
            block: 0,
            ..good.clone()
        },
        Header {
            block: 3 << 12,
            ..good.clone()
        },
        Header {
            size: u64::MAX,
            ..good.clone()
        },
        Header {
            format: "fathom bitmap 2".into(),
            ..good.clone()
        },
    ];
    for header in bad {
        header.write(&file).unwrap();
        assert_eq!(host.idle().list(SIZE), Ok(Vec::new()), "{header:?}");
    }
    // The header claims more bits than the file has.
    Header {
        size: 1 << 40,
        ..good
    }
    .write(&file)
    .unwrap();
    assert_eq!(only(&host.used()).0, SIZE);
}

#[test]
fn granularities_are_checked() {
    let (_host, bitmaps) = Host::with_one();
    for bad in [0, 256, 5000, 4 << 30] {
        assert!(
            bitmaps.add("b", SIZE, Some(bad), &mut idle).is_err(),
            "{bad}"
        );
    }
    bitmaps.add("b", SIZE, Some(4096), &mut idle).unwrap();
    mark(&bitmaps, 4095, 2);
    assert_eq!(parts(&bitmaps.dirty("b"), SIZE)[0], (8192, true));
    assert!(bitmaps.add("b", SIZE, None, &mut idle).is_err());
    bitmaps.begin_successor("b").unwrap();
    bitmaps.advance("b", None, SIZE).unwrap();
    let all = bitmaps.list(SIZE).unwrap();
    assert_eq!((all[1].granularity, all[1].dirty), (4096, 0));
}

/// A disk in use with its bitmaps and one worker, which has a write of one block in flight.
struct Writing {
    _host: Host,
    tap: Tap,
    channel: Box<dyn Channel>,
    cx: Cx,
}

const WRITTEN: u64 = 256 << 10;

impl Writing {
    fn new(bitmap: Option<&str>) -> Writing {
        let host = Host::new();
        let disk = TestDisk::new();
        disk.hold();
        let tap = Tap::new(disk, None, None, host.idle());
        tap.activate().unwrap();
        if let Some(name) = bitmap {
            let bitmaps = tap.bitmaps();
            bitmaps.add(name, DISK, Some(BLOCK), &mut idle).unwrap();
        }
        let mut cx = Cx::new(PollEngine::boxed().unwrap());
        cx.slab.grow(1);
        let mut channel = tap.channel(&mut cx).unwrap();
        let id = cx.slab.take().unwrap();
        let request = &mut cx.slab[id];
        request.op = Op::Write;
        (request.offset, request.at, request.len) = (WRITTEN, WRITTEN, 512);
        channel.submit(&mut cx, id);
        Writing {
            _host: host,
            tap,
            channel,
            cx,
        }
    }

    /// Returns the number of dirty bytes of a bitmap.
    fn dirty(&self, name: &str) -> u64 {
        let all = self.tap.bitmaps().list(DISK).unwrap();
        all.iter().find(|bitmap| bitmap.name == name).unwrap().dirty
    }
}

#[test]
fn bitmap_added_while_a_write_is_in_flight_has_it_marked() {
    let mut writing = Writing::new(None);
    let (channel, cx) = (&mut writing.channel, &mut writing.cx);
    let mut look = || {
        channel.timer(cx);
        Ok(())
    };
    let bitmaps = writing.tap.bitmaps();
    bitmaps.add("a", DISK, Some(BLOCK), &mut look).unwrap();
    assert_eq!(writing.dirty("a"), BLOCK);
}

#[test]
fn bitmap_cleared_while_a_write_is_in_flight_has_it_marked() {
    let mut writing = Writing::new(Some("a"));
    assert_eq!(writing.dirty("a"), BLOCK);
    let (channel, cx) = (&mut writing.channel, &mut writing.cx);
    let mut look = || {
        channel.timer(cx);
        Ok(())
    };
    let bitmaps = writing.tap.bitmaps();
    bitmaps.clear("a", DISK, &mut look).unwrap();
    assert_eq!(writing.dirty("a"), BLOCK);
    // The mark comes from the worker: a clear by itself leaves nothing dirty.
    bitmaps.clear("a", DISK, &mut idle).unwrap();
    assert_eq!(writing.dirty("a"), 0);
}

#[test]
fn bitmap_is_unchanged_if_a_worker_does_not_respond() {
    let (_host, bitmaps) = Host::with_one();
    mark(&bitmaps, 0, 1);
    let mut stuck = || Err("a worker did not respond".to_owned());
    let refused = bitmaps.add("b", SIZE, None, &mut stuck).unwrap_err();
    assert!(refused.contains("'b': not added"), "{refused}");
    let refused = bitmaps.clear("a", SIZE, &mut stuck).unwrap_err();
    assert!(refused.contains("'a': not cleared"), "{refused}");
    let all = bitmaps.list(SIZE).unwrap();
    let all: Vec<_> = all.iter().map(|b| (&*b.name, b.dirty)).collect();
    assert_eq!(all, [("a", BLOCK)]);
    bitmaps.add("b", SIZE, None, &mut idle).unwrap();
}
