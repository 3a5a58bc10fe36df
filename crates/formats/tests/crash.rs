//! Power cuts while an image is repaired or made: what is left can be
//! repaired, and reads as before.

mod support;

use fathom_formats::img::check::{Options, Repair, check};
use fathom_formats::img::create::{self, create};
use fathom_formats::img::{Format, Image};
use fathom_formats::qcow2::{Cluster, Header, L1Entry, L2Entry, refcount};
use fathom_formats::testing::MemoryFile;
use fathom_formats::{ImageFile, Result};
use std::io;
use std::sync::Mutex;
use support::*;

const LIMIT: u64 = 64 << 20;
const SECTOR: usize = 512;

#[derive(Clone)]
enum Step {
    Write(u64, Vec<u8>),
    SetLen(u64),
    Discard(u64, u64),
    Sync,
}

/// A file that remembers what was done to it.
struct Recorder {
    file: MemoryFile,
    steps: Mutex<Vec<Step>>,
}

impl Recorder {
    fn new(bytes: &[u8]) -> Recorder {
        Recorder {
            file: MemoryFile::new(bytes.to_vec(), LIMIT),
            steps: Mutex::default(),
        }
    }

    fn note(&self, step: Step) {
        self.steps.lock().unwrap().push(step);
    }
}

impl ImageFile for Recorder {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.note(Step::Write(offset, buf.to_vec()));
        self.file.write_at(buf, offset)
    }

    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.note(Step::SetLen(len));
        self.file.set_len(len)
    }

    fn sync(&self) -> io::Result<()> {
        self.note(Step::Sync);
        Ok(())
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.note(Step::SetLen(self.len()?.max(offset + len)));
        self.file.allocate(offset, len)
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.note(Step::Discard(offset, len));
        self.file.discard(offset, len)
    }
}

/// xorshift: enough to choose what a disk has lost.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

fn apply(file: &MemoryFile, step: &Step, random: Option<&mut Random>) {
    match (step, random) {
        (Step::Write(at, bytes), None) => file.write_at(bytes, *at).unwrap(),
        (Step::Write(at, bytes), Some(random)) => {
            // Sectors of it, from wherever it starts.
            let mut done = 0;
            while done < bytes.len() {
                let sector = SECTOR - (*at as usize + done) % SECTOR;
                let end = bytes.len().min(done + sector);
                if random.next() & 1 == 0 {
                    file.write_at(&bytes[done..end], at + done as u64).unwrap();
                }
                done = end;
            }
        }
        (Step::SetLen(len), None) => file.set_len(*len).unwrap(),
        (Step::Discard(at, len), None) => file.discard(*at, *len).unwrap(),
        (Step::Sync, None) => {}
        (_, Some(random)) => {
            if random.next() & 1 == 0 {
                apply(file, step, None);
            }
        }
    }
}

/// The file after a cut: steps before the last flush are there (if the disk
/// flushes at all), of those after it some.
fn cut(before: &[u8], steps: &[Step], flushes: bool, random: &mut Random) -> MemoryFile {
    let file = MemoryFile::new(before.to_vec(), LIMIT);
    let is_sync = |s: &Step| flushes && matches!(s, Step::Sync);
    let durable = steps.iter().rposition(is_sync).map_or(0, |at| at + 1);
    for (i, step) in steps.iter().enumerate() {
        apply(&file, step, (i >= durable).then_some(&mut *random));
    }
    file
}

fn fix(file: &dyn ImageFile) -> Result<u8> {
    let options = Options {
        repair: Repair::All,
        ..Options::default()
    };
    Ok(check(file, Format::Qcow2, &options, &mut |_| {})?.exit_status())
}

/// What the guest reads; compressed clusters as they are stored.
fn contents(file: &MemoryFile) -> Vec<u8> {
    let bytes = file.bytes();
    let header = Header::parse(&bytes).unwrap();
    let g = header.geometry();
    let mut disk = Vec::new();
    let size = g.l2_entry_size() as usize;
    let clusters = g.clusters_of(header.size);
    for guest in (0..clusters).map(|i| i << g.cluster_bits) {
        let at = (header.l1_offset + 8 * g.l1_index(guest)) as usize;
        let word = u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
        let start = disk.len();
        if let Some(table) = L1Entry(word).l2_table(&g).unwrap() {
            let at = table as usize + g.l2_index(guest) as usize * size;
            match L2Entry::parse(&bytes, at, &g).decode(&g).unwrap() {
                Cluster::Data { host } => {
                    let host = host as usize;
                    let end = bytes.len().min(host + g.cluster_size() as usize);
                    disk.extend(&bytes[host..end]);
                }
                Cluster::Compressed(c) => {
                    let end = bytes.len().min((c.offset + c.len) as usize);
                    disk.extend(&bytes[c.offset as usize..end]);
                }
                _ => {}
            }
        }
        // Only what is stored counts here; the places of zeroes need no bytes.
        disk.extend(((disk.len() - start) as u64).to_be_bytes());
    }
    disk
}

/// What was wrong with the refcounts, which a repair sets right without a
/// change to what the guest reads.
fn break_refcounts(bytes: &mut [u8], how: usize) {
    let header = Header::parse(bytes).unwrap();
    let g = header.geometry();
    let table = header.refcount_table_offset as usize;
    let block = u64::from_be_bytes(bytes[table..table + 8].try_into().unwrap()) as usize;
    let entries = g.refcount_block_entries() as usize;
    let len = g.cluster_size() as usize;
    match how {
        0 => bytes[block..block + len].fill(0),
        1 => bytes[block..block + len].fill(0xff),
        2 => bytes[table..table + 8].fill(0),
        3 => bytes[table + 6] = 3,
        // References beyond the first few are lost, and there are leaks.
        4 => {
            for i in 0..entries {
                let count = refcount::get(&bytes[block..], header.refcount_order, i);
                let count = if i % 3 == 0 { 0 } else { count + 1 };
                let count = count.min(g.refcount_max());
                refcount::set(&mut bytes[block..], header.refcount_order, i, count);
            }
        }
        // The table is the L1 table.
        _ => bytes[48..56].copy_from_slice(&header.l1_offset.to_be_bytes()),
    }
}

#[test]
fn a_repair_that_is_cut_short_can_be_done_again() {
    let mut random = Random(0x5eed_0ffa_7403);
    let mut cuts = 0;
    for options in [
        "cluster_size=512",
        "cluster_size=4k,refcount_bits=64",
        "cluster_size=4k,refcount_bits=2",
        "compat=0.10,cluster_size=1k",
    ] {
        let dir = dir();
        let dir = dir.path();
        create_file(dir, "i", "qcow2", &pairs(options), 1 << 20);
        let writes = ["write -P 1 0 70k", "write -P 2 600k 50k"];
        qemu_io(dir, "i", "qcow2", &writes);
        qemu_img(dir, &["snapshot", "-c", "s", "i"]);
        qemu_io(dir, "i", "qcow2", &["write -P 3 10k 70k", "discard 0 4k"]);
        let sound = std::fs::read(dir.join("i")).unwrap();
        let expected = contents(&MemoryFile::new(sound.clone(), LIMIT));
        for how in 0..6 {
            let mut broken = sound.clone();
            break_refcounts(&mut broken, how);
            let recorder = Recorder::new(&broken);
            assert_eq!(fix(&recorder).unwrap(), 0, "{options} {how}");
            assert!(contents(&recorder.file) == expected, "{options} {how}");
            let steps = recorder.steps.into_inner().unwrap();
            assert!(steps.len() > 2, "nothing to cut");
            let every = steps.len().div_ceil(60);
            let ends = (0..=steps.len()).step_by(every);
            for end in ends.flat_map(|end| [end; 10]) {
                let file = cut(&broken, &steps[..end], true, &mut random);
                assert!(contents(&file) == expected, "{options} {how} {end}");
                assert_eq!(fix(&file).unwrap(), 0, "{options} {how} {end}");
                assert!(contents(&file) == expected, "{options} {how} {end}");
                cuts += 1;
            }
        }
    }
    assert!(cuts > 1000, "only {cuts} cuts");
}

/// How often a power cut while an image is made leaves something that looks
/// like an image and is not the one that was to be.
fn half_made(format: &str, options: &str, flushes: bool) -> usize {
    let mut random = Random(7);
    let format = Format::from_name(format).unwrap();
    let mut parsed = create::Options::new(format);
    for (name, value) in pairs(options) {
        parsed.set(name, value, parse_size).unwrap();
    }
    // What was there before does not count.
    let before = vec![0xa5; 1 << 20];
    let recorder = Recorder::new(&before);
    create(&recorder, None, &parsed, 1 << 20).unwrap();
    let whole = recorder.file.bytes().clone();
    let steps = recorder.steps.into_inner().unwrap();
    let ends = (0..=steps.len()).flat_map(|end| [end; 5]);
    let is_half = |end: usize| {
        let file = cut(&before, &steps[..end], flushes, &mut random);
        Image::read(&file, format).is_ok() && *file.bytes() != whole
    };
    ends.map(is_half).filter(|half| *half).count()
}

#[test]
fn an_image_that_is_cut_short_is_none() {
    for (format, options) in [
        ("qcow2", "preallocation=metadata,cluster_size=4k"),
        ("qcow2", "cluster_size=512"),
        ("qed", "cluster_size=4k"),
    ] {
        assert_eq!(half_made(format, options, true), 0, "{options}");
        // The test sees what it should see.
        assert_ne!(half_made(format, options, false), 0, "{options}");
    }
}
