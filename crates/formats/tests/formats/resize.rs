//! Resizes disks while requests are served, and compares their contents with a model and with what
//! QEMU reads.

use crate::support;
use crate::support::sim;

use crate::support::sim::case::{Backing, Case, EXTENDED, Made, QCOW2, SNAPSHOT};
use crate::support::sim::cut::check_image;
use crate::support::sim::matrix::MATRIX;
use crate::support::sim::model::{SECTOR, ZERO};
use crate::support::sim::run::{Run, Start};
use crate::support::sim::world::World;
use crate::support::sim::{each, rounds};
use std::sync::Arc;

/// A backing file that is longer than the disk.
const LONGER: Backing = Backing {
    longer: 1000,
    ..Backing::RAW
};

const HIDING: &[Case] = &[
    Case {
        name: "4k-longer-below",
        options: "cluster_size=4k",
        cluster: 4096,
        backing: Some(LONGER),
        ..QCOW2
    },
    Case {
        name: "512-longer-below",
        options: "cluster_size=512",
        cluster: 512,
        backing: Some(Backing {
            longer: 777,
            chain: true,
            ..Backing::QCOW2
        }),
        ..QCOW2
    },
    Case {
        name: "16k-extended-longer-below",
        backing: Some(LONGER),
        ..EXTENDED
    },
    Case {
        name: "4k-v2-longer-below",
        options: "cluster_size=4k,compat=0.10",
        cluster: 4096,
        backing: Some(LONGER),
        ..QCOW2
    },
    Case {
        name: "qed-longer-below",
        format: "qed",
        options: "cluster_size=4k,table_size=2",
        cluster: 4096,
        backing: Some(LONGER),
        ..QCOW2
    },
];

/// Runs and returns the files and the disk's final number of sectors.
fn run(made: &Made, seed: u64) -> (Arc<World>, usize) {
    let world = made.world(seed);
    let start = made.start(&world, 1 + seed as usize % 3, seed);
    let start = Start {
        model: start.model.with_room(made.case.room()),
        ..start
    };
    let mut run = Run::new(start).expect("the image opens");
    run.activate();
    for _ in 0..3 {
        run.requests(60);
        run.resizes(made, 3);
        run.drain();
        run.compare_all();
        run.requests(30);
        run.deactivate();
        check_image(made, &world).unwrap_or_else(|problem| panic!("{problem}"));
        run.activate();
        run.compare_all();
    }
    let holds = run.compare_all();
    run.deactivate();
    let leaks = check_image(made, &world).unwrap_or_else(|problem| panic!("{problem}"));
    assert_eq!(leaks, 0);
    if !made.case.format().has_tables() {
        return (world, holds.len());
    }
    let dir = support::dir();
    made.store(dir.path(), &world);
    made.qemu_finds_nothing(dir.path());
    let theirs = made.qemu_reads_all(dir.path(), holds.len());
    let differs = holds.iter().zip(&theirs).position(|(a, b)| a != b);
    assert_eq!(differs, None, "of {} sectors", holds.len());
    if made.case.options.contains("data_file_raw") {
        let file = sim::case::raw_holds(dir.path(), "data.raw", holds.len());
        assert!(file == holds, "the data file holds something else");
    }
    grow_by_qemu(made, &dir, holds.len());
    (world, holds.len())
}

/// Checks that growing the disk with QEMU exposes no old data after the end of the disk.
fn grow_by_qemu(made: &Made, dir: &tempfile::TempDir, sectors: usize) {
    if made.case.format != "qcow2" || made.case.backing.is_some() {
        return;
    }
    let more = format!(
        "{}",
        (sectors.next_multiple_of(1 << 12) + (1 << 12)) * SECTOR
    );
    let opens = made.case.opens();
    let mut args = vec!["resize", "-q"];
    args.extend(opens.iter().map(String::as_str));
    args.push(&more);
    support::qemu_img(dir.path(), &args);
    let holds = made.qemu_reads_all(dir.path(), more.parse::<usize>().unwrap() / SECTOR);
    let cluster = made.case.cluster as usize / SECTOR;
    let behind = holds.iter().skip(sectors.next_multiple_of(cluster));
    assert_eq!(behind.copied().max().unwrap_or(ZERO), ZERO);
}

#[test]
fn a_disk_holds_what_was_written_within_its_ends() {
    each(MATRIX, rounds(2), |made, seed| drop(run(made, seed)));
}

#[test]
fn what_is_below_a_grown_disk_is_hidden() {
    each(HIDING, rounds(6), |made, seed| drop(run(made, seed)));
}

#[test]
fn a_snapshot_keeps_what_it_has() {
    each(&[SNAPSHOT], rounds(6), |made, seed| {
        let dir = support::dir();
        made.store(dir.path(), &made.world(seed));
        let before = made.qemu_reads(dir.path(), Some("before"));
        let (world, sectors) = run(made, seed);
        let after = support::dir();
        made.store(after.path(), &world);
        let after = made.qemu_reads(after.path(), Some("before"));
        // QEMU reads up to the disk's present end.
        let sectors = sectors.min(before.len());
        assert!(before[..sectors] == after[..sectors]);
    });
}
