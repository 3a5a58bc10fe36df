//! Tests that the files on the disk match the model.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use proptest::prelude::*;

use super::mail::{MIN_SIZE, Weights};
use super::model::Model;
use super::options::Options;
use super::tree::file_name;

/// Returns the sizes of all files, by their paths below `dir`.
fn on_disk(dir: &Path) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if entry.file_type().unwrap().is_dir() {
            let below = on_disk(&entry.path()).into_iter();
            found.extend(below.map(|(path, size)| (format!("{name}/{path}"), size)));
        } else {
            found.insert(name, entry.metadata().unwrap().len());
        }
    }
    found
}

/// Returns the files and sizes that the model expects after a run with a number of operations.
fn expected(options: &Options, align: u32) -> BTreeMap<String, u64> {
    let mut files = BTreeMap::new();
    for thread in 0..options.threads {
        let mut model = Model::new(options, thread, align);
        for _ in 0..options.number_ios.unwrap() {
            model.next();
        }
        for file in model.files() {
            let path = format!("d{:03}/{}", file.dir, file_name(file.id));
            files.insert(path, file.size.into());
        }
    }
    files
}

fn options() -> impl Strategy<Value = Options> {
    let weights = prop::array::uniform5(0..20u16).prop_map(Weights);
    let sets = (1..5u16, 0..40u32, 0..4u16, 0..60u32, 1..6u32);
    let rest = (any::<u64>(), any::<bool>(), 0..4u32, 1..60u64);
    (weights, sets, rest).prop_map(
        |(weights, (threads, files, dirs, sectors, bs), (seed, verify, fsync, ios))| Options {
            threads,
            files: files + u32::from(threads),
            dirs: dirs + threads,
            max_size: sectors * 512 + MIN_SIZE,
            bs: bs * 512,
            weights: if weights.sum() == 0 {
                Weights::default()
            } else {
                weights
            },
            runtime: None,
            number_ios: Some(ios),
            fsync,
            direct: false,
            verify,
            keep: true,
            seed,
            ..Options::new("")
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn the_model_is_what_is_on_the_disk(options in options()) {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let options = Options { dir: dir.path().into(), ..options };
        let report = super::run(&options, &mut |_| {}).unwrap();
        let kept = report.kept.clone().unwrap();
        prop_assert_eq!(on_disk(&kept), expected(&options, 512));
        let ops: u64 = report.operations.iter().map(|o| o.ops).sum();
        prop_assert_eq!(ops, u64::from(options.threads) * options.number_ios.unwrap());
    }
}

/// Checks the counters of a load whose operations are all known.
#[test]
fn operations_transfers_and_bytes_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        threads: 2,
        files: 300,
        dirs: 7,
        runtime: None,
        number_ios: Some(500),
        direct: false,
        ..Options::new(dir.path())
    };
    let report = super::run(&options, &mut |_| {}).unwrap();
    let mut counted = [(0, 0, 0); 5];
    for thread in 0..options.threads {
        let mut model = Model::new(&options, thread, 512);
        for _ in 0..500 {
            let step = model.next();
            let (ops, ios, bytes) = &mut counted[step.kind as usize];
            let written = u64::from(step.file.size - step.from);
            *ops += 1;
            *ios += match step.kind.name() {
                "open" | "delete" => 1,
                _ => written.div_ceil(8192),
            };
            *bytes += match step.kind.name() {
                "create" | "append" => written,
                _ => 0,
            };
        }
    }
    for (kind, (ops, ios, bytes)) in super::Kind::ALL.into_iter().zip(counted) {
        let found = report.operation(kind.name()).unwrap();
        assert_eq!((found.ops, found.ios), (ops, ios), "{kind:?}");
        assert_eq!(found.histogram.iter().map(|b| b[2]).sum::<u64>(), ops);
        if kind != super::Kind::Read {
            assert_eq!(found.bytes, bytes, "{kind:?}");
        }
    }
    let read = report.operation("read").unwrap();
    assert!(read.bytes > 0 && read.bytes <= read.ios * 8192);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}
