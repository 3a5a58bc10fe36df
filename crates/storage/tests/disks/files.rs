//! Random requests on files, for each engine and cache mode, against a model.

use crate::common::Guest;
use crate::common::model::{Model, SECTOR, plans};
use fathom_core::Disk;
use fathom_storage::{Cache, EngineKind, FileDisk, FileOptions, engine};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::sync::Arc;

/// Number of sectors of the test disk: 2 MiB and a sector, so that it does not end on a block
/// boundary.
const SECTORS: u64 = 4097;

fn property(kind: EngineKind, cache: Cache, block: Option<u32>, workers: usize) {
    on_file(kind, cache, block, workers, None);
}

/// Runs the property. With `growable_from`, the file may grow, and has that many bytes at first.
fn on_file(
    kind: EngineKind,
    cache: Cache,
    block: Option<u32>,
    workers: usize,
    growable_from: Option<u64>,
) {
    let config = Config {
        cases: 24,
        failure_persistence: None,
        ..Config::default()
    };
    let requests = prop::collection::vec(plans(SECTORS, workers), 1..120);
    let outcome = TestRunner::new(config).run(&requests, |requests| {
        let image = tempfile::Builder::new()
            .tempfile_in(env!("CARGO_TARGET_TMPDIR"))
            .expect("a file");
        let len = growable_from.unwrap_or(SECTORS * SECTOR);
        image.as_file().set_len(len).expect("sized");
        let options = FileOptions {
            cache,
            growable: growable_from.is_some(),
            engine: kind,
            min_direct_block: block,
            ..FileOptions::default()
        };
        let disk = Arc::new(FileDisk::open(image.path(), options).expect("opened"));
        disk.activate().expect("activated");
        let mut guests: Vec<_> = (0..workers)
            .map(|_| Guest::new(disk.clone(), move || engine(kind)))
            .collect();
        let mut model = Model::new(SECTORS);
        model.run(&mut guests, &requests);
        guests.into_iter().for_each(Guest::detach);
        disk.deactivate().expect("deactivated");
        let mut content = std::fs::read(image.path()).expect("read");
        if growable_from.is_some() {
            content.resize((SECTORS * SECTOR) as usize, 0);
        }
        prop_assert_eq!(content.len() as u64, SECTORS * SECTOR);
        model.check(0, &content);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{kind}, cache={cache}, block {block:?}, {workers} workers: {error}");
    }
}

#[test]
fn io_uring_direct() {
    property(EngineKind::IoUring, Cache::None, None, 1);
}

#[test]
fn io_uring_with_blocks_of_4096() {
    property(EngineKind::IoUring, Cache::None, Some(4096), 2);
}

#[test]
fn io_uring_writeback() {
    property(EngineKind::IoUring, Cache::Writeback, None, 2);
}

#[test]
fn io_uring_writethrough() {
    property(EngineKind::IoUring, Cache::Writethrough, None, 1);
}

#[test]
fn native_direct() {
    property(EngineKind::Native, Cache::None, None, 2);
}

#[test]
fn native_with_blocks_of_4096() {
    property(EngineKind::Native, Cache::None, Some(4096), 2);
}

#[test]
fn threads_direct() {
    property(EngineKind::Threads, Cache::None, None, 1);
}

#[test]
fn threads_with_blocks_of_4096() {
    property(EngineKind::Threads, Cache::None, Some(4096), 2);
}

#[test]
fn threads_writeback() {
    property(EngineKind::Threads, Cache::Writeback, None, 2);
}

#[test]
fn threads_writethrough() {
    property(EngineKind::Threads, Cache::Writethrough, None, 1);
}

/// Length in bytes of a growable file at which no request ends.
const ODD: Option<u64> = Some(70_001);

#[test]
fn growable_by_io_uring() {
    let kind = EngineKind::IoUring;
    on_file(kind, Cache::None, None, 2, ODD);
    on_file(kind, Cache::None, Some(4096), 2, ODD);
    on_file(kind, Cache::Writeback, None, 1, ODD);
}

#[test]
fn growable_by_native_and_threads() {
    on_file(EngineKind::Native, Cache::None, None, 1, ODD);
    on_file(EngineKind::Native, Cache::None, Some(4096), 2, ODD);
    on_file(EngineKind::Threads, Cache::Writeback, None, 2, ODD);
}
