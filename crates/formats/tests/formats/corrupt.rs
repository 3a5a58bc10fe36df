//! Broken images: `qemu-img check` and Fathom's check agree, and after Fathom's repair QEMU finds
//! no errors.

use crate::support::*;
use fathom_formats::Format;
use fathom_formats::offline::check::Repair;
use fathom_formats::qcow2::{Geometry, Header};
use std::path::Path;

/// The places of structures in an image.
struct Map {
    header: Header,
    bytes: Vec<u8>,
    g: Geometry,
}

impl Map {
    fn of(bytes: &[u8]) -> Map {
        let header = Header::parse(bytes).unwrap();
        Map {
            g: header.geometry(),
            header,
            bytes: bytes.to_vec(),
        }
    }

    fn word(&self, at: u64) -> u64 {
        let at = at as usize;
        u64::from_be_bytes(self.bytes[at..at + 8].try_into().unwrap())
    }

    fn put(&mut self, at: u64, value: u64) {
        let at = at as usize;
        self.bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
    }

    fn offset(word: u64) -> u64 {
        word & 0x00ff_ffff_ffff_fe00
    }

    /// Returns the offset of the first L1 entry in use.
    fn l1_entry(&self) -> u64 {
        let entries = 0..u64::from(self.header.l1_entries);
        let mut places = entries.map(|i| self.header.l1_offset.0 + 8 * i);
        places.find(|at| self.word(*at) != 0).unwrap()
    }

    fn l2(&self) -> u64 {
        Map::offset(self.word(self.l1_entry()))
    }

    /// Returns the offsets of the L2 entries of standard clusters with data.
    fn l2_entries(&self) -> Vec<u64> {
        let size = self.g.l2_entry_size();
        let places = (0..self.g.l2_entries()).map(|i| self.l2() + i * size);
        places
            .filter(|at| {
                let word = self.word(*at);
                word >> 62 & 1 == 0 && Map::offset(word) != 0
            })
            .collect()
    }

    fn compressed(&self) -> Option<u64> {
        let size = self.g.l2_entry_size();
        let mut places = (0..self.g.l2_entries()).map(|i| self.l2() + i * size);
        places.find(|at| self.word(*at) >> 62 & 1 == 1)
    }

    fn refcount_block(&self) -> u64 {
        self.word(self.header.refcount_table_offset.0)
    }
}

/// Number of randomly broken images of each kind.
const RANDOM_ROUNDS: usize = 60;

type Break = fn(&mut Map) -> bool;

/// Ways to break a qcow2 image. A function returns false if the image does not allow the change.
const BREAKS: &[(&str, Break)] = &[
    ("a refcount of a data cluster is 0", |m| {
        set_refcount(m, 0, 0)
    }),
    ("a refcount of a data cluster is 2", |m| {
        set_refcount(m, 1, 2)
    }),
    ("all refcounts are 0", |m| {
        let (at, len) = (m.refcount_block() as usize, m.g.cluster_size() as usize);
        m.bytes[at..at + len].fill(0);
        true
    }),
    ("all refcounts are the highest", |m| {
        let (at, len) = (m.refcount_block() as usize, m.g.cluster_size() as usize);
        m.bytes[at..at + len].fill(0xff);
        true
    }),
    ("the refcount block is gone", |m| {
        m.put(m.header.refcount_table_offset.0, 0);
        true
    }),
    ("the refcount block is not aligned", |m| {
        m.put(m.header.refcount_table_offset.0, m.refcount_block() + 512);
        m.g.cluster_bits > 9
    }),
    ("the refcount block has reserved bits", |m| {
        m.put(m.header.refcount_table_offset.0, m.refcount_block() + 4);
        true
    }),
    ("the refcount block is beyond the file", |m| {
        m.put(m.header.refcount_table_offset.0, 1 << 40);
        true
    }),
    ("the refcount block is an L2 table", |m| {
        m.put(m.header.refcount_table_offset.0, m.l2());
        true
    }),
    ("the refcount block is guest data", |m| {
        let data = Map::offset(m.word(m.l2_entries()[0]));
        m.put(m.header.refcount_table_offset.0, data);
        true
    }),
    ("two refcount blocks are one", |m| {
        m.put(m.header.refcount_table_offset.0 + 8, m.refcount_block());
        m.header.refcount_table_bytes() > 8
    }),
    ("the refcount table is the L1 table", |m| {
        m.put(48, m.header.l1_offset.0);
        true
    }),
    ("the refcount table is data", |m| {
        let data = Map::offset(m.word(m.l2_entries()[0]));
        m.put(48, data);
        true
    }),
    ("two guest clusters are one host cluster", |m| {
        let entries = m.l2_entries();
        m.put(entries[0], m.word(entries[1]));
        m.header.refcount_order > 0
    }),
    ("an L2 entry is not aligned", |m| {
        let at = m.l2_entries()[0];
        m.put(at, m.word(at) + 512);
        m.g.cluster_bits > 9
    }),
    ("an L2 entry has reserved bits", |m| {
        let at = m.l2_entries()[0];
        m.put(at, m.word(at) | 1 << 58 | 4);
        true
    }),
    ("an L2 entry is beyond the file", |m| {
        m.put(m.l2_entries()[0], 1 << 63 | 1 << 45);
        true
    }),
    ("an L2 entry points to the L1 table", |m| {
        m.put(m.l2_entries()[0], 1 << 63 | m.header.l1_offset.0);
        m.header.refcount_order > 0
    }),
    ("an L2 entry points to the refcount block", |m| {
        m.put(m.l2_entries()[0], 1 << 63 | m.refcount_block());
        m.header.refcount_order > 0
    }),
    ("an L2 entry points to the refcount table", |m| {
        m.put(
            m.l2_entries()[0],
            1 << 63 | m.header.refcount_table_offset.0,
        );
        m.header.refcount_order > 0
    }),
    ("an L2 entry points to its L2 table", |m| {
        m.put(m.l2_entries()[0], 1 << 63 | m.l2());
        m.header.refcount_order > 0
    }),
    ("an L2 entry has lost its copied flag", |m| {
        let at = *m.l2_entries().last().unwrap();
        m.put(at, m.word(at) & !(1 << 63));
        true
    }),
    ("an L1 entry has lost its copied flag", |m| {
        m.put(m.l1_entry(), m.l2());
        true
    }),
    ("an L1 entry is gone", |m| {
        m.put(m.l1_entry(), 0);
        true
    }),
    ("an L1 entry has reserved bits", |m| {
        m.put(m.l1_entry(), 1 << 63 | 1 << 60 | m.l2());
        true
    }),
    ("an L1 entry is not aligned", |m| {
        m.put(m.l1_entry(), 1 << 63 | (m.l2() + 512));
        m.g.cluster_bits > 9
    }),
    ("an L1 entry is beyond the file", |m| {
        m.put(m.l1_entry(), 1 << 63 | 1 << 50);
        true
    }),
    ("an L1 entry points to the refcount table", |m| {
        m.put(m.l1_entry(), 1 << 63 | m.header.refcount_table_offset.0);
        true
    }),
    ("an L1 entry points to data", |m| {
        let data = Map::offset(m.word(m.l2_entries()[0]));
        m.put(m.l1_entry(), 1 << 63 | data);
        m.header.refcount_order > 0
    }),
    ("an L1 entry is random", |m| {
        m.put(m.l1_entry(), 0x5ecd_ae2d_3cc5_cfbd);
        true
    }),
    ("two L1 entries are one", |m| {
        m.put(m.l1_entry() + 8, m.word(m.l1_entry()));
        m.header.l1_entries > 1 && m.header.refcount_order > 1
    }),
    ("a compressed cluster has the copied flag", |m| {
        let at = m.compressed();
        at.inspect(|at| m.put(*at, m.word(*at) | 1 << 63)).is_some()
    }),
    ("a compressed cluster is beyond the file", |m| {
        let at = m.compressed();
        at.inspect(|at| m.put(*at, m.word(*at) | 1 << 40)).is_some()
    }),
    ("a subcluster is allocated and zero", |m| {
        let at = m.l2_entries()[0] + 8;
        m.put(at, 1 << 32 | 1);
        m.g.extended_l2
    }),
    ("subclusters without a cluster", |m| {
        m.put(m.l2_entries()[0], 0);
        m.g.extended_l2
    }),
    ("the file ends in its data", |m| {
        let at = m.bytes.len() - 3 * m.g.cluster_size() as usize;
        m.bytes.truncate(at);
        true
    }),
    ("the file ends after its L1 table", |m| {
        m.bytes
            .truncate((m.header.l1_offset.0 + m.g.cluster_size()) as usize);
        true
    }),
    ("the file has grown", |m| {
        let len = m.bytes.len() + 5 * m.g.cluster_size() as usize + 100;
        m.bytes.resize(len, 0);
        true
    }),
    ("the snapshots' table is beyond the file", |m| {
        // The entries are zeroes, and therefore incomplete.
        m.put(64, (m.bytes.len() as u64 + (2 << 20)) & !((2 << 20) - 1));
        m.header.snapshots > 0
    }),
    ("a snapshot's L1 table is not aligned", |m| {
        let at = m.header.snapshots_offset.0;
        m.header.snapshots > 0 && m.g.cluster_bits > 9 && {
            m.put(at, m.word(at) + 512);
            true
        }
    }),
    ("a snapshot's L1 table is beyond the file", |m| {
        m.header.snapshots > 0 && {
            m.put(m.header.snapshots_offset.0, 1 << 40);
            true
        }
    }),
    ("a snapshot's L1 table is the active one", |m| {
        m.header.snapshots > 0 && {
            m.put(m.header.snapshots_offset.0, m.header.l1_offset.0);
            true
        }
    }),
    ("a bitmap's cluster is beyond the file", |m| {
        let table = m.header.bitmaps().map(|b| m.word(b.directory_offset.0));
        table.inspect(|at| m.put(*at, 1 << 40)).is_some()
    }),
    ("a bitmap's cluster is not aligned", |m| {
        let table = m.header.bitmaps().map(|b| m.word(b.directory_offset.0));
        table.inspect(|at| m.put(*at, 0x200 + 2)).is_some()
    }),
];

fn set_refcount(m: &mut Map, which: usize, value: u64) -> bool {
    let data = Map::offset(m.word(m.l2_entries()[which]));
    let cluster = data >> m.g.cluster_bits;
    let (block, len) = (m.refcount_block() as usize, m.g.cluster_size() as usize);
    let fits = cluster < m.g.refcount_block_entries() && value <= m.g.refcount_max();
    if fits {
        let block = &mut m.bytes[block..block + len];
        let order = m.header.refcount_order;
        fathom_formats::qcow2::refcount::set(block, order, cluster as usize, value);
    }
    fits
}

fn verdict(status: i32) -> &'static str {
    match status {
        0 => "clean",
        1 => "not checked",
        2 => "corrupt",
        3 => "leaks",
        _ => "?",
    }
}

fn ours(path: &Path, repair: Repair) -> String {
    match check_file(path, Format::Qcow2, repair) {
        Ok(report) => verdict(report.exit_status().into()).to_owned(),
        Err(error) => format!("not checked: {error}"),
    }
}

fn try_break(dir: &Path, sound: &[u8], options: &str, what: &str, change: Break) -> Vec<String> {
    let mut map = Map::of(sound);
    if !change(&mut map) {
        return Vec::new();
    }
    let path = dir.join("broken");
    std::fs::write(&path, &map.bytes).unwrap();
    let theirs = verdict(qemu_check(dir, "broken", "qcow2").0);
    let mut wrong = Vec::new();
    let seen = ours(&path, Repair::Nothing);
    // QEMU does not check some images that Fathom checks.
    let alike = seen.starts_with(theirs) || theirs == "not checked" && seen == "corrupt";
    if !alike {
        wrong.push(format!("{options}: {what}: {seen}, QEMU says {theirs}"));
    }
    assert!(
        std::fs::read(&path).unwrap() == map.bytes,
        "{options}: {what}"
    );
    let repaired = ours(&path, Repair::All);
    let after = verdict(qemu_check(dir, "broken", "qcow2").0);
    if repaired != "clean" || after != "clean" {
        wrong.push(format!(
            "{options}: {what}: {repaired} after the repair, QEMU says {after}"
        ));
    }
    wrong
}

#[test]
fn broken_qcow2_images_are_judged_as_qemu_does_and_repaired() {
    let mut wrong = Vec::new();
    let mut tried = 0;
    for options in [
        "",
        "compat=0.10",
        "cluster_size=512",
        "cluster_size=4k,refcount_bits=1",
        "cluster_size=4k,refcount_bits=64,lazy_refcounts=on",
        "cluster_size=16k,extended_l2=on,refcount_bits=8",
    ] {
        let dir = dir();
        let dir = dir.path();
        create_file(dir, "i", "qcow2", &pairs(options), 8 << 20);
        qemu_io(
            dir,
            "i",
            "qcow2",
            &["write -P 1 0 70k", "write -c 1M 64k", "write -P 2 6M 200k"],
        );
        if !options.contains("refcount_bits=1") {
            qemu_img(dir, &["snapshot", "-c", "s", "i"]);
            qemu_io(dir, "i", "qcow2", &["write -P 3 0 100k"]);
        }
        if !options.contains("compat=0.10") {
            qemu_img(dir, &["bitmap", "--add", "-g", "512", "i", "b0"]);
            qemu_io(dir, "i", "qcow2", &["write -P 4 6M 300k"]);
        }
        let sound = std::fs::read(dir.join("i")).unwrap();
        for (what, change) in BREAKS {
            tried += 1;
            wrong.extend(try_break(dir, &sound, options, what, *change));
        }
    }
    assert!(wrong.is_empty(), "{tried} tried:\n{}", wrong.join("\n"));
}

/// Returns the disk's bytes as QEMU reads them, or `None` if QEMU cannot read the image.
fn guest_bytes(dir: &Path, name: &str) -> Option<Vec<u8>> {
    let made = std::process::Command::new("qemu-img")
        .args(["convert", "-f", "qcow2", "-O", "raw", name, "guest"])
        .current_dir(dir)
        .output()
        .unwrap();
    made.status
        .success()
        .then(|| std::fs::read(dir.join("guest")).unwrap())
}

/// Repairs leaks of a broken image. Returns the differences from `qemu-img check -r leaks`, and
/// whether the guest's data could be compared.
fn try_leaks(dir: &Path, sound: &[u8], what: &str, change: Break) -> (Vec<String>, bool) {
    let mut map = Map::of(sound);
    if !change(&mut map) {
        return (Vec::new(), false);
    }
    for name in ["broken", "theirs"] {
        std::fs::write(dir.join(name), &map.bytes).unwrap();
    }
    let before = guest_bytes(dir, "broken");
    let seen = ours(&dir.join("broken"), Repair::Leaks);
    let checked = std::process::Command::new("qemu-img")
        .args(["check", "-r", "leaks", "-f", "qcow2", "theirs"])
        .current_dir(dir)
        .output()
        .unwrap();
    let theirs = verdict(checked.status.code().unwrap());
    let mut wrong = Vec::new();
    // Fathom demands a rebuild if the refcount table or its blocks have other users, where QEMU
    // continues.
    let stricter = theirs == "corrupt" && seen == "not checked";
    if !seen.starts_with(theirs) && !stricter {
        wrong.push(format!("{what}: {seen}, QEMU says {theirs}"));
    }
    if before.is_some() && guest_bytes(dir, "broken") != before {
        wrong.push(format!("{what}: the guest's data has changed"));
    }
    (wrong, before.is_some())
}

#[test]
fn repair_of_leaks_changes_no_guest_data_and_ends_as_qemu_does() {
    let (mut wrong, mut compared) = (Vec::new(), 0);
    for options in ["", "cluster_size=512", "cluster_size=4k,refcount_bits=64"] {
        let dir = dir();
        let dir = dir.path();
        create_file(dir, "i", "qcow2", &pairs(options), 8 << 20);
        qemu_io(
            dir,
            "i",
            "qcow2",
            &["write -P 1 0 70k", "write -c 1M 64k", "write -P 2 6M 200k"],
        );
        let sound = std::fs::read(dir.join("i")).unwrap();
        for (what, change) in BREAKS {
            let (found, guest) = try_leaks(dir, &sound, what, *change);
            wrong.extend(found.iter().map(|text| format!("{options}: {text}")));
            compared += usize::from(guest);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(compared > 30, "{compared} compared");
}

type BreakQed = fn(&mut Vec<u8>);

/// Ways to break a QED image with 4 KiB clusters, whose L1 table is in clusters 1 to 4 and whose
/// first L2 table is in clusters 5 to 8.
const QED_BREAKS: &[(&str, BreakQed)] = &[
    ("a data offset is not aligned", |b| {
        put_le(b, 0x5000, 0x9200)
    }),
    ("a data offset is beyond the file", |b| {
        put_le(b, 0x5000, 1 << 40)
    }),
    ("a data offset is in the header", |b| {
        put_le(b, 0x5000, 0x800)
    }),
    ("two data offsets are one", |b| put_le(b, 0x5000, 0x5000)),
    ("a data offset is the L1 table's", |b| {
        put_le(b, 0x5008, 0x1000)
    }),
    ("a data cluster is lost", |b| put_le(b, 0x5000, 0)),
    ("a data cluster is zero", |b| put_le(b, 0x5000, 1)),
    ("an L2 offset is not aligned", |b| put_le(b, 0x1000, 0x5010)),
    ("an L2 offset is beyond the file", |b| {
        put_le(b, 0x1000, 1 << 50)
    }),
    ("an L2 table does not fit", |b| {
        let last = b.len() as u64 - 0x1000;
        put_le(b, 0x1000, last);
    }),
    ("two L2 offsets are one", |b| put_le(b, 0x1008, 0x5000)),
    ("the L2 table is the L1 table", |b| {
        put_le(b, 0x1000, 0x1000)
    }),
    ("the file is cut", |b| b.truncate(b.len() - 0x3000)),
    ("the file has grown", |b| b.resize(b.len() + 0x2100, 0)),
    ("it must be checked", |b| b[16] |= 2),
    ("unknown autoclear bits", |b| b[39] = 0x80),
];

fn put_le(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

#[test]
fn broken_qed_images_are_judged_as_qemu_does_and_repaired() {
    let dir = dir();
    let dir = dir.path();
    create_file(dir, "i", "qed", &pairs("cluster_size=4k"), 8 << 20);
    qemu_io(dir, "i", "qed", &["write -P 1 0 70k", "write -P 2 6M 200k"]);
    let sound = std::fs::read(dir.join("i")).unwrap();
    for (what, change) in QED_BREAKS {
        let mut bytes = sound.clone();
        change(&mut bytes);
        for name in ["ours", "theirs"] {
            std::fs::write(dir.join(name), &bytes).unwrap();
        }
        let seen = check_file(&dir.join("ours"), Format::Qed, Repair::Nothing).unwrap();
        let (status, json) = qemu_check(dir, "ours", "qed");
        assert_eq!(i32::from(seen.exit_status()), status, "{what}");
        assert_eq!(Some(seen.to_json("ours", Format::Qed)), json, "{what}");
        // Fathom repairs as much as QEMU does.
        run(
            dir,
            "qemu-img",
            &["check", "-r", "all", "-f", "qed", "theirs"],
        );
        check_file(&dir.join("ours"), Format::Qed, Repair::All).unwrap();
        let read = |name: &str| std::fs::read(dir.join(name)).unwrap();
        assert!(read("ours") == read("theirs"), "{what}");
    }
}

/// Replaces one to three numbers in the metadata with others that could be offsets.
fn random_changes(map: &mut Map, random: &mut impl FnMut() -> u64) {
    let cluster = map.g.cluster_size();
    let clusters = map.bytes.len() as u64 / cluster;
    let tables = [
        (map.header.l1_offset.0, u64::from(map.header.l1_entries) * 8),
        (map.l2(), cluster),
        (map.header.refcount_table_offset.0, 64),
        (map.refcount_block(), (clusters * 2).min(cluster)),
        (map.header.snapshots_offset.0, 48),
        (40, 32),
    ];
    for _ in 0..1 + random() % 3 {
        let (table, len) = tables[(random() % tables.len() as u64) as usize];
        let at = table + random() % (len / 8) * 8;
        let place = random() % (clusters + 2) * cluster;
        let value = match random() % 8 {
            0 => 0,
            1 => random(),
            2 => 1 << (random() % 64),
            3 => map.word(at) ^ 1 << (random() % 64),
            4 => place + 512,
            5 => place,
            _ => place | 1 << 63,
        };
        map.put(at, value);
    }
}

#[test]
fn broken_qcow2_images_are_checked_as_by_qemu_and_repaired() {
    let mut state = 0x5eed_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let (mut wrong, mut repaired) = (Vec::new(), 0);
    for options in ["cluster_size=512", "cluster_size=16k,extended_l2=on"] {
        let dir = dir();
        let dir = dir.path();
        create_file(dir, "i", "qcow2", &pairs(options), 2 << 20);
        let writes = ["write -P 1 0 70k", "write -P 2 600k 20k"];
        qemu_io(dir, "i", "qcow2", &writes);
        qemu_img(dir, &["snapshot", "-c", "s", "i"]);
        qemu_io(dir, "i", "qcow2", &["write -P 3 0 10k"]);
        let sound = std::fs::read(dir.join("i")).unwrap();
        for round in 0..RANDOM_ROUNDS {
            let mut map = Map::of(&sound);
            random_changes(&mut map, &mut random);
            let path = dir.join("broken");
            std::fs::write(&path, &map.bytes).unwrap();
            let theirs = verdict(qemu_check(dir, "broken", "qcow2").0);
            let seen = ours(&path, Repair::Nothing);
            if !seen.starts_with(theirs) && theirs != "not checked" {
                wrong.push(format!("{options} {round}: {seen}, QEMU says {theirs}"));
            }
            let after = ours(&path, Repair::All);
            if after == "clean" {
                repaired += 1;
                let theirs = verdict(qemu_check(dir, "broken", "qcow2").0);
                if theirs != "clean" {
                    wrong.push(format!("{options} {round}: repaired, QEMU says {theirs}"));
                }
            } else if !after.contains("cannot be repaired") && !seen.starts_with("not checked") {
                wrong.push(format!("{options} {round}: {after} after the repair"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(repaired > RANDOM_ROUNDS, "only {repaired} were repaired");
}
