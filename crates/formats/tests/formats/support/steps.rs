//! A file that logs its operations, and the states that a power cut may leave.

use fathom_files::ImageFile;
use fathom_formats::offline::check::{Options, check};
use fathom_formats::qcow2::{Cluster, Header, L1Entry, L2Entry};
use fathom_formats::testing::MemoryFile;
use fathom_formats::{Format, GuestOffset, HostOffset, Result};
use fathom_testing::Tried;
use parking_lot::Mutex;
use std::io;
use std::panic::AssertUnwindSafe;

/// Maximum length of the file in bytes.
pub const LIMIT: u64 = 64 << 20;
const SECTOR: usize = 512;

/// An operation on a file.
#[derive(Clone)]
pub enum Step {
    Write(u64, Vec<u8>),
    SetLen(u64),
    Discard(u64, u64),
    Sync,
}

/// A file that logs its operations.
pub struct Recorder {
    pub file: MemoryFile,
    pub steps: Mutex<Vec<Step>>,
}

impl Recorder {
    pub fn new(bytes: &[u8]) -> Recorder {
        Recorder {
            file: MemoryFile::new(bytes.to_vec(), LIMIT),
            steps: Mutex::default(),
        }
    }

    fn note(&self, step: Step) {
        self.steps.lock().push(step);
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

/// An xorshift generator, which chooses what a disk loses.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
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
            // A random subset of the sectors. The first and last may be incomplete.
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

/// Returns the file after a power cut. Steps before the last flush are durable if the disk flushes
/// at all; of the later steps, a random subset is.
pub fn cut(before: &[u8], steps: &[Step], flushes: bool, random: &mut Random) -> MemoryFile {
    let file = MemoryFile::new(before.to_vec(), LIMIT);
    let is_sync = |s: &Step| flushes && matches!(s, Step::Sync);
    let durable = steps.iter().rposition(is_sync).map_or(0, |at| at + 1);
    for (i, step) in steps.iter().enumerate() {
        apply(&file, step, (i >= durable).then_some(&mut *random));
    }
    file
}

/// Checks that a qcow2 image is sound and in one of these states. Returns the problem, if any.
pub fn problem<S: PartialEq>(
    state: fn(&MemoryFile) -> S,
    file: &MemoryFile,
    either: &[&S],
) -> Option<String> {
    match check(file, Format::Qcow2, &Options::default(), &mut |_| {}) {
        Err(error) => return Some(error.to_string()),
        Ok(report) if report.exit_status() != 0 => return Some(format!("{report:?}")),
        Ok(_) => {}
    }
    match std::panic::catch_unwind(AssertUnwindSafe(|| state(file))) {
        Ok(found) if either.contains(&&found) => None,
        _ => Some("it is neither the old image nor the new one".into()),
    }
}

/// Changes an image, with `tears` power cuts after each step. Returns the problems.
pub fn cuts<S: PartialEq>(
    before: &[u8],
    change: &dyn Fn(&dyn ImageFile) -> Result<()>,
    state: fn(&MemoryFile) -> S,
    flushes: bool,
    tears: usize,
) -> Vec<String> {
    let mut random = Random(0x5eed_0ffa_7403);
    let recorder = Recorder::new(before);
    change(&recorder).unwrap();
    let old = state(&MemoryFile::new(before.to_vec(), LIMIT));
    let new = state(&recorder.file);
    assert!(old != new);
    let steps = recorder.steps.into_inner();
    assert!(steps.iter().any(|s| matches!(s, Step::Sync)));
    Tried::PowerCuts.count((steps.len() * tears) as u64);
    let mut problems = Vec::new();
    for end in (0..=steps.len()).flat_map(|end| vec![end; tears]) {
        let file = cut(before, &steps[..end], flushes, &mut random);
        let problem = problem(state, &file, &[&old, &new]);
        problems.extend(problem.map(|p| format!("{end} of {}: {p}", steps.len())));
    }
    let file = cut(before, &steps, true, &mut random);
    problems.extend(problem(state, &file, &[&new]).map(|p| format!("at the end: {p}")));
    problems
}

/// Returns what the guest reads from a disk of `size` bytes whose L1 table is at `l1`. Compressed
/// clusters are returned as stored.
pub fn disk(bytes: &[u8], header: &Header, l1: HostOffset, size: u64) -> Vec<u8> {
    let g = header.geometry();
    let mut disk = Vec::new();
    let entry_size = g.l2_entry_size() as usize;
    let clusters = g.clusters_of(size);
    for guest in (0..clusters).map(|i| GuestOffset::of_cluster(i, g.cluster_bits)) {
        let at = (l1 + 8 * g.l1_index(guest)).0 as usize;
        let word = u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
        let start = disk.len();
        if let Some(table) = L1Entry(word).l2_table(&g).unwrap() {
            let at = table.0 as usize + g.l2_index(guest) as usize * entry_size;
            match L2Entry::parse(bytes, at, &g).decode(&g).unwrap() {
                Cluster::Data { host } => {
                    let host = host.0 as usize;
                    let end = bytes.len().min(host + g.cluster_size() as usize);
                    disk.extend(&bytes[host..end]);
                }
                Cluster::Compressed(c) => {
                    let end = bytes.len().min((c.offset + c.len).0 as usize);
                    disk.extend(&bytes[c.offset.0 as usize..end]);
                }
                _ => {}
            }
        }
        // Only stored bytes count here; zeroes add none.
        disk.extend(((disk.len() - start) as u64).to_be_bytes());
    }
    disk
}
