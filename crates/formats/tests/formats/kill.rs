//! The server is killed while a guest uses the image, and another goes on with
//! what is in the file and in the memory that the guest's machine has kept:
//! the guest finds everything that it was told to be written.

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
use crate::support::sim::{each, keepsake, rounds};
use fathom_core::{Disk, DiskError, Keepsake, Op};
use fathom_testing::Tried;
use std::ops::Range;
use std::sync::Arc;

/// Those with which nothing else happens, only slower.
const SLOW: [&str; 3] = ["4k-raw-below", "2M", "qed-64k"];

fn cases() -> Vec<Case> {
    let quick = |case: &&Case| !SLOW.contains(&case.name);
    MATRIX.iter().filter(quick).copied().collect()
}

/// Kills in a run.
const KILLS: u64 = 5;

/// What is left of a server.
struct Left {
    files: Vec<Pages>,
    memory: Vec<u64>,
}

/// A server that serves what another has left.
struct Server {
    world: Arc<World>,
    run: Run,
    memory: Option<Keepsake>,
}

impl Server {
    /// Not active yet.
    fn new(made: &Made, left: &Left, model: Model, rng: &mut Rng) -> Result<Server, DiskError> {
        let world = World::new(left.files.clone(), rng.next());
        made.prepare(&world);
        let workers = 1 + rng.below(3) as usize;
        let start = Start {
            model,
            ..made.start(&world, workers, rng.next())
        };
        // What is read becomes the image's own, or what it has goes below.
        let start = match made.case.backing.is_some() {
            true if rng.one_in(3) => start.copying(),
            true if rng.one_in(2) => start.committing(),
            _ => start,
        };
        let run = Run::new(start)?;
        let mut words = left.memory.clone();
        words.resize(run.disk.keepsake_len() as usize / 8, 0);
        let memory = keepsake::with(&words);
        run.disk.keep(memory.clone());
        Ok(Server { world, run, memory })
    }

    /// It is killed after so many more operations, each of which it waits for
    /// itself. What it does then, whatever comes of it, is not seen.
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
            memory: keepsake::words(self.memory.as_ref()),
        };
        (left, self.run.model)
    }
}

/// What the guest finds after a kill, which must be what it was told.
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

/// What a life ends with.
struct Next {
    left: Left,
    model: Model,
    windows: Vec<u64>,
}

/// One server's life until it is killed; often in the same parts of the disk
/// as the one before it.
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

/// What a server has left that was killed in an operation it waited for; or it
/// is to be killed now.
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
    match server.run.disk.beside() {
        Some(beside) if beside.depth() > 0 => {
            for _ in 0..n / 5 {
                server.run.requests(5);
                server.run.commit_some();
            }
        }
        _ => server.run.requests(n),
    }
    let (now, sectors) = (server.run.sectors(), server.run.random_size());
    let may_resize = server.run.disk.beside().is_none() && !made.case.refuses(now, sectors);
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

/// In the end everything is in the file, as QEMU finds, too.
fn finish(made: &Made, left: &Left, model: Model, rng: &mut Rng) {
    let mut server = Server::new(made, left, model, rng).expect("the image opens");
    server.run.activate();
    server.run.requests(40);
    server.run.deactivate();
    let found = check_image(made, &server.world);
    found.unwrap_or_else(|problem| panic!("in the end: {problem}"));
    server.run.disk.keep(None);
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

/// A model of what is there now.
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

/// Writes to all of the disk; flushes once, in the middle. What is freed by
/// then is used again, and the file does not know of either.
fn write_all(run: &mut Run) {
    let sectors = run.model.sectors();
    for first in (0..sectors).step_by(8) {
        if first == sectors / 16 * 8 {
            run.flush();
        }
        run.alone(write(first, (sectors - first).min(8)));
    }
}

/// Each operation of a successor that restores is the last one in turn.
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

/// So many L2 tables and their data leave a growing image's table of refcounts,
/// one cluster, room for a few more.
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

/// Writes one behind the other, each to what one L2 table speaks of.
fn writes(tables: Range<u64>) -> impl Iterator<Item = Ask> {
    tables.map(|table| write(table * 64, 64))
}

/// Clusters of the table of refcounts, by the image's header.
fn table_of_refcounts(left: &Left) -> u32 {
    let mut clusters = [0; 4];
    left.files[0].read(&mut clusters, 56);
    u32::from_be_bytes(clusters)
}

/// Each operation of the server is its last one in turn (after it has read a
/// block of refcounts for each table), and any of its successor's.
#[test]
fn a_table_of_refcounts_grows() {
    each(&[GROWING], rounds(2), |made, seed| {
        let mut rng = Rng::new(seed ^ 0x9407);
        let server = Server::new(made, &untouched(made), made.model(), &mut rng);
        let mut server = server.expect("the image opens");
        server.run.activate();
        server.run.all(writes(0..NEARLY_FULL));
        // There are L2 tables for what is written next.
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

/// More entries change than there is room for in the memory, without a flush.
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
