//! Tests of damaged images and of memory limits.

use super::bed::Bed;
use fathom_core::Op;
use std::sync::Arc;

const CLUSTER: u64 = 64 << 10;

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Returns the position of this guest cluster's entry, in an image with one L2 table.
fn l2_entry(bytes: &[u8], cluster: usize) -> usize {
    let l1 = word(bytes, 40) as usize;
    (word(bytes, l1) & 0x00ff_ffff_ffff_fe00) as usize + 8 * cluster
}

#[test]
fn entry_with_reserved_bits_fails_requests_for_its_cluster_only() {
    let preallocated = [("preallocation", "metadata")];
    let mut bed = Bed::new(&preallocated, 16 * CLUSTER, |bytes| {
        let at = l2_entry(bytes, 1);
        bytes[at + 7] |= 4;
    });
    let mut ask = |op, cluster: u64| bed.request(op, cluster * CLUSTER, 4096, false);
    assert_eq!(ask(Op::Write, 0), 0);
    assert_eq!(ask(Op::Read, 1), libc::EIO);
    assert_eq!(ask(Op::Write, 1), libc::EIO);
    assert_eq!(ask(Op::Write, 2), 0);
    assert_eq!(ask(Op::Read, 2), 0);
    // A request that changes the cluster's metadata.
    assert_eq!(
        bed.request(Op::Discard, 3 * CLUSTER, CLUSTER as usize, false),
        0
    );
    assert_eq!(bed.request(Op::Flush, 0, 0, false), 0);
    let bytes = bed.storage.file().bytes();
    assert_eq!(
        bytes[79] & 2,
        2,
        "the header says that the image is corrupt"
    );
    assert_eq!(word(&bytes, l2_entry(&bytes, 3)), 0, "it is not discarded");
}

#[test]
fn slices_that_left_the_cache_do_not_stay_in_memory() {
    const SLICES: u64 = 128;
    // (Slices of 512 bytes, each with entries for 32 KiB.)
    let options = [("cluster_size", "512"), ("preallocation", "metadata")];
    let mut bed = Bed::new(&options, SLICES * 32768, |_| ());
    let active = bed.disk.active().unwrap();
    let tables = active.top().unwrap();
    let mut seen = Vec::new();
    for number in 0..SLICES {
        // (The second read finds in memory what the first one has read.)
        for _ in 0..2 {
            assert_eq!(bed.request(Op::Read, number * 32768, 512, false), 0);
        }
        let slice = tables.state().cache.get(number);
        seen.push(Arc::downgrade(&slice.expect("it has just been read")));
    }
    let alive = seen.iter().filter(|slice| slice.strong_count() > 0).count();
    let most = 2 * tables.state().cache.max();
    assert!(
        alive <= most,
        "{alive} slices are in memory, {most} at most"
    );
}

#[test]
fn discarded_clusters_are_kept_as_runs_and_can_be_taken_again() {
    let preallocated = [("preallocation", "metadata")];
    let mut bed = Bed::new(&preallocated, 512 * CLUSTER, |_| ());
    let all = 256 * CLUSTER as usize;
    assert_eq!(bed.request(Op::Discard, 0, all, false), 0);
    let active = bed.disk.active().unwrap();
    let tables = active.top().unwrap();
    assert_eq!(tables.state().unlinked.len(), 1, "one run");
    assert_eq!(bed.request(Op::Flush, 0, 0, false), 0);
    assert_eq!(bed.request(Op::Flush, 0, 0, false), 0);
    assert_eq!(tables.counts.freed(), 256);
    let before = bed.storage.file().bytes().len();
    assert_eq!(bed.request(Op::Write, 0, all / 2, false), 0);
    let after = bed.storage.file().bytes().len();
    assert_eq!(
        before, after,
        "what was freed is used before the file grows"
    );
}
