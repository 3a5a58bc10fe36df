//! Writes that are stored compressed. QEMU reads what was written, finds that all refcounts are
//! right, and counts as many compressed clusters.

use crate::support;

use crate::support::sim::case::{Case, Filled, LARGE, Made, NARROW, QCOW2, SMALL};
use crate::support::sim::cut::check_image;
use crate::support::sim::model::SECTOR;
use crate::support::sim::run::Run;
use crate::support::sim::worker::Ask;
use crate::support::sim::world::Fault;
use crate::support::sim::{each, rounds};
use fathom_core::Op;
use std::sync::Arc;

const CASES: &[Case] = &[
    SMALL,
    NARROW,
    Case {
        name: "512-v2",
        options: "cluster_size=512,compat=0.10",
        cluster: 512,
        ..QCOW2
    },
    Case {
        name: "1k-rc2-zstd",
        options: "cluster_size=1k,refcount_bits=2,compression_type=zstd",
        cluster: 1024,
        ..QCOW2
    },
    Case {
        name: "4k-rc4",
        options: "cluster_size=4k,refcount_bits=4",
        cluster: 4096,
        ..QCOW2
    },
    Case {
        name: "8k-rc8-device",
        options: "cluster_size=8k,refcount_bits=8",
        cluster: 8192,
        device: true,
        ..QCOW2
    },
    Case {
        name: "16k-extended-rc32",
        options: "cluster_size=16k,extended_l2=on,refcount_bits=32,compression_type=zstd",
        cluster: 16384,
        ..QCOW2
    },
    Case {
        name: "64k-rc64",
        options: "refcount_bits=64",
        ..QCOW2
    },
    Case {
        name: "64k-rc1-zstd",
        options: "refcount_bits=1,compression_type=zstd",
        ..QCOW2
    },
    Case {
        name: "64k-filled",
        filled: Some(Filled::Plain),
        ..QCOW2
    },
    LARGE,
    Case {
        name: "2M-extended-zstd",
        options: "cluster_size=2M,extended_l2=on,compression_type=zstd",
        cluster: 2 << 20,
        ..QCOW2
    },
];

fn begin(made: &Made, seed: u64) -> Run {
    let workers = 1 + seed as usize % 3;
    let mut start = made.start(&made.world(seed), workers, seed);
    start.options.compress = true;
    let mut run = Run::new(start).expect("the image opens");
    run.compressed = 100;
    run.activate();
    run
}

fn write(first: u64, sectors: u64) -> Ask {
    Ask {
        op: Op::Write,
        first,
        sectors,
        fua: false,
        unmap: false,
    }
}

/// Writes each cluster once, with many requests in flight.
fn fill(run: &mut Run, cluster: u64) {
    let (sectors, cluster) = (run.model.sectors(), cluster / SECTOR as u64);
    let firsts = (0..sectors).step_by(cluster as usize);
    run.all(firsts.map(|first| write(first, cluster.min(sectors - first))));
}

/// Compares the image with what QEMU reads. Returns the number of compressed clusters and the
/// file's length in bytes.
fn ask_qemu(made: &Made, run: &mut Run) -> (u64, u64) {
    let holds = run.compare_all();
    assert!(run.deactivate());
    let dir = support::dir();
    made.store(dir.path(), &Arc::clone(&run.world));
    made.qemu_finds_nothing(dir.path());
    assert!(made.qemu_reads(dir.path(), None) == holds);
    let json = support::qemu_check(dir.path(), &made.names[0], "qcow2").1;
    let count = json.expect("JSON")["compressed-clusters"].as_u64();
    (count.unwrap_or(0), run.world.state().files[0].len())
}

#[test]
fn a_disk_of_compressed_clusters() {
    each(CASES, rounds(1), |made, seed| {
        let mut run = begin(made, seed);
        fill(&mut run, made.case.cluster);
        let (count, len) = ask_qemu(made, &mut run);
        let bytes = run.model.sectors() * SECTOR as u64;
        let clusters = bytes.div_ceil(made.case.cluster);
        // Part of the written data is noise, which cannot be compressed.
        assert!(
            count > clusters / 2 && count < clusters,
            "{count} of {clusters}"
        );
        // With refcounts of one bit, each compressed cluster has its own host cluster. With the
        // largest clusters, most of such a small file is metadata.
        let case = &made.case;
        let shares = !case.name.contains("rc1") && !case.device && case.cluster <= 65536;
        if shares && case.filled.is_none() {
            assert!(len < bytes * 3 / 4, "{len} bytes for {bytes}");
        }
    });
}

/// Overwritten clusters are free again, compressed or not.
#[test]
fn clusters_that_are_written_again() {
    each(CASES, rounds(1), |made, seed| {
        let mut run = begin(made, seed);
        fill(&mut run, made.case.cluster);
        run.compressed = 50;
        for _ in 0..3 {
            run.requests(60);
            run.flush();
        }
        ask_qemu(made, &mut run);
    });
}

/// Sends one request at a time, so that no request waits for further ones.
#[test]
fn one_cluster() {
    each(CASES, rounds(1), |made, seed| {
        let mut run = begin(made, seed);
        for n in 0..4 {
            let cluster = made.case.cluster / SECTOR as u64;
            assert_eq!(run.alone(write(2 * n * cluster, cluster)), 0);
        }
        let (count, _) = ask_qemu(made, &mut run);
        assert!(count >= 3, "{count}");
    });
}

/// Fails each of the first operations in turn.
#[test]
fn what_could_not_be_written_is_free_again() {
    each(&CASES[..5], rounds(1), |made, seed| {
        for first in 0..30 {
            let mut run = begin(made, seed + first);
            run.strict = false;
            let state = || run.world.state();
            let fault = Fault {
                first: state().operations + first,
                count: 1,
                errno: libc::EIO,
            };
            state().fault = Some(fault);
            let cluster = made.case.cluster / SECTOR as u64;
            run.all((0..24).map(|n| write(n * cluster, cluster)));
            run.world.state().fault = None;
            assert_eq!(run.flush(), 0);
            assert!(run.deactivate());
            assert_eq!(check_image(made, &run.world), Ok(0), "{fault:?}");
        }
    });
}

#[test]
fn parts_of_clusters_are_written_as_ever() {
    each(&[QCOW2], 1, |made, seed| {
        let mut run = begin(made, seed);
        for (first, sectors) in [(0, 127), (1, 127), (128, 256), (7, 128)] {
            assert_eq!(run.alone(write(first, sectors)), 0);
        }
        let (count, _) = ask_qemu(made, &mut run);
        assert_eq!(count, 0);
    });
}

#[test]
fn images_that_cannot() {
    let formats = [("raw", ""), ("qed", ""), ("qcow2", "data_file=data.raw")];
    let cases = formats.map(|(format, options)| Case {
        name: "cannot",
        format,
        options,
        ..QCOW2
    });
    each(&cases, 1, |made, seed| {
        let mut run = begin(made, seed);
        assert_eq!(run.disk.compress_unit(), None);
        run.strict = false;
        assert_eq!(run.alone(write(0, 128)), 1, "it fails");
        let sector = run.read(0, 1).expect("it is read");
        assert_eq!(sector, made.initial[..1], "nothing has happened");
    });
}
