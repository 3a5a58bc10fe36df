//! Kills the server while a guest uses the image. A successor continues with the file and the
//! in-flight state that the guest's machine has kept. The guest finds all acknowledged writes.

use crate::support;

use crate::support::sim::case::{Case, GROWING, Made};
use crate::support::sim::cut::check_image;
use crate::support::sim::matrix::MATRIX;
use crate::support::sim::model::{Model, Value, ZERO};
use crate::support::sim::pages::Pages;
use crate::support::sim::rng::Rng;
use crate::support::sim::run::{Run, Start};
use crate::support::sim::worker::Ask;
use crate::support::sim::world::{Kill, World};
use crate::support::sim::{each, rounds, saved_state};
use fathom_core::{Disk, DiskError, Op, SavedState};
use fathom_testing::Tried;
use std::ops::Range;
use std::sync::Arc;

/// Cases that add no coverage here and are slow.
const SLOW: [&str; 3] = ["4k-raw-below", "2M", "qed-64k"];

fn cases() -> Vec<Case> {
    let quick = |case: &&Case| !SLOW.contains(&case.name);
    MATRIX.iter().filter(quick).copied().collect()
}

/// Number of kills in a run.
const KILLS: u64 = 5;

/// The state that remains of a killed server.
struct Left {
    files: Vec<Pages>,
    memory: Vec<u64>,
}

/// A server that serves what another server has left.
struct Server {
    world: Arc<World>,
    run: Run,
    memory: Option<SavedState>,
}

impl Server {
    /// Opens the image. The disk is not active yet.
    fn new(made: &Made, left: &Left, model: Model, rng: &mut Rng) -> Result<Server, DiskError> {
        let world = World::new(left.files.clone(), rng.next());
        made.prepare(&world);
        let workers = 1 + rng.below(3) as usize;
        let start = Start {
            model,
            ..made.start(&world, workers, rng.next())
        };
        // The run copies on read, or commits to the image below.
        let start = match made.case.backing.is_some() {
            true if rng.one_in(3) => start.copying(),
            true if rng.one_in(2) => start.committing(),
            _ => start,
        };
        let run = Run::new(start)?;
        let mut words = left.memory.clone();
        words.resize(run.disk.saved_state_len() as usize / 8, 0);
        let memory = saved_state::with(&words);
        run.disk.set_saved_state(memory.clone());
        Ok(Server { world, run, memory })
    }

    /// Kills the server after `after` more operations that it executes synchronously. Operations of
    /// the server after that have no effect.
    fn doomed(&mut self, after: u64, doing: impl FnOnce(&mut Run)) -> Option<Left> {
        let at = self.world.state().operations + after;
        self.world.state().kill = Some(Kill {
            at,
            memory: self.memory.clone(),
            left: None,
        });
        doing(&mut self.run);
        let mut state = self.world.state();
        let memory = state.kill.take().and_then(|kill| kill.left)?;
        let files = state.files.clone();
        Some(Left { files, memory })
    }

    fn kill(mut self) -> (Left, Model) {
        self.run.abandon();
        let left = Left {
            files: self.world.state().files.clone(),
            memory: saved_state::words(self.memory.as_ref()),
        };
        (left, self.run.model)
    }
}

/// Reads the disk after a kill and compares it with the replies that the guest has received.
fn inspect(made: &Made, left: &Left, model: Model, rng: &mut Rng) -> (Vec<Value>, Model) {
    let mut server = Server::new(made, left, model, rng).expect("the image opens");
    let sound = |when: &str| {
        let found = check_image(made, &server.world);
        found.unwrap_or_else(|problem| panic!("{when}: {problem}"));
    };
    sound("after a kill");
    server.run.disk.activate().expect("it can be activated");
    sound("after what was in memory only was done again");
    if rng.one_in(50) {
        let dir = support::dir();
        made.store(dir.path(), &server.world);
        let found = made.qemu_finds(dir.path(), true);
        found.unwrap_or_else(|problem| panic!("{problem}"));
    }
    (server.run.compare_all(), server.run.model)
}

/// The state at the end of a server's life.
struct Next {
    left: Left,
    model: Model,
    windows: Vec<u64>,
}

/// Runs a server until it is killed. The server often uses the same parts of the disk as its
/// predecessor.
fn live(made: &Made, left: &Left, model: Model, before: &[u64], rng: &mut Rng) -> Next {
    let mut server = Server::new(made, left, model, rng).expect("the image opens");
    let sectors = server.run.sectors();
    let is_there = |first: &u64| first + server.run.window <= sectors;
    if rng.one_in(2) && !before.is_empty() && before.iter().all(is_there) {
        server.run.windows = before.to_vec();
    }
    let windows = server.run.windows.clone();
    Tried::Kills.count(1);
    let (left, model) = match die(made, &mut server, rng) {
        Some(left) => (left, server.run.model),
        None => server.kill(),
    };
    Next {
        left,
        model,
        windows,
    }
}

/// Kills the server in an operation that it executes synchronously, or now. Returns what the server
/// has left.
fn die(made: &Made, server: &mut Server, rng: &mut Rng) -> Option<Left> {
    if rng.one_in(3) {
        let killed = server.doomed(rng.below(20), |run| drop(run.disk.activate()));
        if killed.is_some() {
            return killed;
        }
        server.run.disk.deactivate().expect("it can be deactivated");
    }
    server.run.activate();
    let n = rng.below(150) as usize;
    match server.run.disk.side_view() {
        Some(side_view) if side_view.depth() > 0 => {
            for _ in 0..n / 5 {
                server.run.requests(5);
                server.run.commit_some();
            }
        }
        _ => server.run.requests(n),
    }
    let (now, sectors) = (server.run.sectors(), server.run.random_size());
    let may_resize = server.run.disk.side_view().is_none() && !made.case.refuses(now, sectors);
    if may_resize && rng.one_in(2) {
        let steps = [40, 400, u64::MAX][rng.below(3) as usize];
        let ended = server.run.resize_for(sectors, rng.below(steps));
        if !ended.expect("it can be resized") {
            return None;
        }
        server.run.requests(n / 2);
    }
    server.run.steps(rng.below(50));
    match rng.below(8) {
        0 => {
            server.run.drain();
            server.doomed(rng.below(30), |run| drop(run.disk.deactivate()))
        }
        1 => {
            server.run.deactivate();
            server.run.activate();
            server.run.requests(n / 2);
            None
        }
        _ => None,
    }
}

/// Ends the run: everything must be in the file, which QEMU checks too.
fn finish(made: &Made, left: &Left, model: Model, rng: &mut Rng) {
    let mut server = Server::new(made, left, model, rng).expect("the image opens");
    server.run.activate();
    server.run.requests(40);
    server.run.deactivate();
    let found = check_image(made, &server.world);
    found.unwrap_or_else(|problem| panic!("in the end: {problem}"));
    server.run.disk.set_saved_state(None);
    server.run.activate();
    let values = server.run.compare_all();
    server.run.deactivate();
    let dir = support::dir();
    made.store(dir.path(), &server.world);
    let found = made.qemu_finds(dir.path(), true);
    found.unwrap_or_else(|problem| panic!("in the end: {problem}"));
    let theirs = made.qemu_reads_all(dir.path(), values.len());
    assert!(theirs == values, "QEMU differs");
}

fn untouched(made: &Made) -> Left {
    Left {
        files: made.files.clone(),
        memory: Vec::new(),
    }
}

/// Returns a model that begins with the present contents.
fn from_now_on(made: &Made, (values, model): (Vec<Value>, Model)) -> Model {
    let room = model.sectors();
    let mut below = made.below.clone();
    below.resize(values.len(), ZERO);
    Model::new(values, below).with_room(room).later(&model)
}

#[test]
fn nothing_that_was_written_is_lost() {
    each(&cases(), rounds(3), |made, seed| {
        let mut rng = Rng::new(seed ^ 0x6b11);
        let mut left = untouched(made);
        let mut model = made.model().with_room(made.case.room());
        let mut windows = Vec::new();
        for _ in 0..KILLS {
            let next = live(made, &left, model, &windows, &mut rng);
            (left, windows) = (next.left, next.windows);
            let found = inspect(made, &left, next.model, &mut rng);
            model = from_now_on(made, found);
        }
        finish(made, &left, model, &mut rng);
    });
}

/// Writes to the whole disk, with one flush in the middle. Clusters freed before the flush are
/// reused, and the file records neither.
fn write_all(run: &mut Run) {
    let sectors = run.model.sectors();
    for first in (0..sectors).step_by(8) {
        if first == sectors / 16 * 8 {
            run.flush();
        }
        run.alone(write(first, (sectors - first).min(8)));
    }
}

/// Kills a successor at each operation of its recovery in turn.
#[test]
fn a_successor_is_killed_while_it_restores() {
    let small = |case: &&Case| case.cluster <= 4096 && !case.wide && case.filled.is_some();
    let cases: Vec<Case> = MATRIX.iter().filter(small).copied().collect();
    each(&cases, rounds(1), |made, seed| {
        let mut rng = Rng::new(seed ^ 0x1f);
        let server = Server::new(made, &untouched(made), made.model(), &mut rng);
        let mut server = server.expect("the image opens");
        server.run.flushes = 0;
        server.run.activate();
        write_all(&mut server.run);
        let n = rng.below(30) as usize;
        server.run.requests(n);
        let (mut left, mut model) = server.kill();
        let mut after = 0;
        loop {
            let found = inspect(made, &left, model, &mut rng);
            model = from_now_on(made, found);
            let server = Server::new(made, &left, model, &mut rng);
            let mut server = server.expect("the image opens");
            let Some(killed) = server.doomed(after, |run| drop(run.disk.activate())) else {
                return finish(made, &left, server.run.model, &mut rng);
            };
            (left, model) = (killed, server.run.model);
            after += 1 + rng.below(6);
        }
    });
}

/// Number of L2 tables that, with their data, nearly fill the refcount table of a growing image,
/// which has one cluster.
const NEARLY_FULL: u64 = 61;

fn write(first: u64, sectors: u64) -> Ask {
    Ask {
        op: Op::Write,
        first,
        sectors,
        fua: false,
        unmap: false,
    }
}

/// Consecutive writes, each within the range of one L2 table.
fn writes(tables: Range<u64>) -> impl Iterator<Item = Ask> {
    tables.map(|table| write(table * 64, 64))
}

/// Number of clusters of the refcount table, from the image's header.
fn table_of_refcounts(left: &Left) -> u32 {
    let mut clusters = [0; 4];
    left.files[0].read(&mut clusters, 56);
    u32::from_be_bytes(clusters)
}

/// Kills the server at each operation in turn, after it has read a refcount block for each table,
/// and its successor at any operation.
#[test]
fn a_table_of_refcounts_grows() {
    each(&[GROWING], rounds(2), |made, seed| {
        let mut rng = Rng::new(seed ^ 0x9407);
        let server = Server::new(made, &untouched(made), made.model(), &mut rng);
        let mut server = server.expect("the image opens");
        server.run.activate();
        server.run.all(writes(0..NEARLY_FULL));
        // Allocates the L2 tables of the next writes.
        let tables = NEARLY_FULL..NEARLY_FULL + 7;
        server.run.all(tables.map(|table| write(table * 64, 1)));
        server.run.deactivate();
        server.run.activate();
        let values = server.run.compare_all();
        server.run.deactivate();
        let (full, filled) = server.kill();
        assert_eq!(table_of_refcounts(&full), 1);
        for after in NEARLY_FULL.. {
            let model = Model::new(values.clone(), made.below.clone()).later(&filled);
            let mut server = Server::new(made, &full, model, &mut rng).expect("the image opens");
            server.run.strict = false;
            let killed = server.doomed(after, |run| {
                if run.disk.activate().is_ok() {
                    run.all(writes(NEARLY_FULL..NEARLY_FULL + 6));
                    run.flush();
                    run.all(writes(NEARLY_FULL + 6..NEARLY_FULL + 8));
                    drop(run.disk.deactivate());
                }
            });
            let Some(mut left) = killed else {
                let (left, model) = server.kill();
                assert_eq!(table_of_refcounts(&left), 2, "it has not grown");
                let found = inspect(made, &left, model, &mut rng);
                return finish(made, &left, from_now_on(made, found), &mut rng);
            };
            let successor = Server::new(made, &left, server.run.model, &mut rng);
            let mut successor = successor.expect("the image opens");
            let killed = successor.doomed(rng.below(20), |run| drop(run.disk.activate()));
            if let Some(killed) = killed {
                left = killed;
            }
            inspect(made, &left, successor.run.model, &mut rng);
        }
    });
}

/// Changes more entries than fit into the saved state, without a flush.
#[test]
fn the_memory_is_full() {
    let is_it = |case: &&Case| case.wide && !case.tiny_cache;
    let cases: Vec<Case> = MATRIX.iter().filter(is_it).copied().collect();
    assert!(!cases.is_empty());
    each(&cases, rounds(2), |made, seed| {
        let mut rng = Rng::new(seed);
        let model = made.model();
        let mut server = Server::new(made, &untouched(made), model, &mut rng).expect("it opens");
        server.run.activate();
        let sectors = server.run.model.sectors();
        for op in [Op::Write, Op::WriteZeroes, Op::Write] {
            for first in (0..sectors).step_by(256) {
                let sectors = (sectors - first).min(256);
                server.run.alone(Ask {
                    op,
                    first,
                    sectors,
                    fua: false,
                    unmap: true,
                });
            }
        }
        let flushed = server.world.state().flushes;
        assert!(flushed > 0, "there was room for everything");
        server.run.flushes = 0;
        server.run.requests(30 + seed as usize % 32);
        let (left, model) = server.kill();
        let found = inspect(made, &left, model, &mut rng);
        finish(made, &left, from_now_on(made, found), &mut rng);
    });
}
