//! The power fails while an image is served: whatever of the last writes is on
//! the disk, the image is sound and holds everything that was flushed.

#[path = "support/sim/mod.rs"]
mod sim;
mod support;

use sim::case::{Backing, Case, Filled, Made, QCOW2};
use sim::cut::Cuts;
use sim::run::Run;
use sim::world::Log;
use sim::{each, rounds};

const CASES: &[Case] = &[
    Case {
        name: "512",
        options: "cluster_size=512",
        cluster: 512,
        ..QCOW2
    },
    Case {
        name: "512-device",
        options: "cluster_size=512",
        cluster: 512,
        device: true,
        ..QCOW2
    },
    Case {
        name: "4k-device",
        options: "cluster_size=4k",
        cluster: 4096,
        backing: Some(Backing::RAW),
        device: true,
        ..QCOW2
    },
    Case {
        name: "512-v2",
        options: "cluster_size=512,compat=0.10",
        cluster: 512,
        filled: Some(Filled::Plain),
        ..QCOW2
    },
    Case {
        name: "512-rc1",
        options: "cluster_size=512,refcount_bits=1",
        cluster: 512,
        tiny_cache: true,
        ..QCOW2
    },
    Case {
        name: "512-rc64-compressed",
        options: "cluster_size=512,refcount_bits=64",
        cluster: 512,
        filled: Some(Filled::Compressed),
        ..QCOW2
    },
    Case {
        name: "4k",
        options: "cluster_size=4k",
        cluster: 4096,
        own: true,
        ..QCOW2
    },
    Case {
        name: "4k-lazy",
        options: "cluster_size=4k,lazy_refcounts=on,refcount_bits=8",
        cluster: 4096,
        filled: Some(Filled::Plain),
        ..QCOW2
    },
    Case {
        name: "512-growing",
        options: "cluster_size=512,refcount_bits=64",
        cluster: 512,
        wide: true,
        ..QCOW2
    },
    Case {
        name: "512-evicting",
        options: "cluster_size=512",
        cluster: 512,
        wide: true,
        tiny_cache: true,
        ..QCOW2
    },
    Case {
        name: "512-snapshot",
        options: "cluster_size=512,refcount_bits=64",
        cluster: 512,
        filled: Some(Filled::Compressed),
        snapshot: true,
        ..QCOW2
    },
    Case {
        name: "4k-snapshot",
        options: "cluster_size=4k",
        cluster: 4096,
        filled: Some(Filled::Plain),
        snapshot: true,
        ..QCOW2
    },
    Case {
        name: "4k-preallocated",
        options: "cluster_size=4k,preallocation=metadata",
        cluster: 4096,
        ..QCOW2
    },
    Case {
        name: "4k-raw-below",
        options: "cluster_size=4k",
        cluster: 4096,
        backing: Some(Backing::RAW),
        ..QCOW2
    },
    Case {
        name: "4k-chain-below",
        options: "cluster_size=4k,compat=0.10",
        cluster: 4096,
        backing: Some(Backing {
            chain: true,
            compressed: true,
            ..Backing::QCOW2
        }),
        tiny_cache: true,
        ..QCOW2
    },
    Case {
        name: "4k-filled-below",
        options: "cluster_size=4k",
        cluster: 4096,
        filled: Some(Filled::Compressed),
        backing: Some(Backing::QCOW2),
        ..QCOW2
    },
    Case {
        name: "16k-extended",
        options: "cluster_size=16k,extended_l2=on",
        cluster: 16384,
        ..QCOW2
    },
    Case {
        name: "16k-extended-below",
        options: "cluster_size=16k,extended_l2=on",
        cluster: 16384,
        backing: Some(Backing::RAW),
        ..QCOW2
    },
    Case {
        name: "64k",
        ..QCOW2
    },
    Case {
        name: "2M",
        options: "cluster_size=2M",
        cluster: 2 << 20,
        ..QCOW2
    },
    Case {
        name: "data-file",
        options: "cluster_size=4k,data_file=data.raw",
        cluster: 4096,
        ..QCOW2
    },
    Case {
        name: "data-file-raw",
        options: "cluster_size=4k,data_file=data.raw,data_file_raw=on",
        cluster: 4096,
        ..QCOW2
    },
    Case {
        name: "qed-4k",
        format: "qed",
        options: "cluster_size=4k,table_size=4",
        cluster: 4096,
        ..QCOW2
    },
    Case {
        name: "qed-below",
        format: "qed",
        options: "cluster_size=4k,table_size=2",
        cluster: 4096,
        backing: Some(Backing::RAW),
        ..QCOW2
    },
    Case {
        name: "qed-64k",
        format: "qed",
        ..QCOW2
    },
    Case {
        name: "raw",
        format: "raw",
        ..QCOW2
    },
];

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
    let mut run = Run::new(made.start(&world, workers, seed)).expect("the image opens");
    run.activate();
    for _ in 0..2 {
        let n = 40 + run.below(120) as usize;
        run.requests(n);
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
    each(CASES, rounds(3), |made, seed| {
        cut(made, seed, 50, 0).unwrap_or_else(|problem| panic!("{problem}"));
    });
}

/// The test of the test.
#[test]
fn a_storage_that_does_not_flush_is_found_out() {
    each(CASES, 1, |made, seed| {
        let caught = (seed..seed + 10).any(|seed| cut(made, seed, 50, 1).is_err());
        assert!(caught, "nothing was noticed");
    });
}

/// Likewise, of one that forgets some flushes.
#[test]
fn a_storage_that_forgets_flushes_is_found_out() {
    each(&CASES[..3], 1, |made, seed| {
        let caught = (seed..seed + 100).any(|seed| cut(made, seed, 50, 5).is_err());
        assert!(caught, "nothing was noticed");
    });
}
