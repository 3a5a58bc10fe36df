//! Every request ends, regardless of the other requests in flight.

use crate::support::sim::case::{Backing, Case, GROWING, Made, SMALL};
use crate::support::sim::run::{Run, Start};
use crate::support::sim::worker::{Ask, DEPTH};
use crate::support::sim::{each, rounds, saved_state};
use fathom_core::{Disk, Op};

/// Number of storage operations in which all requests in flight must end.
const STEPS: u64 = 30_000;

fn active(made: &Made, workers: usize, seed: u64) -> Run {
    let world = made.world(seed);
    let start = made.start(&world, workers, seed);
    let start = Start {
        model: start.model.with_room(made.case.room()),
        ..start
    };
    let mut run = Run::new(start).expect("the image opens");
    let words = vec![0; run.disk.saved_state_len() as usize / 8];
    run.disk.set_saved_state(saved_state::with(&words));
    run.activate();
    run
}

/// Resizing a disk waits for the requests of all workers, while more arrive.
#[test]
fn no_worker_keeps_another_waiting() {
    each(&[GROWING], rounds(4), |made, seed| {
        let mut run = active(made, 2, seed);
        run.flushes = 10;
        for _ in 0..4 {
            run.requests(60);
            let sectors = run.sectors() + 1;
            let ended = run.resize_for(sectors, 10 * STEPS);
            assert!(matches!(ended, Ok(true)), "{ended:?}");
        }
        run.drain();
        run.deactivate();
    });
}

/// As many discards as the journal has room for, if room were reserved for all of their clusters at
/// once. The first one needs more room to continue while the others wait for it.
#[test]
fn many_large_discards_end() {
    const BELOW: Case = Case {
        name: "512-below",
        backing: Some(Backing::RAW),
        ..SMALL
    };
    each(&[BELOW], rounds(2), |made, seed| {
        let mut run = active(made, 3, seed);
        for n in 0..3 * DEPTH {
            let sectors = match n {
                0..63 => 512,
                63 => 505,
                _ => 1,
            };
            run.submit(n % 3, Ask::plain(Op::Discard, 0, sectors));
        }
        run.steps(STEPS);
        let world = run.world.clone();
        assert!(world.state().pending.is_empty(), "they do not end");
        run.drain();
        run.compare_all();
        run.deactivate();
    });
}
