//! VHDX images that were not closed, and images with sectors of 4 KiB.

use crate::support::{Dir, disk, sum_vhdx};
use fathom_foreign::{Details, Kind};

/// First bytes of the GUID of a region; the constants below are those of a region and of an item.
const BLOCKS: [u8; 4] = [0x66, 0x77, 0xc2, 0x2d];
const METADATA: [u8; 4] = [0x06, 0xa2, 0x7c, 0x8b];
const LOGICAL: [u8; 4] = [0x1d, 0xbf, 0x41, 0x81];

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Returns the offset of a region.
fn region(image: &[u8], guid: &[u8; 4]) -> usize {
    let table = (192 << 10) + 16;
    let mut entries = (table..).step_by(32);
    let entry = entries.find(|at| image[*at..].starts_with(guid)).unwrap();
    u64_at(image, entry + 16) as usize
}

fn changes(dir: &Dir, name: &str) -> usize {
    let opened = dir.open(Kind::Vhdx, name).unwrap();
    match opened.image.describe().details {
        Details::Vhdx { log_changes, .. } => log_changes,
        ref other => panic!("{other:?}"),
    }
}

/// Creates an image of 64 MiB that QEMU did not close.
///
/// An I/O error stops QEMU while it writes to the block table a change that is already in the log.
/// Returns the image as it was before that change.
fn unclosed(dir: &Dir) -> Vec<u8> {
    let options = "block_size=1M,log_size=1M";
    dir.run(
        "qemu-img",
        &["create", "-f", "vhdx", "-o", options, "image", "64M"],
    );
    let write = ["-f", "vhdx", "-c", "write -P 1 3M 2M", "image"];
    dir.run("qemu-io", &write);
    let before = dir.read("image");
    let sector = region(&before, &BLOCKS) / 512;
    let broken = format!(
        r#"json:{{"driver": "vhdx", "file": {{"driver": "blkdebug",
            "image": {{"driver": "file", "filename": "image"}},
            "inject-error": [{{"event": "none", "iotype": "write", "sector": {sector}}}]}}}}"#
    );
    let output = dir.try_run("qemu-io", &["-c", "write -P 2 10M 1M", &broken]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("Input/output error"), "{said}{output:?}");
    before
}

#[test]
fn a_log_is_replayed() {
    let dir = Dir::new();
    let before = unclosed(&dir);
    let image = dir.read("image");
    let table = region(&image, &BLOCKS);
    assert!(image[table..table + 4096] == before[table..table + 4096]);
    assert_eq!(dir.read_by_qemu(Kind::Vhdx, "image"), None);

    assert_eq!(changes(&dir, "image"), 1);
    let ours = dir.open(Kind::Vhdx, "image").unwrap().read(u64::MAX);
    assert!(dir.read("image") == image, "the image was written to");
    dir.run(
        "qemu-img",
        &["check", "-q", "-r", "all", "-f", "vhdx", "image"],
    );
    assert!(dir.read("image") != image);
    assert_eq!(changes(&dir, "image"), 0);
    let theirs = dir.read_by_qemu(Kind::Vhdx, "image").unwrap();
    assert!(ours == theirs);
    assert!(ours[10 << 20..11 << 20] == vec![2; 1 << 20]);
}

/// A log entry.
struct Entry<'a> {
    tail: u32,
    sequence: u64,
    guid: &'a [u8],
    flushed: u64,
    /// Offsets and contents of the changed sectors; empty contents for a range of zeroes.
    changes: &'a [(u64, &'a [u8])],
    /// Number of bytes in a range of zeroes.
    zeroes: u64,
}

impl Entry<'_> {
    fn bytes(&self) -> Vec<u8> {
        let data = self.changes.iter().filter(|(_, data)| !data.is_empty());
        let descriptors = (64 + 32 * self.changes.len()).next_multiple_of(4096);
        let len = descriptors + 4096 * data.count();
        let mut bytes = b"loge\0\0\0\0".to_vec();
        bytes.extend((len as u32).to_le_bytes());
        bytes.extend(self.tail.to_le_bytes());
        bytes.extend(self.sequence.to_le_bytes());
        bytes.extend((self.changes.len() as u64).to_le_bytes());
        bytes.extend(self.guid);
        bytes.extend(self.flushed.to_le_bytes());
        bytes.extend(self.flushed.to_le_bytes());
        let zeroes = self.zeroes.to_le_bytes();
        for (at, data) in self.changes {
            let (magic, parts): (_, [&[u8]; 2]) = match data.is_empty() {
                true => (b"zero", [&[0; 4], &zeroes]),
                false => (b"desc", [&data[4092..], &data[..8]]),
            };
            bytes.extend([&magic[..], parts[0], parts[1]].concat());
            bytes.extend(at.to_le_bytes());
            bytes.extend(self.sequence.to_le_bytes());
        }
        bytes.resize(descriptors, 0);
        for (_, data) in self.changes.iter().filter(|(_, data)| !data.is_empty()) {
            bytes.extend(b"data");
            bytes.extend(((self.sequence >> 32) as u32).to_le_bytes());
            bytes.extend(&data[8..4092]);
            bytes.extend((self.sequence as u32).to_le_bytes());
        }
        sum_vhdx(&mut bytes, 4);
        bytes
    }
}

/// Clears the log and writes entries one after the other from offset `at`, wrapping around at the
/// end.
fn log(image: &mut [u8], at: usize, entries: &[Vec<u8>]) {
    let header = header(image);
    let start = u64_at(image, header + 72) as usize;
    let len = 1 << 20;
    image[start..start + len].fill(0);
    for (index, byte) in entries.concat().into_iter().enumerate() {
        image[start + (at + index) % len] = byte;
    }
}

/// Returns the offset of the newer header.
fn header(image: &[u8]) -> usize {
    let mut headers = [64 << 10, 128 << 10];
    headers.sort_by_key(|at| u64_at(image, at + 8));
    headers[1]
}

#[test]
fn entries_count_in_their_order_and_from_the_one_that_is_needed() {
    let dir = Dir::new();
    let before = unclosed(&dir);
    let image = dir.read("image");
    let (at, flushed) = (region(&image, &BLOCKS) as u64, image.len() as u64);
    let guid = image[header(&image) + 48..][..16].to_vec();
    let right = &before[at as usize..at as usize + 4096];
    // A table that must not become visible: its block 3 is in another place.
    let mut wrong = right.to_vec();
    wrong.copy_within(4 * 8..5 * 8, 3 * 8);
    // Creates an entry with one change. Without data, the change writes zeroes.
    let entry = |tail: usize, sequence, data: &[u8]| {
        let entry = Entry {
            tail: tail as u32,
            sequence,
            guid: &guid,
            flushed,
            changes: &[(at, data)],
            zeroes: 4096,
        };
        entry.bytes()
    };
    let expected = {
        dir.write("image", &before);
        dir.read_by_qemu(Kind::Vhdx, "image").unwrap()
    };
    let end = (1 << 20) - 4096;
    let cases = [
        // Later entries override earlier ones, also if the log wraps around.
        (0, vec![entry(0, 7, &wrong), entry(0, 8, right)], 2),
        (end, vec![entry(end, 7, &wrong), entry(end, 8, right)], 2),
        // The first entry has already been applied.
        (0, vec![entry(0, 7, &[]), entry(4096, 8, right)], 1),
        // The log contains another, older sequence.
        (
            8192,
            vec![entry(8192, 9, right), entry(16384, 3, &wrong)],
            1,
        ),
        // The newer sequence lacks the entry that it needs, so the older one applies.
        (0, vec![entry(0, 3, right), entry(4096, 9, &wrong)], 1),
    ];
    for (number, (start, entries, count)) in cases.into_iter().enumerate() {
        let mut with = image.clone();
        log(&mut with, start, &entries);
        dir.write("image", &with);
        assert_eq!(changes(&dir, "image"), count, "case {number}");
        let ours = dir.open(Kind::Vhdx, "image").unwrap().read(u64::MAX);
        assert!(ours == expected, "case {number}");
    }
    // A wrong checksum, the GUID of another log, and no entry: QEMU treats such logs as empty.
    let mut damaged = entry(0, 7, &wrong);
    damaged[100] ^= 1;
    let other = Entry {
        tail: 0,
        sequence: 7,
        guid: &[1; 16],
        flushed,
        changes: &[(at, &wrong)],
        zeroes: 4096,
    };
    for entries in [vec![damaged], vec![other.bytes()], vec![]] {
        let mut with = image.clone();
        log(&mut with, 0, &entries);
        dir.write("image", &with);
        assert_eq!(changes(&dir, "image"), 0);
        assert!(dir.read_by_qemu(Kind::Vhdx, "image").is_some());
    }
}

#[test]
fn a_log_that_is_not_of_tables_is_refused() {
    let dir = Dir::new();
    unclosed(&dir);
    let image = dir.read("image");
    let guid = image[header(&image) + 48..][..16].to_vec();
    let len = image.len() as u64;
    let sector = vec![5; 4096];
    for (at, flushed, words) in [
        (8 << 20, len, "qemu-img check -r all"),
        (u64::MAX - 4095, len, "qemu-img check -r all"),
        (u64::MAX - 8191, len, "qemu-img check -r all"),
        (3 << 20, len + 1, "its file had"),
    ] {
        let entry = Entry {
            tail: 0,
            sequence: 1,
            guid: &guid,
            flushed,
            changes: &[(at, &sector)],
            zeroes: 4096,
        };
        let mut with = image.clone();
        log(&mut with, 0, &[entry.bytes()]);
        dir.write("image", &with);
        // A change whose end exceeds 64 bits makes the entry invalid, so there is no log.
        if at == u64::MAX - 4095 {
            assert_eq!(changes(&dir, "image"), 0);
            continue;
        }
        let error = dir.open(Kind::Vhdx, "image").err().unwrap().to_string();
        assert!(error.contains(words), "{error}");
    }
    // Overlapping ranges of zeroes, all of which a read would have to search.
    let place = region(&image, &BLOCKS) as u64;
    let some = vec![(place, &[][..]); 5000];
    let mut with = image.clone();
    let entry = Entry {
        tail: 0,
        sequence: 1,
        guid: &guid,
        flushed: 0,
        changes: &some,
        zeroes: 1 << 20,
    };
    log(&mut with, 0, &[entry.bytes()]);
    dir.write("image", &with);
    let error = dir.open(Kind::Vhdx, "image").err().unwrap().to_string();
    assert!(error.contains("qemu-img check -r all"), "{error}");
    // The maximum amount of work that a log of 32 MiB can cause.
    let mut with = image[..1 << 20].to_vec();
    with.resize(64 << 20, 0);
    let at = header(&with);
    with[at + 68..at + 72].copy_from_slice(&(32_u32 << 20).to_le_bytes());
    with[at + 72..at + 80].copy_from_slice(&(2_u64 << 20).to_le_bytes());
    sum_vhdx(&mut with[at..at + 4096], 4);
    for start in (2 << 20..34 << 20).step_by(4096) {
        let mut entry = b"loge\0\0\0\0".to_vec();
        entry.extend((32_u32 << 20).to_le_bytes());
        entry.extend([0; 4]);
        entry.extend(1_u64.to_le_bytes());
        entry.extend([0; 8]);
        entry.extend(&guid);
        with[start..start + entry.len()].copy_from_slice(&entry);
    }
    dir.write("image", &with);
    let error = dir.open(Kind::Vhdx, "image").err().unwrap().to_string();
    assert!(error.contains("qemu-img check -r all"), "{error}");
}

/// Changes the logical sector size in the metadata to 4096 bytes.
fn enlarge_sectors(dir: &Dir, image: &[u8]) {
    let metadata = region(image, &METADATA);
    let mut entries = (metadata + 32..).step_by(32);
    let entry = entries
        .find(|at| image[*at..].starts_with(&LOGICAL))
        .unwrap();
    let item = metadata + u64_at(image, entry + 16) as u32 as usize;
    assert_eq!(image[item..item + 4], 512_u32.to_le_bytes());
    dir.patch("image", item as u64, &4096_u32.to_le_bytes());
}

/// qemu-img cannot create images with such sectors and reads them incorrectly.
///
/// Small images with either sector size differ only in the number in the metadata.
#[test]
fn sectors_may_have_4096_bytes() {
    let dir = Dir::new();
    let raw = disk(24 << 20, 11);
    dir.write("raw", &raw);
    dir.convert(Kind::Vhdx, "block_size=1M", "image");
    enlarge_sectors(&dir, &dir.read("image"));
    let opened = dir.open(Kind::Vhdx, "image").unwrap();
    assert!(opened.read(u64::MAX) == raw);
    let details = &opened.image.describe().details;
    let is_4k = |size: &u32| *size == 4096;
    assert!(
        matches!(details, Details::Vhdx { logical_sector_size, .. } if is_4k(logical_sector_size))
    );
}

/// Large images with 4096-byte sectors have an eighth of the bitmap entries.
#[test]
fn larger_sectors_have_fewer_bitmaps() {
    let dir = Dir::new();
    let options = "block_size=1M";
    dir.run(
        "qemu-img",
        &["create", "-f", "vhdx", "-o", options, "image", "40G"],
    );
    dir.run(
        "qemu-io",
        &["-f", "vhdx", "-c", "write -P 3 33G 1M", "image"],
    );
    let image = dir.read("image");
    let table = region(&image, &BLOCKS);
    let (block, per_bitmap) = (33 << 10, 1 << 12);
    let (from, to) = (block + block / per_bitmap, block + block / (8 * per_bitmap));
    let [from, to] = [from, to].map(|index| table + index * 8);
    assert_eq!(image[from] & 7, 6);
    dir.patch("image", to as u64, &image[from..from + 8]);
    dir.patch("image", from as u64, &[0; 8]);
    enlarge_sectors(&dir, &image);
    let extents = dir.open(Kind::Vhdx, "image").unwrap().extents();
    let mut at = 0;
    let mut data = Vec::new();
    for (len, place) in extents {
        if place != fathom_foreign::Place::Zero {
            data.push((at, len));
        }
        at += len;
    }
    assert_eq!((data, at), (vec![(33 << 30, 1 << 20)], 40 << 30));
}
