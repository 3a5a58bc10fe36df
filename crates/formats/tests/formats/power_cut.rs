//! Power cuts while an image is served. With any subset of the last writes on the disk, the image
//! is sound and holds everything that was flushed.

use crate::support::sim::case::{Backing, Case, EXTENDED, Made, QED, SMALL};
use crate::support::sim::cut::Cuts;
use crate::support::sim::matrix::MATRIX;
use crate::support::sim::pages::Pages;
use crate::support::sim::run::{Run, Start};
use crate::support::sim::world::Log;
use crate::support::sim::{each, rounds};
use fathom_formats::served::SideViewKind;

/// A recorded run.
struct Recorded {
    before: Vec<Pages>,
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
    // Without a backing image, there is no file to commit to.
    let start = match made.case.backing.is_some() {
        true if seed.is_multiple_of(2) => start.committing(),
        true => start.copying(),
        false => start,
    };
    let start = match made.case.can_have_bitmaps() && seed % 3 != 1 {
        true => start.recording(),
        false => start,
    };
    let commits = matches!(start.options.side_view, Some(SideViewKind::Below(_)));
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
    check(made, &record(made, seed, lies), seed, count)
}

fn check(made: &Made, recorded: &Recorded, seed: u64, count: usize) -> Result<(), String> {
    let cuts = Cuts {
        made,
        before: &recorded.before,
        log: &recorded.log,
        model: &recorded.run.model,
        seed,
        // A commit between backing images moves data that no guest has changed.
        whole: recorded.run.disk.reader().is_some(),
    };
    cuts.check(count)
}

#[test]
fn nothing_that_was_flushed_is_lost() {
    each(MATRIX, rounds(3), |made, seed| {
        cut(made, seed, 50, 0).unwrap_or_else(|problem| panic!("{problem}"));
    });
}

/// Images above an image that is above a raw one.
const CHAINS: &[Case] = &[
    Case {
        name: "4k-chain",
        options: "cluster_size=4k",
        backing: Some(CHAIN),
        ..SMALL
    },
    Case {
        name: "512-chain",
        backing: Some(CHAIN),
        ..SMALL
    },
    Case {
        name: "16k-extended-chain",
        backing: Some(Backing {
            options: "cluster_size=16k,extended_l2=on",
            longer: 100,
            ..CHAIN
        }),
        ..EXTENDED
    },
    Case {
        name: "qed-chain",
        backing: Some(Backing {
            format: "qed",
            options: "cluster_size=4k,table_size=2",
            longer: -100,
            ..CHAIN
        }),
        ..QED
    },
];

const CHAIN: Backing = Backing {
    chain: true,
    ..Backing::QCOW2
};

/// Commits an image in the middle of a chain to the image below it, and removes it from the chain.
fn record_middle(made: &Made, seed: u64, waits: bool) -> Recorded {
    let world = made.world(seed);
    let before = world.state().files.clone();
    world.state().log = Some(Log::default());
    let start = made.start(&world, 1 + seed as usize % 3, seed);
    let mut run = Run::new(start.leaving_out()).expect("the image opens");
    run.activate();
    let n = run.below(40) as usize;
    run.requests(n);
    run.leave_out(&made.names[2], waits);
    let n = run.below(60) as usize;
    run.requests(n);
    run.deactivate();
    let log = world.state().log.take().expect("put there above");
    Recorded { before, log, run }
}

#[test]
fn an_image_is_left_out_when_the_one_below_has_what_it_had() {
    each(CHAINS, rounds(5), |made, seed| {
        let recorded = record_middle(made, seed, true);
        check(made, &recorded, seed, 50).unwrap_or_else(|problem| panic!("{problem}"));
        // The image is no longer in the chain and can be removed.
        let world = recorded.run.world.clone();
        world.state().files[1] = Pages::default();
        let names = [made.names[0].clone(), made.names[2].clone()];
        let file = world.state().files.remove(2);
        world.state().files[1] = file;
        let start = Start {
            names: &names,
            model: recorded.run.model,
            ..made.start(&world, 1, seed)
        };
        let mut run = Run::new(start).expect("the image opens");
        assert_eq!(run.disk.images().len(), 2);
        run.activate();
        run.compare_all();
        run.deactivate();
    });
}

/// Checks that the test detects an image that is removed from the chain too early.
#[test]
fn an_image_that_is_left_out_too_early_is_found_out() {
    each(CHAINS, 1, |made, seed| {
        let is_caught = |seed| check(made, &record_middle(made, seed, false), seed, 50).is_err();
        let caught = (seed..seed + 20).any(is_caught);
        assert!(caught, "nothing was noticed");
    });
}

/// Checks that the test detects a storage that does not flush.
#[test]
fn a_storage_that_does_not_flush_is_found_out() {
    each(MATRIX, 1, |made, seed| {
        let caught = (seed..seed + 10).any(|seed| cut(made, seed, 50, 1).is_err());
        assert!(caught, "nothing was noticed");
    });
}

/// Checks that the test detects a storage that skips some flushes.
#[test]
fn a_storage_that_forgets_flushes_is_found_out() {
    each(&MATRIX[..3], 1, |made, seed| {
        let caught = (seed..seed + 100).any(|seed| cut(made, seed, 50, 5).is_err());
        assert!(caught, "nothing was noticed");
    });
}
