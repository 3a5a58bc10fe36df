//! Checks that Fathom and imago, another image library, read what the other one has written to the
//! same image.

use crate::support;

use crate::support::sim::case::{Backing, Case, Filled, Made, NARROW, QCOW2, SMALL};
use crate::support::sim::model::{BEFORE, Model, SECTOR, Value, ZERO, fill, identify};
use crate::support::sim::rng::Rng;
use crate::support::sim::run::{Run, Start};
use crate::support::sim::{each, rounds};
use imago::file::File;
use imago::qcow2::Qcow2;
use imago::{FormatAccess, FormatDriverBuilder, PermissiveImplicitOpenGate};
use std::path::Path;

/// Cases that imago supports: imago has neither zstd nor subclusters.
const CASES: &[Case] = &[
    SMALL,
    NARROW,
    Case {
        name: "4k-v2",
        options: "compat=0.10,cluster_size=4k",
        cluster: 4096,
        ..QCOW2
    },
    Case {
        name: "4k-rc64-own",
        options: "cluster_size=4k,refcount_bits=64",
        cluster: 4096,
        own: true,
        ..QCOW2
    },
    Case {
        name: "64k-compressed",
        filled: Some(Filled::Compressed),
        ..QCOW2
    },
    Case {
        name: "64k-chain",
        backing: Some(Backing {
            chain: true,
            longer: -100,
            ..Backing::QCOW2
        }),
        ..QCOW2
    },
    Case {
        name: "64k-data-file",
        options: "data_file=data.raw",
        ..QCOW2
    },
    Case {
        name: "2M",
        options: "cluster_size=2M",
        cluster: 2 << 20,
        ..QCOW2
    },
];

/// The value that imago writes to sectors.
const OTHER: Value = BEFORE + 9;

fn open(dir: &Path, made: &Made, write: bool) -> FormatAccess<File> {
    let image = Qcow2::<File>::builder_path(dir.join(&made.names[0])).write(write);
    let image = image.open(PermissiveImplicitOpenGate::default());
    FormatAccess::new(image.expect("imago opens it"))
}

fn imago_reads(dir: &Path, made: &Made) -> Vec<Value> {
    let image = open(dir, made, false);
    let mut bytes = vec![0; made.initial.len() * SECTOR];
    assert_eq!(image.size(), bytes.len() as u64);
    image.read(&mut bytes, 0).expect("imago reads");
    let sectors = bytes.chunks(SECTOR).zip(0..);
    let holds = sectors.map(|(bytes, n)| identify(bytes, n).expect("a sector that was written"));
    holds.collect()
}

/// Writes random ranges of all lengths.
fn imago_writes(dir: &Path, made: &Made, holds: &mut [Value], seed: u64) {
    let image = open(dir, made, true);
    let mut rng = Rng::new(seed);
    for _ in 0..40 {
        let first = rng.below(holds.len() as u64);
        let most = (holds.len() as u64 - first).min(300);
        let range = first..first + 1 + rng.below(most);
        let value = if rng.one_in(4) { ZERO } else { OTHER };
        let mut bytes = vec![0; (range.end - range.start) as usize * SECTOR];
        fill(&mut bytes, first, value);
        let written = image.write(&bytes, first * SECTOR as u64);
        written.expect("imago writes");
        holds[range.start as usize..range.end as usize].fill(value);
    }
    image.flush().expect("imago flushes");
}

fn same(who: &str, reads: &[Value], holds: &[Value]) {
    let mut both = reads.iter().zip(holds);
    let differs = both.position(|(reads, holds)| reads != holds);
    if let Some(n) = differs {
        let (is, was) = (reads[n], holds[n]);
        panic!("{who}: sector {n} is {is:x}, not {was:x}");
    }
}

#[test]
fn each_reads_what_the_other_has_written() {
    each(CASES, rounds(1), |made, seed| {
        let dir = support::dir();
        let dir = dir.path();
        let world = made.world(seed);
        let mut run = Run::new(made.start(&world, 2, seed)).expect("the image opens");
        run.activate();
        run.requests(200);
        run.drain();
        let mut holds = run.compare_all();
        assert!(run.deactivate());
        made.store(dir, &world);
        made.qemu_finds_nothing(dir);
        same("QEMU, after Fathom", &made.qemu_reads(dir, None), &holds);
        same("imago, after Fathom", &imago_reads(dir, made), &holds);

        imago_writes(dir, made, &mut holds, seed);
        made.qemu_finds_nothing(dir);
        made.load(dir, &world);
        let start = Start {
            model: Model::new(holds.clone(), made.below.clone()),
            ..made.start(&world, 2, seed)
        };
        let mut run = Run::new(start).expect("the image opens");
        run.activate();
        same("Fathom, after imago", &run.compare_all(), &holds);
        assert!(run.deactivate());
    });
}
