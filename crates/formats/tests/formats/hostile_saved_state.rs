//! Forged in-flight state of a killed server. Activation is refused, or the image can still be
//! used. No write overwrites the image's metadata.

use crate::support::sim::case::{
    Backing, Case, DATA_FILE, EXTENDED, Filled, GROWING, Made, QED, SMALL, SNAPSHOT,
};
use crate::support::sim::cut::check_image;
use crate::support::sim::pages::Pages;
use crate::support::sim::recorder::Recorder;
use crate::support::sim::rng::Rng;
use crate::support::sim::run::Run;
use crate::support::sim::worker::Ask;
use crate::support::sim::world::World;
use crate::support::sim::{each, rounds, saved_state};
use fathom_core::{Disk, Op};
use fathom_formats::offline::check::{Options, check};
use fathom_testing::{Tried, is_time_up};
use std::cell::Cell;
use std::sync::Arc;

const CASES: &[Case] = &[
    SMALL,
    Case {
        filled: Some(Filled::Compressed),
        ..SNAPSHOT
    },
    Case {
        backing: Some(Backing::RAW),
        ..EXTENDED
    },
    DATA_FILE,
    GROWING,
    QED,
];

/// Layout of the in-flight state, in words. If the layout changes, this test fails, because none of
/// its forged records is accepted any more.
const MAGIC: u64 = u64::from_le_bytes(*b"FATHOMJ1");
const AT_SIZE: usize = 3;
const AT_FIRST: usize = 4;
const AT_NEXT: usize = 5;
const HEADER: usize = 8;
const RECORD: usize = 4;
const L1: u64 = 1 << 63;
const COPIED: u64 = 1 << 63;

/// The state that a killed server has left.
struct Left {
    files: Vec<Pages>,
    memory: Vec<u64>,
}

fn kill(made: &Made, seed: u64) -> Left {
    let world = made.world(seed);
    let mut run = Run::new(made.start(&world, 2, seed)).expect("the image opens");
    let memory = saved_state::with(&vec![0; run.disk.saved_state_len() as usize / 8]);
    run.disk.set_saved_state(memory.clone());
    run.flushes = 2;
    run.activate();
    run.requests(120);
    run.abandon();
    let files = world.state().files.clone();
    let memory = saved_state::words(memory.as_ref());
    Left { files, memory }
}

fn first_record(memory: &[u64]) -> usize {
    HEADER + memory[AT_FIRST] as usize * RECORD
}

/// Returns the guest clusters that the records refer to.
fn guest_clusters(memory: &[u64]) -> Vec<u64> {
    let end = HEADER + memory[AT_NEXT] as usize * RECORD;
    let records = memory[first_record(memory)..end].chunks(RECORD);
    let what = records.map(|record| record[0]);
    what.filter(|what| what & L1 == 0).collect()
}

/// Appends a record with a valid checksum.
fn forge(memory: &mut [u64], what: u64, one: u64, two: u64) {
    let at = HEADER + memory[AT_NEXT] as usize * RECORD;
    let sum = MAGIC ^ what ^ one.rotate_left(21) ^ two.rotate_left(42);
    memory[at..at + RECORD].copy_from_slice(&[what, one, two, sum]);
    memory[AT_NEXT] += 1;
}

/// Returns the flag of entries whose clusters have no other user.
fn usual_flag(made: &Made) -> u64 {
    match made.case.format {
        "qed" => 0,
        _ => COPIED,
    }
}

/// Forges records of all kinds.
struct Liar<'a> {
    made: &'a Made,
    /// Number of clusters of the image's file.
    clusters: u64,
    /// Guest clusters that the genuine records refer to.
    known: &'a [u64],
    rng: &'a mut Rng,
}

impl Liar<'_> {
    fn lie(&mut self, memory: &mut [u64]) {
        match self.rng.below(8) {
            0 => self.garble(memory),
            1 => self.one_cluster_twice(memory),
            _ => {
                for _ in 0..1 + self.rng.below(6) {
                    let (what, one, two) = self.record();
                    forge(memory, what, one, two);
                }
            }
        }
    }

    /// Replaces random words.
    fn garble(&mut self, memory: &mut [u64]) {
        let end = HEADER + memory[AT_NEXT] as usize * RECORD;
        let from = [0, first_record(memory)][self.rng.below(2) as usize];
        for _ in 0..1 + self.rng.below(3) {
            let at = from + self.rng.below((end - from).max(1) as u64) as usize;
            memory[at] = match self.rng.below(3) {
                0 => self.rng.next(),
                1 => self.rng.below(100),
                _ => memory[at] ^ 1 << self.rng.below(64),
            };
        }
    }

    /// Forges tables and guest data in the same cluster.
    fn one_cluster_twice(&mut self, memory: &mut [u64]) {
        let host = self.host();
        for _ in 0..2 + self.rng.below(2) {
            let (what, flags) = match self.rng.below(2) {
                0 => (L1 | self.rng.below(self.tables()), self.flag()),
                _ => (self.guest(), self.flag()),
            };
            forge(memory, what, flags | host, u64::from(u32::MAX));
        }
    }

    fn record(&mut self) -> (u64, u64, u64) {
        let what = match self.rng.below(8) {
            0 => self.rng.next(),
            1 | 2 => L1 | self.rng.below(self.tables() + 2),
            _ => self.guest(),
        };
        let one = match self.rng.below(8) {
            0 => self.rng.next(),
            1 => self.rng.below(4),
            2 => self.host() | 1 << self.rng.below(64),
            3 => self.host() | 1 << 62 | self.rng.below(1 << 9),
            _ => self.flag() | self.host(),
        };
        let two = match self.rng.below(3) {
            0 => 0,
            1 => self.rng.next(),
            _ => u64::from(u32::MAX),
        };
        (what, one, two)
    }

    /// Returns a guest cluster, often one that has a table, or one beyond the end.
    fn guest(&mut self) -> u64 {
        let sectors = self.made.initial.len() as u64;
        match self.known.len() as u64 {
            n if n > 0 && !self.rng.one_in(4) => self.known[self.rng.below(n) as usize],
            _ => self.rng.below(sectors * 512 / self.made.case.cluster + 3),
        }
    }

    /// Number of L1 entries, or a few more.
    fn tables(&self) -> u64 {
        let sectors = self.made.initial.len() as u64;
        let covered = self.made.case.cluster * self.made.case.cluster / 8;
        (sectors * 512).div_ceil(covered)
    }

    /// Returns the offset of a cluster of the file, often an early one, where most of the metadata
    /// is.
    fn host(&mut self) -> u64 {
        let n = match self.rng.below(3) {
            0 => 16.min(self.clusters),
            1 => self.clusters,
            _ => self.clusters + 64,
        };
        self.rng.below(n) * self.made.case.cluster
    }

    /// Returns the right flag, or sometimes a wrong one.
    fn flag(&mut self) -> u64 {
        let usual = usual_flag(self.made);
        if self.rng.one_in(8) {
            usual ^ COPIED
        } else {
            usual
        }
    }
}

/// Returns the problems of structures that guest data never refers to: the header, the refcount
/// table and blocks, and snapshots.
fn damage(made: &Made, world: &Arc<World>) -> Vec<String> {
    let file = Recorder::new(world.clone(), 0, &made.names[0]);
    let mut lines = Vec::new();
    let mut say = |line: &str| lines.push(line.to_owned());
    let report = check(&*file, made.case.format(), &Options::default(), &mut say);
    let report = report.expect("it can be checked");
    assert_eq!(report.check_errors, 0, "{lines:#?}");
    let serious = ["header", "refcount table", "refcount block", "snapshot"];
    lines.retain(|line| serious.iter().any(|what| line.contains(what)));
    lines
}

/// Serves an image that was activated with forged state.
fn serve(run: &mut Run) {
    (run.strict, run.blind) = (false, true);
    run.requests(30);
    run.drain();
    // Writes data to the whole disk, no matter which records were accepted.
    let sectors = run.model.sectors();
    for first in (0..sectors).step_by(64) {
        run.alone(Ask {
            op: Op::Write,
            first,
            sectors: 1,
            fua: false,
            unmap: false,
        });
    }
    run.flush();
    run.deactivate();
}

#[test]
fn lies_do_no_harm_to_metadata() {
    let believed = Cell::new(0);
    each(CASES, rounds(3), |made, seed| {
        let left = kill(made, seed);
        let mut rng = Rng::new(seed);
        let known = guest_clusters(&left.memory);
        for _ in 0..60 {
            let mut memory = left.memory.clone();
            let clusters = left.files[0].len() / made.case.cluster;
            let (known, rng) = (&known[..], &mut rng);
            let mut liar = Liar {
                made,
                clusters,
                known,
                rng,
            };
            Tried::HostileInputs.count(1);
            liar.lie(&mut memory);
            let world = World::new(left.files.clone(), rng.next());
            made.prepare(&world);
            let mut run = Run::new(made.start(&world, 1, rng.next())).expect("the image opens");
            run.disk.set_saved_state(saved_state::with(&memory));
            match run.disk.activate() {
                Ok(()) => {
                    believed.set(believed.get() + 1);
                    serve(&mut run);
                    let found = damage(made, &world);
                    assert!(found.is_empty(), "{found:#?}");
                }
                Err(error) => {
                    assert!(!error.to_string().contains('\n'), "{error}");
                    let found = check_image(made, &world);
                    found.unwrap_or_else(|problem| panic!("after {error}: {problem}"));
                    // After the refusal, the genuine state is still usable.
                    run.disk.set_saved_state(saved_state::with(&left.memory));
                    let truth = run.disk.activate();
                    truth.unwrap_or_else(|e| panic!("after {error}: {e}"));
                }
            }
        }
    });
    let believed = believed.get();
    assert!(
        believed > 20 || is_time_up(),
        "few lies were good enough: {believed}"
    );
}

/// A cluster cannot be both a table and guest data.
#[test]
fn a_table_is_nothing_else() {
    let with_data = |case: &&Case| !case.options.contains("data_file");
    let cases: Vec<Case> = CASES.iter().filter(with_data).copied().collect();
    each(&cases, 1, |made, seed| {
        let left = kill(made, seed);
        let clusters = left.files[0].len() / made.case.cluster;
        // The cluster is free: the file was made longer than necessary.
        let host = ((clusters - 4) * made.case.cluster) | usual_flag(made);
        for other in [0, L1 | 1] {
            let mut memory = left.memory.clone();
            forge(&mut memory, L1, host, 0);
            forge(&mut memory, other, host, u64::from(u32::MAX));
            let world = World::new(left.files.clone(), seed);
            made.prepare(&world);
            let run = Run::new(made.start(&world, 1, seed)).expect("the image opens");
            run.disk.set_saved_state(saved_state::with(&memory));
            assert!(run.disk.activate().is_err(), "it is believed: {other:#x}");
        }
    });
}

/// A new table cannot refer to metadata or contain invalid entries.
#[test]
fn a_new_table_refers_to_no_metadata() {
    each(&[SMALL, QED], 1, |made, seed| {
        let left = kill(made, seed);
        let clusters = left.files[0].len() / made.case.cluster;
        // The cluster is free: the file was made longer than necessary.
        let at = (clusters - 4) * made.case.cluster;
        let entries = [1 << 62, usual_flag(made) | made.case.cluster, u64::MAX];
        for (entry, is_sound) in [(0, true)].into_iter().chain(entries.map(|e| (e, false))) {
            let mut files = left.files.clone();
            let bytes: [u8; 8] = match made.case.format {
                "qed" => entry.to_le_bytes(),
                _ => entry.to_be_bytes(),
            };
            files[0].write(at + 16, &bytes);
            let mut memory = left.memory.clone();
            forge(&mut memory, L1, at | usual_flag(made), 0);
            let world = World::new(files, seed);
            made.prepare(&world);
            let run = Run::new(made.start(&world, 1, seed)).expect("the image opens");
            run.disk.set_saved_state(saved_state::with(&memory));
            assert_eq!(run.disk.activate().is_ok(), is_sound, "{entry:#x}");
        }
    });
}

/// A new table cannot be a cluster that the successor uses as a refcount block for the table
/// itself.
#[test]
fn a_block_of_refcounts_is_nothing_else() {
    each(&[SMALL, GROWING], 1, |made, seed| {
        let left = kill(made, seed);
        let bits = if made.case.name == GROWING.name {
            64
        } else {
            16
        };
        let covered = made.case.cluster * 8 / bits;
        // The cluster is unused: the file was made longer than necessary.
        let last = left.files[0].len() / made.case.cluster - 1;
        let host = (last / covered * covered * made.case.cluster) | COPIED;
        for what in [0, L1 | 1] {
            let mut memory = left.memory.clone();
            forge(&mut memory, what, host, 0);
            let world = World::new(left.files.clone(), seed);
            made.prepare(&world);
            let run = Run::new(made.start(&world, 1, seed)).expect("the image opens");
            run.disk.set_saved_state(saved_state::with(&memory));
            assert!(run.disk.activate().is_err(), "it is believed: {what:#x}");
            // After the refusal, the genuine state is still usable.
            run.disk.set_saved_state(saved_state::with(&left.memory));
            run.disk.activate().expect("the truth");
        }
    });
}

/// The state belongs to one image and is refused for any other.
#[test]
fn what_another_image_has_left_is_refused() {
    let refusals = Cell::new(0);
    each(CASES, 1, |made, seed| {
        let left = kill(made, seed);
        if left.memory[AT_FIRST] == left.memory[AT_NEXT] {
            // The server was killed when everything was durable.
            return;
        }
        for at in 1..=AT_SIZE {
            let mut memory = left.memory.clone();
            memory[at] ^= 4096;
            let world = World::new(left.files.clone(), seed);
            made.prepare(&world);
            let run = Run::new(made.start(&world, 1, seed)).expect("the image opens");
            run.disk.set_saved_state(saved_state::with(&memory));
            let refused = run.disk.activate().expect_err("it is another image's");
            let problem = refused.to_string();
            assert!(problem.contains("not the image"), "{problem}");
            run.disk.set_saved_state(saved_state::with(&left.memory));
            run.disk.activate().expect("it is this one's");
            refusals.set(refusals.get() + 1);
        }
    });
    assert!(
        refusals.get() > 0 || is_time_up(),
        "nothing was left to refuse"
    );
}
