//! The power fails while an image is served: whatever of the last writes is on
//! the disk, the image is sound and holds everything that was flushed.

#[path = "support/sim/mod.rs"]
mod sim;
mod support;

use fathom_formats::served::Beside;
use sim::case::Made;
use sim::cut::Cuts;
use sim::matrix::MATRIX;
use sim::run::{Run, Start};
use sim::world::Log;
use sim::{each, rounds};

/// What happened.
struct Recorded {
    before: Vec<sim::pages::Pages>,
    log: Log,
    run: Run,
}

fn record(made: &Made, seed: u64, lies: u64) -> Recorded {
    let world = made.world(seed);
    let before = world.state().files.clone();
    world.state().log = Some(Log::default());
    world.state().lies = lies;
    let workers = 1 + seed as usize % 3;
    let start = made.start(&world, workers, seed);
    let start = Start {
        model: start.model.with_room(made.case.room()),
        ..start
    };
    // (There is no file below otherwise, but its data.)
    let start = match made.case.backing.is_some() {
        true if seed.is_multiple_of(2) => start.committing(),
        true => start.copying(),
        false => start,
    };
    let start = match made.case.can_have_bitmaps() && seed % 3 != 1 {
        true => start.recording(),
        false => start,
    };
    let commits = matches!(start.options.beside, Some(Beside::Below(_)));
    let mut run = Run::new(start).expect("the image opens");
    run.activate();
    for _ in 0..2 {
        let n = 40 + run.below(120) as usize;
        if commits {
            for _ in 0..n / 5 {
                run.requests(5);
                run.commit_some();
            }
        } else {
            run.requests(n);
        }
        if seed.is_multiple_of(2) && made.case.backing.is_none() {
            run.resizes(made, 2);
            run.requests(n / 2);
        }
        run.deactivate();
        run.activate();
    }
    run.deactivate();
    let log = world.state().log.take().expect("put there above");
    Recorded { before, log, run }
}

fn cut(made: &Made, seed: u64, count: usize, lies: u64) -> Result<(), String> {
    let recorded = record(made, seed, lies);
    let cuts = Cuts {
        made,
        before: &recorded.before,
        log: &recorded.log,
        model: &recorded.run.model,
        seed,
    };
    cuts.check(count)
}

#[test]
fn nothing_that_was_flushed_is_lost() {
    each(MATRIX, rounds(3), |made, seed| {
        cut(made, seed, 50, 0).unwrap_or_else(|problem| panic!("{problem}"));
    });
}

/// The test of the test.
#[test]
fn a_storage_that_does_not_flush_is_found_out() {
    each(MATRIX, 1, |made, seed| {
        let caught = (seed..seed + 10).any(|seed| cut(made, seed, 50, 1).is_err());
        assert!(caught, "nothing was noticed");
    });
}

/// Likewise, of one that forgets some flushes.
#[test]
fn a_storage_that_forgets_flushes_is_found_out() {
    each(&MATRIX[..3], 1, |made, seed| {
        let caught = (seed..seed + 100).any(|seed| cut(made, seed, 50, 5).is_err());
        assert!(caught, "nothing was noticed");
    });
}
