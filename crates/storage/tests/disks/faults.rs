//! Random requests on engines that interrupt, shorten, delay, reorder and fail operations. Reads
//! never return wrong data, no request completes twice, and every error is reported.

use crate::common::Guest;
use crate::common::faulty::{Faults, Faulty, Injected};
use crate::common::model::{Model, SECTOR, plans};
use fathom_core::{Disk, Engine};
use fathom_storage::{Cache, EngineKind, FileDisk, FileOptions, engine};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::io;
use std::sync::Arc;

const SECTORS: u64 = 2049;

fn faulty(
    kind: EngineKind,
    faults: Faults,
    seed: u64,
    injected: &Arc<Injected>,
) -> impl FnOnce() -> io::Result<Box<dyn Engine>> + Send + 'static {
    let injected = injected.clone();
    move || Ok(Box::new(Faulty::new(engine(kind)?, faults, seed, injected)))
}

fn property(kind: EngineKind, cache: Cache, block: Option<u32>, failed: u64) {
    const WORKERS: usize = 2;
    let faults = Faults {
        short: 25,
        interrupted: 10,
        failed,
        delayed: 30,
        // Granularity in bytes of short results.
        unit: match cache {
            Cache::None => block.map_or(SECTOR, u64::from),
            _ => 1,
        },
    };
    let config = Config {
        cases: 24,
        failure_persistence: None,
        ..Config::default()
    };
    let requests = prop::collection::vec(plans(SECTORS, WORKERS), 1..120);
    let outcome = TestRunner::new(config).run(&(requests, any::<u64>()), |(requests, seed)| {
        let image = tempfile::Builder::new()
            .tempfile_in(env!("CARGO_TARGET_TMPDIR"))
            .expect("a file");
        image.as_file().set_len(SECTORS * SECTOR).expect("sized");
        let options = FileOptions {
            cache,
            engine: kind,
            min_direct_block: block,
            ..FileOptions::default()
        };
        let disk = Arc::new(FileDisk::open(image.path(), options).expect("opened"));
        let injected = Arc::new(Injected::default());
        let mut guests: Vec<_> = (0..WORKERS as u64)
            .map(|i| Guest::new(disk.clone(), faulty(kind, faults, seed ^ i, &injected)))
            .collect();
        let mut model = Model::new(SECTORS);
        model.faults = failed > 0;
        model.run(&mut guests, &requests);
        guests.into_iter().for_each(Guest::detach);
        if cache == Cache::None {
            prop_assert_eq!(model.failures, injected.count());
        } else {
            // After one failed flush, all later flushes fail, too.
            prop_assert!(model.failures >= injected.count());
        }
        if failed == 0 {
            disk.deactivate().expect("deactivated");
        }
        let content = std::fs::read(image.path()).expect("read");
        model.check(0, &content[..(SECTORS * SECTOR) as usize]);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{kind}, cache={cache}, block {block:?}: {error}");
    }
}

#[test]
fn io_uring_without_errors() {
    property(EngineKind::IoUring, Cache::None, None, 0);
    property(EngineKind::IoUring, Cache::None, Some(4096), 0);
    property(EngineKind::IoUring, Cache::Writethrough, None, 0);
}

#[test]
fn native_without_errors() {
    property(EngineKind::Native, Cache::None, None, 0);
    property(EngineKind::Native, Cache::None, Some(4096), 0);
}

#[test]
fn threads_without_errors() {
    property(EngineKind::Threads, Cache::None, Some(4096), 0);
    property(EngineKind::Threads, Cache::Writeback, None, 0);
}

#[test]
fn io_uring_with_errors() {
    property(EngineKind::IoUring, Cache::None, None, 5);
    property(EngineKind::IoUring, Cache::None, Some(4096), 5);
    property(EngineKind::IoUring, Cache::Writeback, None, 5);
}

#[test]
fn native_with_errors() {
    property(EngineKind::Native, Cache::None, Some(4096), 5);
}

#[test]
fn threads_with_errors() {
    property(EngineKind::Threads, Cache::None, Some(4096), 5);
    property(EngineKind::Threads, Cache::Writethrough, None, 5);
}
