//! Random requests by several workers, compared with a model and, at the end, with what QEMU's
//! tools find.

use crate::support;
use crate::support::sim;

use crate::support::sim::case::{
    Backing, Case, ENCRYPTED, EXTENDED, Filled, LARGE, LUKS, Made, NARROW, PREALLOCATED, QCOW2,
    QED, SMALL,
};
use crate::support::sim::cut::check_image;
use crate::support::sim::model::{SECTOR, Value};
use crate::support::sim::run::{Run, Start};
use crate::support::sim::worker::Ask;
use crate::support::sim::world::{Log, World};
use crate::support::sim::{each, rounds};
use fathom_core::Op;
use std::sync::Arc;

/// Single options. [`FAMILIES`] combines them.
const FORMATS: &[Case] = &[
    SMALL,
    Case {
        name: "512-wide",
        options: "cluster_size=512,refcount_bits=64",
        cluster: 512,
        wide: true,
        ..QCOW2
    },
    Case {
        name: "512-v2-rc16",
        options: "cluster_size=512,compat=0.10",
        cluster: 512,
        ..QCOW2
    },
    NARROW,
    Case {
        name: "1k-rc64",
        options: "cluster_size=1k,refcount_bits=64,lazy_refcounts=on",
        cluster: 1024,
        ..QCOW2
    },
    Case {
        name: "4k-rc8",
        options: "cluster_size=4k,refcount_bits=8,compression_type=zstd",
        cluster: 4096,
        ..QCOW2
    },
    PREALLOCATED,
    EXTENDED,
    Case {
        name: "64k",
        ..QCOW2
    },
    Case {
        name: "64k-v2",
        options: "compat=0.10",
        ..QCOW2
    },
    Case {
        name: "64k-extended",
        options: "extended_l2=on,compression_type=zstd",
        ..QCOW2
    },
    LARGE,
    Case {
        name: "2M-extended",
        options: "cluster_size=2M,extended_l2=on",
        cluster: 2 << 20,
        ..QCOW2
    },
    Case {
        name: "qed-4k",
        ..QED
    },
    Case {
        name: "qed-8k",
        format: "qed",
        options: "cluster_size=8k,table_size=4",
        cluster: 8192,
        ..QCOW2
    },
    Case {
        name: "qed-64k",
        format: "qed",
        ..QCOW2
    },
    Case {
        name: "qed-1M",
        format: "qed",
        options: "cluster_size=1M,table_size=2",
        cluster: 1 << 20,
        ..QCOW2
    },
];

const DATA_FILES: &[Case] = &[
    Case {
        name: "data-4k",
        options: "cluster_size=4k,data_file=data.raw",
        cluster: 4096,
        ..QCOW2
    },
    Case {
        name: "data-512-raw",
        options: "cluster_size=512,data_file=data.raw,data_file_raw=on",
        cluster: 512,
        ..QCOW2
    },
    Case {
        name: "data-16k-extended",
        options: "cluster_size=16k,data_file=data.raw,extended_l2=on",
        cluster: 16384,
        ..QCOW2
    },
    Case {
        name: "data-16k-extended-raw",
        options: "cluster_size=16k,data_file=data.raw,data_file_raw=on,extended_l2=on",
        cluster: 16384,
        ..QCOW2
    },
    Case {
        name: "data-64k-preallocated-raw",
        options: "data_file=data.raw,data_file_raw=on,preallocation=metadata",
        ..QCOW2
    },
];

const BACKINGS: &[Backing] = &[
    Backing::RAW,
    Backing {
        longer: -700,
        ..Backing::RAW
    },
    Backing {
        longer: 700,
        compressed: true,
        ..Backing::QCOW2
    },
    Backing {
        options: "cluster_size=64k,compression_type=zstd",
        compressed: true,
        longer: -33,
        ..Backing::QCOW2
    },
    Backing {
        chain: true,
        options: "extended_l2=on",
        ..Backing::QCOW2
    },
    Backing {
        format: "qed",
        options: "cluster_size=4k",
        chain: true,
        longer: -5,
        ..Backing::RAW
    },
];

/// Serves the image twice, with a deactivation in between, and compares its contents.
fn serve(made: &Made, seed: u64) {
    let world = made.world(seed);
    let run = begin(made, &world, seed);
    serve_by(made, &world, run);
}

fn serve_by(made: &Made, world: &Arc<World>, mut run: Run) {
    for _ in 0..2 {
        run.activate();
        let n = 60 + run.below(200) as usize;
        run.requests(n);
        run.deactivate();
        let leaks = check_image(made, world);
        assert_eq!(leaks, Ok(0), "after a clean end");
    }
    run.activate();
    run.compare_all();
    run.deactivate();
    let dir = support::dir();
    made.store(dir.path(), world);
    made.qemu_finds_nothing(dir.path());
    let now = world.tick();
    compare(&run, &made.qemu_reads(dir.path(), None), now, "QEMU reads");
    if made.case.options.contains("data_file_raw") {
        let holds = made.raw_holds(dir.path(), "data.raw");
        compare(&run, &holds, now, "the data file holds");
    }
}

fn begin(made: &Made, world: &std::sync::Arc<sim::world::World>, seed: u64) -> Run {
    let workers = 1 + seed as usize % 3;
    Run::new(made.start(world, workers, seed)).expect("the image opens")
}

fn compare(run: &Run, holds: &[Value], now: u64, what: &str) {
    for (sector, value) in (0..).zip(holds) {
        let allowed = run.model.readable(sector, now);
        assert!(
            allowed.contains(value),
            "{what} {value:#x} in sector {sector}, not one of {allowed:x?}\n{}",
            run.model.story(sector)
        );
    }
}

#[test]
fn new_images_by_qemu() {
    each(FORMATS, rounds(2), serve);
}

#[test]
fn new_images_by_fathom() {
    let own = |case: &Case| Case { own: true, ..*case };
    let cases: Vec<_> = FORMATS.iter().map(own).collect();
    each(&cases, rounds(1), serve);
}

#[test]
fn few_tables_in_memory() {
    let tiny = |case: &Case| Case {
        tiny_cache: true,
        ..*case
    };
    let cases: Vec<_> = FORMATS.iter().map(tiny).collect();
    each(&cases, rounds(1), serve);
}

#[test]
fn images_with_data() {
    let filled = |case: &Case| Case {
        filled: Some(Filled::Plain),
        ..*case
    };
    let cases: Vec<_> = FORMATS.iter().map(filled).collect();
    each(&cases, rounds(1), serve);
}

#[test]
fn compressed_images() {
    let filled = |case: &Case| Case {
        filled: Some(Filled::Compressed),
        ..*case
    };
    let can = |case: &&Case| case.format == "qcow2" && !case.options.contains("preallocation");
    let cases: Vec<_> = FORMATS.iter().filter(can).map(filled).collect();
    each(&cases, rounds(1), serve);
}

#[test]
fn external_data_files() {
    each(DATA_FILES, rounds(2), serve);
}

/// Overlapping writes and zeroes in clusters that have some data. The raw data file must equal what
/// the guest sees. If only the guest saw zeroes, later zeroes would not correct the file.
#[test]
fn what_overlaps_is_the_same_in_a_raw_data_file() {
    let is_raw = |case: &&Case| case.options.contains("data_file_raw");
    let cases: Vec<_> = DATA_FILES.iter().filter(is_raw).copied().collect();
    assert!(
        cases
            .iter()
            .any(|case| case.options.contains("extended_l2"))
    );
    each(&cases, rounds(3), |made, seed| {
        let world = made.world(seed);
        let mut run = begin(made, &world, seed);
        run.activate();
        let cluster = made.case.cluster / SECTOR as u64;
        let clusters: Vec<u64> = (0..run.model.sectors() / cluster).collect();
        for some in clusters.chunks(8) {
            let firsts = some.iter().map(|n| n * cluster);
            let data = |first| Ask::plain(Op::Write, first, 1);
            run.all(firsts.clone().map(data));
            let zeroes = |first| Ask::plain(Op::WriteZeroes, first, cluster);
            run.all(
                firsts
                    .clone()
                    .flat_map(|first| [data(first), zeroes(first)]),
            );
            run.all(firsts.map(zeroes));
        }
        run.compare_all();
        run.deactivate();
        let dir = support::dir();
        made.store(dir.path(), &world);
        let holds = made.raw_holds(dir.path(), "data.raw");
        compare(&run, &holds, world.tick(), "the data file holds");
    });
}

#[test]
fn backing_files() {
    each(&cases_on_backings(), rounds(1), serve);
}

#[test]
fn what_is_read_becomes_the_images_own() {
    each(&cases_on_backings(), rounds(1), |made, seed| {
        let world = made.world(seed);
        let start = made.start(&world, 1 + seed as usize % 3, seed).copying();
        let mut run = Run::new(start).expect("the image opens");
        run.activate();
        run.requests(60);
        // Reads the whole disk.
        let sectors = run.model.sectors();
        let reads = (0..2).flat_map(|_| (0..sectors).step_by(128));
        run.all(reads.map(|first| Ask::plain(Op::Read, first, 128.min(sectors - first))));
        run.deactivate();
        serve_by(made, &world, run);
    });
}

fn cases_on_backings() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, case) in FORMATS.iter().enumerate() {
        // Combines each case with some of the backing images.
        for backing in BACKINGS.iter().skip(n % 2).step_by(2) {
            if case.options.contains("preallocation") && !case.options.contains("extended") {
                continue;
            }
            cases.push(Case {
                backing: Some(*backing),
                filled: None,
                ..*case
            });
        }
    }
    cases
}

/// A request that overlaps a read may change the result of the read, but the clusters being read
/// are not reused before the read ends. The read returns old or new contents, never those of other
/// clusters.
#[test]
fn reads_that_take_long() {
    let serve = |made: &Made, seed: u64| {
        let world = made.world(seed);
        let mut run = begin(made, &world, seed);
        run.flushes = 20;
        run.activate();
        for _ in 0..4 {
            run.requests(40);
            run.outlived_by_reads(80);
        }
        run.deactivate();
        assert_eq!(check_image(made, &world), Ok(0), "after a clean end");
    };
    each(FORMATS, rounds(2), serve);
}

/// Discarded clusters are free, as QEMU counts them. Clusters that are only zeroed stay allocated.
#[test]
fn what_is_given_up_is_free_and_what_is_not_is_kept() {
    let cases = [SMALL, NARROW, EXTENDED, QCOW2];
    let empties = [
        (Op::Discard, true, false),
        (Op::WriteZeroes, true, false),
        (Op::WriteZeroes, false, true),
    ];
    each(&cases, 1, |made, seed| {
        for (op, unmap, keeps) in empties {
            let world = made.world(seed);
            // A compressed cluster does not stay allocated.
            let start = Start {
                plain: true,
                ..made.start(&world, 1 + seed as usize % 3, seed)
            };
            let mut run = Run::new(start).expect("the image opens");
            let sectors = run.model.sectors();
            let ask = |op, first, sectors| Ask {
                op,
                first,
                sectors,
                fua: false,
                unmap,
            };
            run.activate();
            let firsts = (0..sectors).step_by(256);
            run.all(firsts.map(|first| ask(Op::Write, first, 256.min(sectors - first))));
            run.all([ask(op, 0, sectors)].into_iter());
            run.deactivate();
            let dir = support::dir();
            made.store(dir.path(), &world);
            made.qemu_finds_nothing(dir.path());
            let (_, json) = support::qemu_check(dir.path(), &made.names[0], "qcow2");
            let count = json.expect("JSON")["allocated-clusters"].as_u64();
            let all = (sectors * SECTOR as u64).div_ceil(made.case.cluster);
            let left = if keeps { all } else { 0 };
            assert_eq!(count.unwrap_or(0), left, "{op:?}, unmap: {unmap}");
        }
    });
}

/// A seed must produce the same run every time.
#[test]
fn a_seed_does_the_same_again() {
    let filled = |case: &Case| Case {
        filled: Some(Filled::Compressed),
        ..*case
    };
    let compressed = |case: &&Case| case.format == "qcow2" && !case.options.contains("prealloc");
    let mut cases: Vec<_> = FORMATS.iter().filter(compressed).map(filled).collect();
    cases.extend(DATA_FILES);
    each(&cases, rounds(1), |made, seed| {
        let log = || {
            let world = made.world(seed);
            world.state().log = Some(Log::default());
            let mut run = begin(made, &world, seed);
            run.activate();
            run.requests(200);
            run.deactivate();
            let end = world.tick();
            (end, world.state().log.take().expect("it was put there"))
        };
        let ((end, first), (end_again, second)) = (log(), log());
        // The 200 requests cause about 50 to 300 events that change the image.
        assert!(first.events.len() > 20, "little was done");
        for (event, again) in first.events.iter().zip(&second.events) {
            assert!(event == again, "{event:x?}, the next time {again:x?}");
        }
        assert!(first.flushes == second.flushes);
        assert_eq!((end, first.events.len()), (end_again, second.events.len()));
    });
}

#[test]
fn raw_files() {
    let raw = Case {
        name: "raw",
        format: "raw",
        ..QCOW2
    };
    each(&[raw], rounds(3), serve);
}

#[test]
fn encrypted_images() {
    let options = |name, options, cluster| Case {
        name,
        options,
        cluster,
        ..ENCRYPTED
    };
    let images = [
        LUKS,
        ENCRYPTED,
        options(
            "encrypted-512",
            "cluster_size=512,encrypt.format=luks,encrypt.iter-time=10",
            512,
        ),
        options(
            "encrypted-v2",
            "compat=0.10,encrypt.format=luks,encrypt.iter-time=10",
            65536,
        ),
        options(
            "encrypted-extended",
            "extended_l2=on,encrypt.format=luks,encrypt.iter-time=10",
            65536,
        ),
    ];
    let mut cases = Vec::new();
    for case in images {
        let has_tables = case.format().has_tables();
        cases.push(case);
        cases.push(Case {
            filled: Some(Filled::Plain),
            tiny_cache: true,
            ..case
        });
        let device = Case {
            device: true,
            ..case
        };
        cases.extend(has_tables.then_some(device));
        for backing in [Backing::LUKS, Backing::RAW] {
            let above = Case {
                own: true,
                backing: Some(backing),
                ..case
            };
            cases.extend(has_tables.then_some(above));
        }
    }
    each(&cases, rounds(1), serve);
}

/// Runs on devices, whose unwritten parts do not read as zeroes.
#[test]
fn devices() {
    let device = |case: &Case| Case {
        device: true,
        ..*case
    };
    let small = |case: &&Case| case.format == "qcow2" && case.cluster <= 65536;
    let cases: Vec<_> = FORMATS.iter().filter(small).map(device).collect();
    each(&cases, rounds(1), serve);
}

/// A snapshot that is created between two runs keeps its contents.
#[test]
fn snapshots() {
    let can = |case: &&Case| case.format == "qcow2" && !case.options.contains("refcount_bits=1");
    let mut cases: Vec<_> = FORMATS.iter().filter(can).copied().collect();
    let below = |case: &Case| Case {
        backing: Some(Backing::RAW),
        ..*case
    };
    let compressed = |case: &Case| Case {
        filled: Some(Filled::Compressed),
        ..*case
    };
    let plain = |case: &&Case| !case.options.contains("preallocation");
    let more: Vec<_> = cases.iter().filter(plain).map(below).collect();
    let compressed: Vec<_> = cases.iter().filter(plain).map(compressed).collect();
    cases.extend(more);
    cases.extend(compressed);
    each(&cases, rounds(1), with_snapshots);
}

fn with_snapshots(made: &Made, seed: u64) {
    let dir = support::dir();
    let dir = dir.path();
    let world = made.world(seed);
    let mut run = begin(made, &world, seed);
    let mut snapshots = Vec::new();
    for name in ["one", "two", "three"] {
        run.activate();
        run.requests(80);
        run.deactivate();
        made.store(dir, &world);
        made.qemu_finds_nothing(dir);
        made.snapshot(dir, "-c", name);
        snapshots.push((name, made.qemu_reads(dir, None)));
        made.load(dir, &world);
    }
    run.activate();
    run.requests(80);
    run.deactivate();
    made.store(dir, &world);
    made.qemu_finds_nothing(dir);
    let now = world.tick();
    compare(&run, &made.qemu_reads(dir, None), now, "QEMU reads");
    for (name, held) in &snapshots {
        let holds = made.qemu_reads(dir, Some(name));
        assert!(holds == *held, "snapshot {name} has changed");
    }
    // Without the snapshots, everything except the disk itself is free.
    for (name, _) in &snapshots {
        made.snapshot(dir, "-d", name);
        made.qemu_finds_nothing(dir);
    }
    compare(&run, &made.qemu_reads(dir, None), now, "QEMU reads");
}
