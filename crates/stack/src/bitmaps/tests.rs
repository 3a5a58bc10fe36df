use super::header::Header;
use super::*;
use std::fs;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use tempfile::TempDir;

const BLOCK: u64 = 64 << 10;
const SIZE: u64 = 100 * BLOCK + 512;

/// An image, and its bitmaps as a process has them.
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
        Bitmaps::new(Ok(Place {
            dir: self.dir.path().join("bitmaps"),
            image: Some(self.image()),
            boot: self.boot.into(),
        }))
    }

    fn used(&self) -> Bitmaps {
        let bitmaps = self.idle();
        let before = bitmaps.look();
        bitmaps.open(SIZE, before).unwrap();
        bitmaps
    }

    /// With one bitmap.
    fn with_one() -> (Host, Bitmaps) {
        let host = Host::new();
        let bitmaps = host.used();
        bitmaps.add("a", SIZE, None).unwrap();
        (host, bitmaps)
    }
}

fn mark(bitmaps: &Bitmaps, offset: u64, len: u64) {
    bitmaps
        .marked()
        .1
        .iter()
        .for_each(|bitmap| bitmap.mark(offset, len));
}

/// Its only one: what is dirty, and why all is.
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
    // What the disk has grown by was not there before.
    let grown = parts(&bitmaps.dirty("a"), SIZE + BLOCK);
    assert_eq!(grown.last(), Some(&(SIZE + BLOCK, true)));
    assert_eq!(parts(&bitmaps.dirty("none"), SIZE), [(SIZE, true)]);
}

#[test]
fn nothing_is_lost_by_a_process_that_is_killed() {
    let (host, bitmaps) = Host::with_one();
    mark(&bitmaps, 5 * BLOCK, 1);
    // (Its memory and its lock go, and nothing is done at its end.)
    drop(bitmaps);
    assert_eq!(only(&host.used()), (BLOCK, None));
    assert_eq!(only(&host.idle()), (BLOCK, None));
}

#[test]
fn after_the_machine_went_down_all_is_dirty_until_a_backup_is_safe() {
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
    bitmaps.advance("a", SIZE).unwrap();
    assert_eq!(only(&bitmaps), (BLOCK, None));
    // And not by going down when nobody used it.
    bitmaps.close();
    host.boot = "three";
    assert_eq!(only(&host.used()), (BLOCK, None));
}

#[test]
fn whoever_changes_the_image_otherwise_is_noticed() {
    let (host, bitmaps) = Host::with_one();
    // As its users do.
    fs::write(host.image(), b"more").unwrap();
    bitmaps.close();
    assert_eq!(only(&host.idle()), (0, None));
    let file = File::options().write(true).open(host.image()).unwrap();
    // (Clocks of file systems are coarse.)
    std::thread::sleep(std::time::Duration::from_millis(20));
    file.write_all_at(b"x", 0).unwrap();
    let (dirty, problem) = only(&host.used());
    assert_eq!(
        (dirty, problem.unwrap().contains("something else")),
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
    bitmaps.close();
    let (dirty, problem) = only(&host.used());
    assert_eq!((dirty, problem.unwrap().contains("cut off")), (SIZE, true));
    // Though it be as long as before again.
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
            .advance("a", SIZE)
            .unwrap_err()
            .contains("no backup")
    );
    bitmaps.begin_successor("a").unwrap();
    mark(&bitmaps, BLOCK, 1);
    assert!(bitmaps.list(SIZE).unwrap()[0].successor.is_some());
    bitmaps.drop_successor("a");
    assert_eq!(only(&bitmaps), (2 * BLOCK, None));
    // A process that dies meanwhile.
    bitmaps.begin_successor("a").unwrap();
    mark(&bitmaps, 2 * BLOCK, 1);
    drop(bitmaps);
    let bitmaps = host.used();
    assert_eq!(only(&bitmaps), (3 * BLOCK, None));
    assert!(bitmaps.advance("a", SIZE).is_err() && !host.file(".a.next").exists());
    // While nobody uses the disk, nothing changes.
    bitmaps.begin_successor("a").unwrap();
    mark(&bitmaps, 4 * BLOCK, 1);
    bitmaps.close();
    bitmaps.list(SIZE).unwrap();
    let before = bitmaps.look();
    bitmaps.open(SIZE, before).unwrap();
    mark(&bitmaps, 6 * BLOCK, 1);
    bitmaps.close();
    bitmaps.advance("a", SIZE).unwrap();
    assert_eq!(only(&bitmaps), (2 * BLOCK, None));
    // Unless others use it.
    let before = bitmaps.look();
    bitmaps.open(SIZE, before).unwrap();
    bitmaps.begin_successor("a").unwrap();
    bitmaps.close();
    host.used().close();
    assert!(!host.file(".a.next").exists() && bitmaps.advance("a", SIZE).is_err());
    drop(bitmaps);
    let bitmaps = host.used();
    bitmaps.begin_successor("a").unwrap();
    mark(&bitmaps, 9 * BLOCK, 1);
    bitmaps.advance("a", SIZE).unwrap();
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
    bitmaps.close();
    assert_eq!(bitmaps.list(SIZE).unwrap(), []);
    bitmaps.advance("new", SIZE).unwrap();
    assert_eq!(only(&bitmaps), (BLOCK, None));
    assert!(bitmaps.begin_successor("../x").is_err());
    bitmaps.remove("new", SIZE).unwrap();
    assert!(bitmaps.remove("new", SIZE).is_err() && !host.file("").exists());
}

#[test]
fn what_is_none_of_ours_is_left_alone() {
    let (host, bitmaps) = Host::with_one();
    bitmaps.close();
    let precious = host.dir.path().join("precious");
    fs::write(&precious, vec![b'x'; 100_000]).unwrap();
    let refused = || {
        let bitmaps = host.idle();
        let before = bitmaps.look();
        bitmaps.open(SIZE, before).unwrap_err()
    };
    std::os::unix::fs::symlink(&precious, host.file("b")).unwrap();
    assert!(refused().contains("b: "));
    fs::remove_file(host.file("b")).unwrap();
    fs::hard_link(&precious, host.file("b")).unwrap();
    assert!(refused().contains("b: is no file of its own"));
    fs::remove_file(host.file("b")).unwrap();
    fs::copy(&precious, host.file("b")).unwrap();
    assert!(refused().contains("b: is no bitmap"));
    fs::remove_file(host.file("b")).unwrap();
    assert_eq!(fs::read(&precious).unwrap(), vec![b'x'; 100_000]);
    let user = host.used();
    assert!(refused().contains("another process"));
    user.close();
    assert_eq!(only(&host.used()), (0, None));
}

#[test]
fn headers_that_lie_are_no_bitmaps() {
    let (host, bitmaps) = Host::with_one();
    bitmaps.close();
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
        let bitmaps = host.idle();
        assert!(
            bitmaps.list(SIZE).unwrap_err().contains("is no bitmap"),
            "{header:?}"
        );
    }
    // (It says that it is longer than it is.)
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
    for bad in [0, 512, 5000, 2 << 30] {
        assert!(bitmaps.add("b", SIZE, Some(bad)).is_err(), "{bad}");
    }
    bitmaps.add("b", SIZE, Some(4096)).unwrap();
    mark(&bitmaps, 4095, 2);
    assert_eq!(parts(&bitmaps.dirty("b"), SIZE)[0], (8192, true));
    assert!(bitmaps.add("b", SIZE, None).is_err());
    bitmaps.begin_successor("b").unwrap();
    bitmaps.advance("b", SIZE).unwrap();
    let all = bitmaps.list(SIZE).unwrap();
    assert_eq!((all[1].granularity, all[1].dirty), (4096, 0));
}
