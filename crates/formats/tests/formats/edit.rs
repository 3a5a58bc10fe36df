//! Power cuts, kills and full disks while snapshots are created, applied and deleted, disks are
//! resized, and images get other backing files or are emptied. The result is the old image or the
//! new one, and sound.

use crate::support::steps::{LIMIT, Random, Recorder, cut, cuts, disk, problem};
use crate::support::*;
use fathom_files::ImageFile;
use fathom_formats::offline::amend::{Changes, amend};
use fathom_formats::offline::backing::{NewBacking, make_empty, set_backing};
use fathom_formats::offline::create::Preallocation;
use fathom_formats::offline::edit::Editor;
use fathom_formats::offline::resize::{Resize, resize};
use fathom_formats::offline::{Image, bitmap, snapshot};
use fathom_formats::qcow2::Header;
use fathom_formats::testing::MemoryFile;
use fathom_formats::{Format, Result};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

const SIZE: u64 = 1 << 20;

type Change = fn(&dyn ImageFile) -> Result<()>;

fn to(file: &dyn ImageFile, size: u64, preallocation: Preallocation) -> Result<()> {
    let to = Resize {
        size,
        preallocation,
        data_file: None,
        below: None,
    };
    resize(file, Format::Qcow2, &to)
}

const CHANGES: &[(&str, Change)] = &[
    ("create", |f| snapshot::create(f, "s2", (1, 2)).map(drop)),
    ("apply", |f| snapshot::apply(f, "s1").map(drop)),
    ("delete", |f| snapshot::delete(f, "s1").map(drop)),
    ("grow", |f| to(f, 40 * SIZE, Preallocation::Off)),
    ("metadata", |f| to(f, 2 * SIZE, Preallocation::Metadata)),
    ("full", |f| {
        to(f, SIZE + 70_000 / 512 * 512, Preallocation::Full)
    }),
    ("shrink", |f| to(f, 500_000 / 512 * 512, Preallocation::Off)),
    ("empty", |f| make_empty(f, Format::Qcow2).map(drop)),
    ("rebase", |f| onto(f, Format::Qcow2, "below")),
    ("long name", |f| onto(f, Format::Qcow2, &long_name())),
    ("version 3", |f| amended(f, Some(3), None)),
    ("version 2", |f| amended(f, Some(2), Some(16))),
    ("wide refcounts", |f| amended(f, Some(3), Some(64))),
    ("narrow refcounts", |f| amended(f, Some(3), Some(2))),
];

/// Changes all options at once.
fn amended(file: &dyn ImageFile, version: Option<u32>, refcount_bits: Option<u64>) -> Result<()> {
    let changes = Changes {
        version,
        lazy_refcounts: Some(refcount_bits.is_some_and(|bits| bits != 16)),
        refcount_bits,
    };
    amend(file, &changes)
}

/// Sets a raw backing file.
fn onto(file: &dyn ImageFile, format: Format, name: &str) -> Result<()> {
    let backing = NewBacking {
        name: name.as_bytes(),
        format: Format::Raw,
    };
    set_backing(file, format, Some(backing))
}

/// A name that does not fit into the first sector.
fn long_name() -> String {
    "./".repeat(300) + "below"
}

const IMAGES: &[&str] = &[
    "cluster_size=512",
    "cluster_size=1k,refcount_bits=64",
    "cluster_size=4k,refcount_bits=4,lazy_refcounts=on",
    "cluster_size=64k",
    "cluster_size=16k,extended_l2=on",
    "compat=0.10,cluster_size=1k",
    "cluster_size=1k,bitmaps",
    "cluster_size=4k,refcount_bits=8,stored",
];

/// Returns an image with a snapshot, and data of the disk, of the snapshot, or of both. The image
/// has zero clusters, unless all clusters are preallocated.
fn image(options: &str) -> Vec<u8> {
    let dir = dir();
    let dir = dir.path();
    let plain = options.trim_end_matches(",bitmaps");
    let plain = plain.trim_end_matches(",stored");
    create_file(dir, "i", "qcow2", &pairs(plain), SIZE);
    let writes = ["write -P 1 0 70k", "write -P 2 600k 50k"];
    qemu_io(dir, "i", "qcow2", &writes);
    qemu_img(dir, &["snapshot", "-c", "s1", "i"]);
    if options.ends_with("bitmaps") {
        qemu_img(dir, &["bitmap", "--add", "-g", "512", "i", "b"]);
    }
    let writes = ["write -P 3 10k 70k", "write -P 4 900k 9k", "discard 0 4k"];
    let zeroes = usize::from(!options.ends_with("stored"));
    qemu_io(dir, "i", "qcow2", &writes[..2 + zeroes]);
    std::fs::read(dir.join("i")).unwrap()
}

/// The disk with the name of its backing file, each snapshot with its name, and each bitmap.
type State = Vec<(Vec<u8>, u64, Vec<u8>)>;

fn state(file: &MemoryFile) -> State {
    let bytes = file.bytes().clone();
    let header = Header::parse(&bytes).unwrap();
    let mut all = vec![(
        header.backing_file.clone().unwrap_or_default(),
        header.size,
        disk(&bytes, &header, header.l1_offset, header.size),
    )];
    for snapshot in snapshot::list(file).unwrap() {
        let size = snapshot.disk_size().unwrap();
        let disk = disk(&bytes, &header, snapshot.l1_offset, size);
        all.push((snapshot.name, size, disk));
    }
    let features = (u64::from(header.version) << 8) + u64::from(header.refcount_order);
    all.push((
        b"features".to_vec(),
        features,
        vec![header.compatible as u8],
    ));
    for listed in bitmap::list(file).unwrap() {
        all.push((listed.bitmap.name, listed.dirty.unwrap(), Vec::new()));
    }
    all
}

/// Whether an image with these options allows the change.
fn applies(options: &str, name: &str) -> bool {
    let resizes = ["grow", "metadata", "full", "shrink"].contains(&name);
    let has_room = !["cluster_size=512", "cluster_size=1k"]
        .iter()
        .any(|small| options.contains(small));
    let applies = match name {
        "apply" => !options.contains("bitmaps"),
        "long name" => has_room,
        "version 3" => options.contains("compat=0.10"),
        "version 2" => options.contains("stored"),
        _ => true,
    };
    applies && !(options.contains("compat=0.10") && resizes)
}

#[test]
fn a_power_cut_leaves_the_old_image_or_the_new_one() {
    let tears = rounds(4) as usize;
    for options in IMAGES {
        let before = image(options);
        for (name, change) in CHANGES.iter().filter(|(name, _)| applies(options, name)) {
            let problems = cuts(&before, change, state, true, tears);
            assert_eq!(problems, Vec::<String>::new(), "{options} {name}");
        }
    }
}

/// Checks that the test detects a disk that does not flush.
#[test]
fn a_disk_that_does_not_flush_is_found_out() {
    for options in [IMAGES[0], IMAGES[2]] {
        let before = image(options);
        // A single sector is either written or not.
        let one = |name: &str| name == "rebase" || !applies(options, name);
        for (name, change) in CHANGES.iter().filter(|(name, _)| !one(name)) {
            assert_ne!(
                cuts(&before, change, state, false, 20).len(),
                0,
                "{options} {name}"
            );
        }
    }
}

#[test]
fn a_full_disk_leaves_the_old_image() {
    for options in IMAGES {
        let before = image(options);
        let old = state(&MemoryFile::new(before.clone(), LIMIT));
        for (name, change) in CHANGES.iter().filter(|(name, _)| applies(options, name)) {
            let room = (0..).map(|n| before.len() as u64 + n * 3000);
            let mut full = 0;
            for limit in room {
                let file = MemoryFile::new(before.clone(), limit);
                if change(&file).is_ok() {
                    break;
                }
                full += 1;
                assert_eq!(
                    problem(state, &file, &[&old]),
                    None,
                    "{options} {name} {limit}"
                );
                assert!(file.len().unwrap() <= before.len() as u64);
            }
            let frees = ["delete", "shrink", "apply", "empty", "rebase", "long name"];
            let may_fit = name.starts_with("version")
                || name.ends_with("refcounts") && options != &"cluster_size=512";
            let needs_room = !frees.contains(name) && !may_fit;
            assert!(full > 0 || !needs_room, "{options} {name}: never full");
        }
    }
}

/// A file on which one operation fails, once. A failed write may have been done nevertheless.
struct Failing {
    file: MemoryFile,
    /// Number of operations before the one that fails.
    left: AtomicUsize,
    writes_anyway: bool,
}

impl Failing {
    /// Whether this operation fails.
    fn fails(&self) -> bool {
        let counted = self.left.fetch_update(SeqCst, SeqCst, |left| match left {
            usize::MAX => None,
            left => Some(left.wrapping_sub(1)),
        });
        counted == Ok(0)
    }
}

fn failure<T>() -> io::Result<T> {
    Err(io::Error::from_raw_os_error(libc::EIO))
}

impl ImageFile for Failing {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        match self.fails() {
            false => self.file.write_at(buf, offset),
            true if self.writes_anyway => self.file.write_at(buf, offset).and_then(|()| failure()),
            true => failure(),
        }
    }

    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        match self.fails() {
            true => failure(),
            false => self.file.set_len(len),
        }
    }

    fn sync(&self) -> io::Result<()> {
        match self.fails() {
            true => failure(),
            false => Ok(()),
        }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        match self.fails() {
            true => failure(),
            false => self.file.discard(offset, len),
        }
    }
}

/// Includes the last flush, after which the header may be the new one.
#[test]
fn a_failed_operation_leaves_the_old_image_or_the_new_one() {
    for options in IMAGES {
        let before = image(options);
        let old = state(&MemoryFile::new(before.clone(), LIMIT));
        for (name, change) in CHANGES.iter().filter(|(name, _)| applies(options, name)) {
            let changed = MemoryFile::new(before.clone(), LIMIT);
            change(&changed).unwrap();
            let new = state(&changed);
            for writes_anyway in [false, true] {
                for left in 0.. {
                    let file = Failing {
                        file: MemoryFile::new(before.clone(), LIMIT),
                        left: AtomicUsize::new(left),
                        writes_anyway,
                    };
                    let failed = change(&file).is_err();
                    let problem = problem(state, &file.file, &[&old, &new]);
                    assert_eq!(problem, None, "{options} {name} {left}");
                    // Not all failures are reported: failures to free space are ignored.
                    if !failed && file.left.load(SeqCst) != usize::MAX {
                        break;
                    }
                }
            }
        }
    }
}

/// Lets QEMU check the new images.
#[test]
fn qemu_agrees() {
    for options in IMAGES {
        let before = image(options);
        for (name, change) in CHANGES.iter().filter(|(name, _)| applies(options, name)) {
            let file = MemoryFile::new(before.clone(), LIMIT);
            change(&file).unwrap();
            let dir = dir();
            std::fs::write(dir.path().join("i"), &*file.bytes()).unwrap();
            std::fs::write(dir.path().join("below"), [0; 512]).unwrap();
            let (status, report) = qemu_check(dir.path(), "i", "qcow2");
            assert_eq!(status, 0, "{options} {name}: {report:?}");
        }
    }
}

/// A commit frees only clusters that have no references.
#[test]
fn what_is_referred_to_again_is_not_free() {
    let file = MemoryFile::new(image("cluster_size=4k"), LIMIT);
    let (old, header) = (state(&file), Header::parse(&file.bytes()).unwrap());
    let mut editor = Editor::open(&file).unwrap();
    let l1_bytes = u64::from(header.l1_entries) * 8;
    editor.release(header.l1_offset, l1_bytes).unwrap();
    assert_eq!(editor.refcount(header.l1_offset).unwrap(), 0);
    editor.reference(header.l1_offset, l1_bytes).unwrap();
    // Never writes to the existing image.
    let kept = editor.allocate(3).unwrap();
    editor.write(kept, &[7; 3 << 12]).unwrap();
    editor.commit().unwrap();
    assert_eq!(editor.read(kept, 3 << 12).unwrap(), [7; 3 << 12]);
    editor.release(kept, 3 << 12).unwrap();
    editor.commit().unwrap();
    drop(editor);
    assert_eq!(problem(state, &file, &[&old]), None);
}

/// Another tool, or an earlier use of the file, has left bytes after the end of the disk.
#[test]
fn what_was_behind_the_end_stays_there() {
    for (format, options) in [("qcow2", "cluster_size=64k"), ("qed", "cluster_size=64k")] {
        let dir = dir();
        let dir = dir.path();
        create_file(dir, "i", format, &pairs(options), 100 << 10);
        qemu_io(dir, "i", format, &["write -P 1 0 100k"]);
        let mut bytes = std::fs::read(dir.join("i")).unwrap();
        let end = bytes.iter().rposition(|b| *b == 1).unwrap() + 1;
        bytes.resize(bytes.len().next_multiple_of(64 << 10), 0);
        bytes[end..end.next_multiple_of(64 << 10)].fill(0xee);
        // Free clusters.
        bytes.extend(vec![0xdd; 200 << 10]);
        for how in [Preallocation::Off, Preallocation::Metadata] {
            let file = MemoryFile::new(bytes.clone(), LIMIT);
            let to = Resize {
                size: 900 << 10,
                preallocation: how,
                data_file: None,
                below: None,
            };
            let format = Format::from_name(format).unwrap();
            if format == Format::Qed && how != Preallocation::Off {
                continue;
            }
            resize(&file, format, &to).unwrap();
            std::fs::write(dir.join("new"), &*file.bytes()).unwrap();
            let name = format.name();
            qemu_img(dir, &["convert", "-f", name, "-O", "raw", "new", "read"]);
            let read = std::fs::read(dir.join("read")).unwrap();
            assert_eq!(read.len(), 900 << 10);
            assert!(read[..100 << 10].iter().all(|b| *b == 1));
            let new = &read[100 << 10..];
            assert!(new.iter().all(|b| *b == 0), "{name} {how:?}");
        }
    }
}

/// Sets backing files of QED images.
#[test]
fn a_qed_image_has_the_old_name_or_the_new_one() {
    let dir = dir();
    create_file(dir.path(), "i", "qed", &[], SIZE);
    let first = std::fs::read(dir.path().join("i")).unwrap();
    let name = |file: &MemoryFile| match Image::read(file, Format::Qed).unwrap() {
        Image::Qed(image) => image.backing_file,
        _ => unreachable!(),
    };
    let mut before = first.clone();
    for new in ["below", &long_name(), "other", ""] {
        let recorder = Recorder::new(&before);
        match new {
            "" => set_backing(&recorder, Format::Qed, None).unwrap(),
            new => onto(&recorder, Format::Qed, new).unwrap(),
        }
        let old = name(&MemoryFile::new(before.clone(), LIMIT));
        let steps = recorder.steps.into_inner();
        let mut random = Random(7);
        for end in (0..=steps.len()).flat_map(|end| [end; 20]) {
            let found = name(&cut(&before, &steps[..end], true, &mut random));
            let is_new = found.as_deref().unwrap_or_default() == new.as_bytes();
            assert!(found == old || is_new, "{new} {end}: {found:?}");
        }
        before = recorder.file.bytes().clone();
        let found = name(&recorder.file).unwrap_or_default();
        assert_eq!(found, new.as_bytes());
    }
}
