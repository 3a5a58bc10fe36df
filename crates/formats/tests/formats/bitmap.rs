//! Changes and copies of bitmaps: compared with a model, with power cuts, on full disks, and in
//! hostile images.

use crate::support::steps::{LIMIT, Random, cuts, problem};
use crate::support::*;
use fathom_files::ImageFile;
use fathom_formats::offline::bitmap::{Bitmaps, Bits, Broken, Change, copy, list};
use fathom_formats::offline::check::{Options, check};
use fathom_formats::offline::info::{Info, Protocol};
use fathom_formats::qcow2::bitmap::{Bitmap, FLAG_AUTO};
use fathom_formats::qcow2::{AUTOCLEAR_BITMAPS, BitmapsExtension, Extension, Header};
use fathom_formats::testing::MemoryFile;
use fathom_formats::{Format, HostOffset, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const SIZE: u64 = 1 << 20;

const IMAGES: &[&str] = &[
    "cluster_size=512",
    "cluster_size=1k,refcount_bits=64",
    "cluster_size=4k,refcount_bits=1",
    "cluster_size=64k",
    "cluster_size=16k,extended_l2=on",
];

/// Returns an image with three bitmaps: `a`, `b` with a granularity of 512 bytes, disabled, and
/// `c`. The other granularities are QEMU's defaults. `a` and `b` have recorded writes.
fn image(options: &str) -> Vec<u8> {
    let dir = dir();
    let dir = dir.path();
    create_file(dir, "i", "qcow2", &pairs(options), SIZE);
    qemu_img(dir, &["bitmap", "--add", "i", "a"]);
    qemu_img(dir, &["bitmap", "--add", "-g", "512", "i", "b"]);
    let writes = ["write -P 1 0 70k", "write -P 2 600k 50k"];
    qemu_io(dir, "i", "qcow2", &writes);
    qemu_img(dir, &["bitmap", "--disable", "i", "b"]);
    qemu_img(dir, &["bitmap", "--add", "i", "c"]);
    std::fs::read(dir.join("i")).unwrap()
}

/// Flags, granularity and dirty ranges by bitmap name.
type State = BTreeMap<Vec<u8>, (u32, u64, Vec<(u64, u64)>)>;

fn header_of(file: &MemoryFile) -> Header {
    Header::parse(&file.bytes()).unwrap()
}

fn state(file: &MemoryFile) -> State {
    let header = header_of(file);
    let one = |bitmap: Bitmap| {
        let bits = Bits::read(file, &header, &bitmap).unwrap();
        (
            bitmap.name.clone(),
            (bitmap.flags, bitmap.granularity(), ranges(&bits)),
        )
    };
    list(file)
        .unwrap()
        .into_iter()
        .map(|listed| one(listed.bitmap))
        .collect()
}

fn ranges(bits: &Bits) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    bits.for_each(0..bits.disk_size(), &mut |dirty| {
        match ranges.last_mut() {
            Some((_, end)) if *end == dirty.start => *end = dirty.end,
            _ => ranges.push((dirty.start, dirty.end)),
        }
        Ok(())
    })
    .unwrap();
    ranges
}

fn change(file: &dyn ImageFile, changes: &[(&str, Change)]) -> Result<()> {
    let mut bitmaps = Bitmaps::open(file)?;
    for (name, change) in changes {
        bitmaps.change(name, *change)?;
    }
    bitmaps.commit()
}

const CHANGES: &[(&str, &[(&str, Change)])] = &[
    ("add", &[("d", Change::Add(Some(512)))]),
    ("remove", &[("a", Change::Remove)]),
    (
        "remove all",
        &[
            ("b", Change::Remove),
            ("c", Change::Remove),
            ("a", Change::Remove),
        ],
    ),
    ("clear", &[("a", Change::Clear), ("b", Change::Clear)]),
    ("flags", &[("a", Change::Disable), ("b", Change::Enable)]),
    ("merge", &[("c", Change::Merge("b"))]),
    (
        "several",
        &[
            ("d", Change::Add(None)),
            ("d", Change::Merge("b")),
            ("b", Change::Merge("a")),
            ("a", Change::Remove),
        ],
    ),
];

#[test]
fn a_power_cut_leaves_the_old_bitmaps_or_the_new_ones() {
    let tears = rounds(4) as usize;
    for options in IMAGES {
        let before = image(options);
        for (name, changes) in CHANGES {
            let problems = cuts(&before, &|file| change(file, changes), state, true, tears);
            assert_eq!(problems, Vec::<String>::new(), "{options} {name}");
        }
        let from = MemoryFile::new(before, LIMIT);
        let empty = without_bitmaps(&from);
        let work = |file: &dyn ImageFile| copy(&from, file, Broken::Refuse).map(drop);
        let problems = cuts(&empty, &work, state, true, tears);
        assert_eq!(problems, Vec::<String>::new(), "{options} copy");
    }
}

/// Checks that the test detects a disk that does not flush.
#[test]
fn a_disk_that_does_not_flush_is_found_out() {
    for options in &IMAGES[..2] {
        let before = image(options);
        for (name, changes) in CHANGES {
            let problems = cuts(&before, &|file| change(file, changes), state, false, 20);
            assert_ne!(problems.len(), 0, "{options} {name}");
        }
    }
}

#[test]
fn a_full_disk_leaves_the_old_bitmaps() {
    for options in IMAGES {
        let before = image(options);
        let old = state(&MemoryFile::new(before.clone(), LIMIT));
        let mut full = 0;
        for (name, changes) in CHANGES {
            for limit in (0..).map(|n| before.len() as u64 + n * 3000) {
                let file = MemoryFile::new(before.clone(), limit);
                if change(&file, changes).is_ok() {
                    break;
                }
                full += 1;
                assert_eq!(
                    problem(state, &file, &[&old]),
                    None,
                    "{options} {name} {limit}"
                );
            }
        }
        assert!(full > 0, "{options}: never full");
    }
}

fn without_bitmaps(file: &MemoryFile) -> Vec<u8> {
    let copy = MemoryFile::new(file.bytes().clone(), LIMIT);
    change(&copy, CHANGES[2].1).unwrap();
    copy.bytes().clone()
}

/// Makes random changes to random bitmaps, and compares them with a model that tracks dirty bytes
/// in units of 512.
#[test]
fn bits_are_what_a_model_says() {
    let mut random = Random(number("FATHOM_SEED").unwrap_or(0x1234_5678_9abc) | 1);
    let names = ["a", "b", "c", "d", "e"];
    for round in 0..IMAGES.len() * rounds(1) as usize {
        let options = IMAGES[round % IMAGES.len()];
        let file = MemoryFile::new(image(options), LIMIT);
        let mut model: BTreeMap<&str, (u64, BTreeSet<u64>)> = BTreeMap::new();
        for (name, (_, granularity, dirty)) in state(&file) {
            let units = dirty.iter().flat_map(|(start, end)| start / 512..end / 512);
            let name = names.into_iter().find(|n| n.as_bytes() == name).unwrap();
            model.insert(name, (granularity, units.collect()));
        }
        for _ in 0..20 {
            let mut bitmaps = Bitmaps::open(&file).unwrap();
            for _ in 0..1 + random.next() % 4 {
                let [name, source] = [(); 2].map(|()| names[(random.next() % 5) as usize]);
                let granularity = 512 << (random.next() % 10);
                let there = model.contains_key(name);
                let (done, known) = match random.next() % 8 {
                    0..=2 => {
                        let added = bitmaps.change(name, Change::Add(Some(granularity)));
                        if !there {
                            model.insert(name, (granularity, BTreeSet::new()));
                        }
                        (added, !there)
                    }
                    3 => {
                        model.remove(name);
                        (bitmaps.change(name, Change::Remove), there)
                    }
                    4 => {
                        if let Some((_, units)) = model.get_mut(name) {
                            units.clear();
                        }
                        (bitmaps.change(name, Change::Clear), there)
                    }
                    _ => {
                        let from = model.get(source).map(|(_, units)| units.clone());
                        let known = there && from.is_some();
                        if let (Some(from), Some((granularity, units))) =
                            (from, model.get_mut(name))
                        {
                            let per_bit = *granularity / 512;
                            let whole = |unit: &u64| {
                                let first = unit / per_bit * per_bit;
                                first..(first + per_bit).min(SIZE / 512)
                            };
                            units.extend(from.iter().flat_map(whole));
                        }
                        (bitmaps.change(name, Change::Merge(source)), known)
                    }
                };
                assert_eq!(done.is_ok(), known, "{options}: {done:?}");
            }
            bitmaps.commit().unwrap();
            let found = state(&file);
            assert_eq!(problem(state, &file, &[&found]), None, "{options}");
            assert_eq!(found.len(), model.len(), "{options}");
            for (name, (granularity, units)) in &model {
                let (_, of, dirty) = &found[name.as_bytes()];
                let dirty = dirty.iter().flat_map(|(start, end)| start / 512..end / 512);
                assert_eq!(of, granularity, "{options} {name}");
                assert_eq!(dirty.collect::<BTreeSet<_>>(), *units, "{options} {name}");
            }
        }
        let dir = dir();
        std::fs::write(dir.path().join("i"), &*file.bytes()).unwrap();
        assert_eq!(qemu_check(dir.path(), "i", "qcow2").0, 0, "{options}");
        // QEMU opens the image and lists the bitmaps.
        let info = qemu_info(dir.path(), "i");
        let seen = info["format-specific"]["data"]["bitmaps"].as_array();
        assert_eq!(seen.map_or(0, Vec::len), model.len(), "{options}");
    }
}

#[test]
fn copies_are_what_they_were_copied_from() {
    for (options, other) in IMAGES.iter().zip(IMAGES.iter().rev()) {
        let from = MemoryFile::new(image(options), LIMIT);
        let to = MemoryFile::new(
            without_bitmaps(&MemoryFile::new(image(other), LIMIT)),
            LIMIT,
        );
        assert_eq!(
            copy(&from, &to, Broken::Refuse).unwrap(),
            Vec::<String>::new()
        );
        assert_eq!(
            problem(state, &to, &[&state(&from)]),
            None,
            "{options} {other}"
        );
        // The target already has bitmaps with these names.
        let before = to.bytes().clone();
        assert!(copy(&from, &to, Broken::Refuse).is_err());
        assert!(*to.bytes() == before);
        // Now one of the bitmaps misses writes.
        let at = directory(&from);
        let flags = from.bytes()[at + 15];
        assert_eq!(u32::from(flags), FLAG_AUTO);
        from.bytes()[at + 15] = flags | 1;
        let to = MemoryFile::new(without_bitmaps(&to), LIMIT);
        let before = to.bytes().clone();
        let error = copy(&from, &to, Broken::Refuse).unwrap_err().to_string();
        assert!(error.contains("'a': not closed cleanly"), "{error}");
        assert!(*to.bytes() == before);
        assert_eq!(copy(&from, &to, Broken::Skip).unwrap(), ["a"]);
        assert_eq!(state(&to).len(), 2);
    }
}

/// Returns the offset of the bitmap directory.
fn directory(file: &MemoryFile) -> usize {
    header_of(file).bitmaps().unwrap().directory_offset.0 as usize
}

/// Simulates writes by a program that does not know bitmaps.
#[test]
fn bitmaps_that_cannot_be_believed_are_forgotten() {
    let file = MemoryFile::new(image(IMAGES[1]), LIMIT);
    file.bytes()[95] &= !1;
    assert!(list(&file).unwrap().is_empty());
    change(&file, &[("a", Change::Add(None))]).unwrap();
    let found = state(&file);
    let expected = (FLAG_AUTO, 4096, Vec::new());
    assert_eq!(found.get(&b"a"[..]), Some(&expected));
    // The image only has leaks, which a check finds.
    let options = Options {
        repair: fathom_formats::offline::check::Repair::Leaks,
        ..Options::default()
    };
    check(&file, Format::Qcow2, &options, &mut |_| {}).unwrap();
    assert_eq!(problem(state, &file, &[&found]), None);
}

/// Each of these images is refused with a message of one line, and is not changed.
#[test]
fn bitmaps_of_images_that_lie_are_refused() {
    let sound = image(IMAGES[1]);
    let file = MemoryFile::new(sound.clone(), LIMIT);
    let at = directory(&file);
    let word = |at: usize| u64::from_be_bytes(sound[at..at + 8].try_into().unwrap());
    let table = word(at) as usize;
    // Offset, new bytes, and the resulting problem of the first bitmap.
    let lies: &[(usize, &[u8], &str)] = &[
        (at + 8, &[0, 0, 0, 0], "no table"),
        (
            at + 8,
            &[0x07, 0xff, 0xff, 0xff],
            "a table beyond the file's end",
        ),
        (
            at,
            &[0, 0, 0, 0x7f, 0, 0, 0, 0],
            "a table beyond the file's end",
        ),
        (at + 17, &[8], "granularity 256"),
        (table, &[0xff; 8], "an entry with reserved bits"),
        (
            table,
            &[0, 0, 0, 0, 0, 0, 0x01, 0],
            "an entry that is not aligned",
        ),
        (
            table,
            &[0x00, 0x7f, 0, 0, 0, 0, 0, 0],
            "bits beyond the end",
        ),
        (table, &(at as u64).to_be_bytes(), "bits in the directory"),
    ];
    for (offset, bytes, what) in lies {
        let mut broken = sound.clone();
        broken[*offset..offset + bytes.len()].copy_from_slice(bytes);
        let file = MemoryFile::new(broken.clone(), LIMIT);
        for changes in [("a", Change::Clear), ("c", Change::Merge("a"))] {
            let refused = change(&file, &[changes]);
            let Err(error) = refused else {
                panic!("{what} is not refused");
            };
            assert_eq!(error.to_string().lines().count(), 1, "{what}: {error}");
            assert!(*file.bytes() == broken, "{what}");
        }
    }
}

#[test]
fn a_bitmap_of_a_smaller_disk_is_refused() {
    let dir = dir();
    create_file(
        dir.path(),
        "i",
        "qcow2",
        &pairs("cluster_size=512"),
        8 << 20,
    );
    qemu_img(dir.path(), &["bitmap", "--add", "-g", "512", "i", "a"]);
    let file = MemoryFile::new(std::fs::read(dir.path().join("i")).unwrap(), LIMIT);
    let entries = directory(&file) + 11;
    assert_eq!(file.bytes()[entries], 4);
    file.bytes()[entries] = 3;
    let error = list(&file).unwrap_err().to_string();
    assert!(error.contains("1536 bytes of bits"), "{error}");
    assert!(change(&file, &[("a", Change::Merge("a"))]).is_err());
    change(&file, &[("a", Change::Remove)]).unwrap();
}

/// Checks what `info` reports about bitmaps created by Fathom.
#[test]
fn info_knows_what_was_made() {
    let dir = dir();
    let bytes = image(IMAGES[3]);
    std::fs::write(dir.path().join("i"), &bytes).unwrap();
    let path = dir.path().join("i");
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    change(&file, CHANGES[6].1).unwrap();
    let info = Info::read(Path::new("i"), &file, Protocol::File, None).unwrap();
    let mine = &info.to_json()["format-specific"]["data"]["bitmaps"];
    let theirs = &qemu_info(dir.path(), "i")["format-specific"]["data"]["bitmaps"];
    assert_eq!(mine, theirs);
    assert_eq!(mine.as_array().unwrap().len(), 3);
}

/// A file that records how many bytes are read in total, and the largest read.
struct Watched {
    file: MemoryFile,
    total: AtomicUsize,
    largest: AtomicUsize,
}

impl ImageFile for Watched {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.total.fetch_add(buf.len(), Relaxed);
        self.largest.fetch_max(buf.len(), Relaxed);
        self.file.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_at(buf, offset)
    }

    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.file.discard(offset, len)
    }
}

/// Returns an image of a few MiB with the maximum number of bitmaps. All bitmaps share one table of
/// `entries` entries.
fn hostile(cluster_size: &str, size: u64, entries: u32) -> Watched {
    let dir = dir();
    let options = [("cluster_size", cluster_size)];
    create_file(dir.path(), "i", "qcow2", &options, SIZE);
    let mut bytes = std::fs::read(dir.path().join("i")).unwrap();
    let mut header = Header::parse(&bytes).unwrap();
    let cluster = 1 << header.cluster_bits;
    let place = bytes.len().next_multiple_of(cluster);
    let mut directory = Vec::new();
    for number in 0..65535u32 {
        let bitmap = Bitmap {
            table_offset: HostOffset(place as u64),
            table_entries: entries,
            flags: FLAG_AUTO,
            granularity_bits: 9,
            name: number.to_be_bytes().to_vec(),
            extra: Vec::new(),
        };
        bitmap.encode(&mut directory);
    }
    // The table is zeroes, in part beyond the end of the file.
    let directory_at = place + (2 << 20);
    bytes.resize(directory_at, 0);
    bytes.extend(&directory);
    header.size = size;
    header.l1_entries = header.geometry().l1_entries_for(size) as u32;
    header.autoclear |= AUTOCLEAR_BITMAPS;
    header.extensions = vec![Extension::Bitmaps(BitmapsExtension {
        count: 65535,
        reserved: 0,
        directory_size: directory.len() as u64,
        directory_offset: HostOffset(directory_at as u64),
    })];
    let encoded = header.encode().unwrap();
    bytes[..encoded.len()].copy_from_slice(&encoded);
    Watched {
        file: MemoryFile::new(bytes, LIMIT),
        total: AtomicUsize::new(0),
        largest: AtomicUsize::new(0),
    }
}

/// Cluster size, size of the disk, and number of entries that each table needs for that disk.
const HOSTILE: &[(&str, u64, u32)] = &[
    // Tables of 1 GiB.
    ("2M", 1 << 60, 1 << 27),
    // Tables of 1 MiB, the maximum, which overlap.
    ("4k", 1 << 41, 1 << 17),
];

#[test]
fn tables_of_hostile_bitmaps_are_not_read() {
    for (cluster_size, size, entries) in HOSTILE {
        let file = hostile(cluster_size, *size, *entries);
        let to = image(IMAGES[3]);
        let to = MemoryFile::new(to, LIMIT);
        let attempts: [(&str, &dyn Fn() -> Result<()>); 4] = [
            ("info", &|| {
                Info::read(Path::new("i"), &file, Protocol::File, None).map(drop)
            }),
            ("list", &|| list(&file).map(drop)),
            ("copy", &|| copy(&file, &to, Broken::Skip).map(drop)),
            ("change", &|| {
                let name = String::from_utf8(vec![0; 4]).unwrap();
                let mut bitmaps = Bitmaps::open(&file)?;
                bitmaps.change(&name, Change::Clear)?;
                bitmaps.commit()
            }),
        ];
        for (what, attempt) in attempts {
            file.total.store(0, Relaxed);
            file.largest.store(0, Relaxed);
            let error = attempt().expect_err(what).to_string();
            assert_eq!(error.lines().count(), 1, "{what}: {error}");
            let (total, largest) = (file.total.load(Relaxed), file.largest.load(Relaxed));
            // The directory has 2 MiB, and a check reads all tables of the image.
            assert!(largest <= 8 << 20, "{what} reads {largest} bytes at once");
            assert!(total <= 256 << 20, "{what} reads {total} bytes");
        }
    }
}

/// Tables of changed bitmaps stay in memory until the commit.
#[test]
fn memory_for_tables_is_bounded() {
    let dir = dir();
    create_file(dir.path(), "i", "qcow2", &[("cluster_size", "4k")], 1 << 41);
    let bytes = std::fs::read(dir.path().join("i")).unwrap();
    let file = MemoryFile::new(bytes, LIMIT);
    let mut bitmaps = Bitmaps::open(&file).unwrap();
    let added = (0..1000).map(|n| bitmaps.change(&n.to_string(), Change::Add(Some(512))));
    // Each table has 1 MiB.
    let added: Vec<_> = added.take_while(Result::is_ok).collect();
    assert_eq!(added.len(), 256);
}
