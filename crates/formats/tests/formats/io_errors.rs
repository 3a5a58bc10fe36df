//! Fails each storage operation in turn. The guest may get an error, the image stays sound, and
//! nothing that was flushed is lost. When the storage works again, the disk works again.

use crate::support::sim;

use crate::support::sim::case::{
    Backing, Case, DATA_FILE, EXTENDED, Filled, GROWING, Made, QCOW2, QED, SMALL, SNAPSHOT,
};
use crate::support::sim::cut::{Cuts, check_image};
use crate::support::sim::run::{Run, Start};
use crate::support::sim::world::{Fault, Log, World};
use crate::support::sim::{each, rounds};
use fathom_core::{Disk, DiskError, Resize};
use fathom_testing::{Tried, is_time_up};
use std::sync::Arc;

const CASES: &[Case] = &[
    SMALL,
    Case {
        name: "512-compressed",
        options: "cluster_size=512,refcount_bits=64",
        cluster: 512,
        filled: Some(Filled::Compressed),
        tiny_cache: true,
        ..QCOW2
    },
    GROWING,
    Case {
        name: "4k-below",
        options: "cluster_size=4k",
        cluster: 4096,
        backing: Some(Backing::QCOW2),
        ..QCOW2
    },
    SNAPSHOT,
    Case {
        backing: Some(Backing::RAW),
        ..EXTENDED
    },
    DATA_FILE,
    Case {
        backing: Some(Backing::RAW),
        ..QED
    },
];

/// Number of requests while the storage may fail.
const REQUESTS: usize = 80;

struct Trial {
    world: Arc<World>,
    run: Run,
    before: Vec<sim::pages::Pages>,
}

impl Trial {
    fn new(made: &Made, seed: u64) -> Trial {
        let world = made.world(seed);
        let before = world.state().files.clone();
        world.state().log = Some(Log::default());
        let workers = 1 + seed as usize % 2;
        let start = made.start(&world, workers, seed);
        let start = Start {
            model: start.model.with_room(made.case.room()),
            ..start
        };
        let mut run = Run::new(start).expect("the image opens");
        run.strict = false;
        run.flushes = 8;
        world.state().operations = 0;
        Trial { world, run, before }
    }

    fn activate(&mut self) {
        if self.run.disk.activate().is_err() {
            self.heal();
            self.run.activate();
        }
    }

    fn heal(&self) {
        let mut state = self.world.state();
        (state.fault, state.limit) = (None, None);
    }

    /// Lets the storage work again and checks that the disk does, too.
    fn goes_on(&mut self, made: &Made) {
        self.heal();
        self.run.strict = true;
        self.run.requests(20);
        self.run.drain();
        self.run.flush();
        self.run.deactivate();
        check_image(made, &self.world).unwrap_or_else(|problem| panic!("{problem}"));
        self.run.activate();
        self.run.compare_all();
        self.run.deactivate();
    }

    /// Cuts the power at random instants and checks that nothing that was flushed is lost.
    fn cut(&mut self, made: &Made, seed: u64) {
        let log = self.world.state().log.take().expect("put there at first");
        let cuts = Cuts {
            made,
            before: &self.before,
            log: &log,
            model: &self.run.model,
            seed,
            whole: false,
        };
        cuts.check(3).unwrap_or_else(|problem| panic!("{problem}"));
    }
}

/// Runs once with failing operations. Returns false if the run ended before the first of them.
fn fail_at(made: &Made, seed: u64, fault: Fault) -> bool {
    Tried::StorageErrors.count(1);
    let mut trial = Trial::new(made, seed);
    trial.world.state().fault = Some(fault);
    trial.activate();
    trial.run.requests(REQUESTS / 2);
    if seed.is_multiple_of(2) || fault.first % 2 == 1 {
        for _ in 0..2 {
            let sectors = trial.run.random_size();
            // A failed resize leaves the size unchanged.
            let _ = trial.run.resize(sectors);
        }
    }
    trial.run.requests(REQUESTS / 2);
    trial.run.drain();
    let reached = trial.world.state().operations > fault.first;
    if trial.run.below(2) == 0 {
        trial.goes_on(made);
    } else {
        // A failed deactivation is like a power cut.
        trial.run.deactivate();
    }
    trial.heal();
    trial.cut(made, seed);
    reached
}

fn fail_at_each(made: &Made, seed: u64, count: u64, errno: i32) {
    let mut first = 0;
    loop {
        let fault = Fault {
            first,
            count,
            errno,
        };
        let _again = sim::Again::new(format!("{fault:?}"));
        if !fail_at(made, seed, fault) {
            break;
        }
        if is_time_up() {
            return;
        }
        // The longer run fails each operation.
        first += match rounds(1) {
            1 => 1 + (first ^ seed) % 8,
            _ => 1,
        };
    }
    assert!(first > 40, "the run was short: {first} operations");
}

#[test]
fn one_operation_fails() {
    each(CASES, rounds(1), |made, seed| {
        fail_at_each(made, seed, 1, libc::EIO);
    });
}

#[test]
fn several_operations_fail() {
    each(CASES, rounds(1), |made, seed| {
        fail_at_each(made, seed, 2 + seed % 30, libc::EIO);
    });
}

#[test]
fn there_is_no_room_for_a_while() {
    each(CASES, rounds(1), |made, seed| {
        fail_at_each(made, seed, 1 << 32, libc::ENOSPC);
    });
}

/// The file cannot grow beyond a limit.
#[test]
fn the_device_is_full() {
    each(CASES, rounds(10), |made, seed| {
        Tried::StorageErrors.count(1);
        let mut trial = Trial::new(made, seed);
        let len = made.files[0].len();
        let more = trial.run.below(60 * made.case.cluster);
        trial.world.state().limit = Some(len + more);
        trial.activate();
        trial.run.requests(REQUESTS);
        let sectors = trial.run.random_size();
        let _ = trial.run.resize(sectors);
        trial.run.requests(REQUESTS);
        trial.run.drain();
        match seed % 2 {
            0 => trial.goes_on(made),
            _ => drop(trial.run.deactivate()),
        }
        trial.heal();
        trial.cut(made, seed);
    });
}

/// Shrinks the disk to 64 sectors, without other requests.
fn shrink(trial: &mut Trial) -> Result<u64, DiskError> {
    let resizing = trial.run.disk.begin_resize(&Resize {
        size: Some(64 * 512),
        shrink: true,
        settle: &|| Ok(()),
    })?;
    loop {
        if let Some(outcome) = resizing.poll() {
            return outcome;
        }
        trial.run.steps(1);
    }
}

#[test]
fn a_failed_shrink_keeps_all_data_or_reports_its_loss() {
    each(&CASES[..5], rounds(1), |made, seed| {
        let (mut unchanged, mut lost) = (0, 0);
        for first in 0.. {
            let mut trial = Trial::new(made, seed);
            trial.activate();
            trial.world.state().operations = 0;
            trial.world.state().fault = Some(Fault {
                first,
                count: 1,
                errno: libc::EIO,
            });
            let Err(error) = shrink(&mut trial) else {
                break;
            };
            trial.heal();
            if error.to_string().contains("may be lost") {
                lost += 1;
                trial.run.abandon();
            } else {
                unchanged += 1;
                trial.run.strict = true;
                trial.run.compare_all();
                trial.run.deactivate();
            }
        }
        assert!(unchanged > 0 && lost > 0, "{unchanged} and {lost}");
    });
}
