//! Tests block status replies.

use crate::common::{Ask, Guest};
use fathom_core::extents::extents;
use fathom_core::{Disk, Op, Status};
use fathom_storage::{EngineKind, FileDisk, FileOptions, MemoryDisk, NullDisk, engine};
use std::sync::Arc;

const SIZE: u64 = (64 << 20) + 512;
/// Offsets and lengths in bytes of the written ranges.
const WRITTEN: [(u64, u64); 3] = [(1 << 20, 4096), ((9 << 20) + 512, 8192), (SIZE - 512, 512)];

/// Returns the block status of the disk from `from` on, with room for `room` extents in each reply.
fn told(guest: &mut Guest, room: usize, from: u64) -> Vec<(Status, u64)> {
    let (mut at, mut all) = (from, Vec::new());
    while at < SIZE {
        let mut ask = Ask::new(Op::BlockStatus, at, SIZE - at);
        ask.memory = crate::common::Memory::new(8 * room, 0xa5);
        ask.segments = vec![(0, 8 * room)];
        let (errno, ask) = guest.run(ask);
        assert_eq!(errno, 0);
        let before = at;
        for (status, len) in extents(ask.memory.bytes()) {
            at += len;
            all.push((status, len));
        }
        assert!(at > before && at <= SIZE);
    }
    all
}

/// Checks that the written ranges are data, and everything else is a hole, give or take a huge
/// page.
fn check(disk: Arc<dyn Disk>) {
    disk.activate().expect("activated");
    let mut guest = Guest::new(disk.clone(), || engine(EngineKind::IoUring));
    for (offset, len) in WRITTEN {
        assert_eq!(guest.write(offset, &vec![7; len as usize]), 0);
    }
    for (room, from) in [(1, 0), (2, 512), (512, 0), (512, (9 << 20) + 1024)] {
        let (mut at, mut holes) = (from, 0);
        for (status, len) in told(&mut guest, room, from) {
            assert_eq!(status.hole, status.zero);
            for (offset, written) in WRITTEN {
                let apart = offset >= at + len || offset + written <= at;
                assert!(apart || !status.zero, "{at} to {} is no hole", at + len);
            }
            holes += if status.hole { len } else { 0 };
            at += len;
        }
        assert_eq!(at, SIZE);
        assert!(SIZE - from - holes <= 8 << 20, "{holes} bytes of holes");
    }
    guest.detach();
    disk.deactivate().expect("deactivated");
}

#[test]
fn a_sparse_file_says_so() {
    let image = tempfile::Builder::new()
        .tempfile_in(env!("CARGO_TARGET_TMPDIR"))
        .expect("a file");
    image.as_file().set_len(SIZE).expect("sized");
    let disk = FileDisk::open(image.path(), FileOptions::default());
    check(Arc::new(disk.expect("opened")));
}

#[test]
fn memory_that_nobody_has_touched_is_a_hole() {
    check(Arc::new(MemoryDisk::new(SIZE).expect("made")));
}

#[test]
fn memory_that_was_only_read_is_a_hole() {
    let disk = Arc::new(MemoryDisk::new(SIZE).expect("made"));
    let mut guest = Guest::new(disk, || engine(EngineKind::IoUring));
    assert_eq!(guest.read(1 << 20, 8192), Ok(vec![0; 8192]));
    let data = told(&mut guest, 512, 0).into_iter().filter(|e| !e.0.hole);
    assert_eq!(data.map(|e| e.1).sum::<u64>(), 0);
    guest.detach();
}

#[test]
fn what_memory_gives_back_is_a_hole_again() {
    let disk = Arc::new(MemoryDisk::new(SIZE).expect("made"));
    let mut guest = Guest::new(disk, || engine(EngineKind::IoUring));
    assert_eq!(guest.write(0, &[1; 8192]), 0);
    assert_eq!(guest.run(Ask::new(Op::Discard, 0, 8192)).0, 0);
    let holes = told(&mut guest, 4, 0).into_iter().filter(|e| e.0.hole);
    assert_eq!(holes.map(|e| e.1).sum::<u64>(), SIZE);
    guest.detach();
}

#[test]
fn what_cannot_be_told_is_data() {
    let mut guest = Guest::new(Arc::new(NullDisk::new(SIZE)), || {
        engine(EngineKind::IoUring)
    });
    assert_eq!(told(&mut guest, 1, 0), [(Status::DATA, SIZE)]);
    guest.detach();
}
