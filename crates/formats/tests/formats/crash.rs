//! Power cuts while an image is repaired or created. The result can be repaired and reads as
//! before.

use crate::support;

use crate::support::steps::{LIMIT, Random, Recorder, cut, disk};
use crate::support::*;
use fathom_files::ImageFile;
use fathom_formats::offline::Image;
use fathom_formats::offline::check::{Options, Repair, check};
use fathom_formats::offline::create::{self, create};
use fathom_formats::qcow2::{Header, refcount};
use fathom_formats::testing::MemoryFile;
use fathom_formats::{Format, Result};

fn fix(file: &dyn ImageFile) -> Result<u8> {
    let options = Options {
        repair: Repair::All,
        ..Options::default()
    };
    Ok(check(file, Format::Qcow2, &options, &mut |_| {})?.exit_status())
}

/// Returns what the guest reads.
fn contents(file: &MemoryFile) -> Vec<u8> {
    let bytes = file.bytes();
    let header = Header::parse(&bytes).unwrap();
    disk(&bytes, &header, header.l1_offset, header.size)
}

/// Damages the refcounts. A repair corrects them without changing what the guest reads.
fn break_refcounts(bytes: &mut [u8], how: usize) {
    let header = Header::parse(bytes).unwrap();
    let g = header.geometry();
    let table = header.refcount_table_offset.0 as usize;
    let block = u64::from_be_bytes(bytes[table..table + 8].try_into().unwrap()) as usize;
    let entries = g.refcount_block_entries() as usize;
    let len = g.cluster_size() as usize;
    match how {
        0 => bytes[block..block + len].fill(0),
        1 => bytes[block..block + len].fill(0xff),
        2 => bytes[table..table + 8].fill(0),
        3 => bytes[table + 6] = 3,
        // References beyond the first few are lost, and there are leaks.
        4 => {
            for i in 0..entries {
                let count = refcount::get(&bytes[block..], header.refcount_order, i);
                let count = if i % 3 == 0 { 0 } else { count + 1 };
                let count = count.min(g.refcount_max());
                refcount::set(&mut bytes[block..], header.refcount_order, i, count);
            }
        }
        // The refcount table is the L1 table.
        _ => bytes[48..56].copy_from_slice(&header.l1_offset.0.to_be_bytes()),
    }
}

#[test]
fn a_repair_that_is_cut_short_can_be_done_again() {
    let mut random = Random(0x5eed_0ffa_7403);
    let mut cuts = 0;
    for options in [
        "cluster_size=512",
        "cluster_size=4k,refcount_bits=64",
        "cluster_size=4k,refcount_bits=2",
        "compat=0.10,cluster_size=1k",
    ] {
        let dir = dir();
        let dir = dir.path();
        create_file(dir, "i", "qcow2", &pairs(options), 1 << 20);
        let writes = ["write -P 1 0 70k", "write -P 2 600k 50k"];
        qemu_io(dir, "i", "qcow2", &writes);
        qemu_img(dir, &["snapshot", "-c", "s", "i"]);
        qemu_io(dir, "i", "qcow2", &["write -P 3 10k 70k", "discard 0 4k"]);
        let sound = std::fs::read(dir.join("i")).unwrap();
        let expected = contents(&MemoryFile::new(sound.clone(), LIMIT));
        for how in 0..6 {
            let mut broken = sound.clone();
            break_refcounts(&mut broken, how);
            let recorder = Recorder::new(&broken);
            assert_eq!(fix(&recorder).unwrap(), 0, "{options} {how}");
            assert!(contents(&recorder.file) == expected, "{options} {how}");
            let steps = recorder.steps.into_inner();
            assert!(steps.len() > 2, "nothing to cut");
            let every = steps.len().div_ceil(60);
            let ends = (0..=steps.len()).step_by(every);
            for end in ends.flat_map(|end| [end; 10]) {
                let file = cut(&broken, &steps[..end], true, &mut random);
                assert!(contents(&file) == expected, "{options} {how} {end}");
                assert_eq!(fix(&file).unwrap(), 0, "{options} {how} {end}");
                assert!(contents(&file) == expected, "{options} {how} {end}");
                cuts += 1;
            }
        }
    }
    assert!(cuts > 1000, "only {cuts} cuts");
}

/// Has an entry of an L2 table refer to the table itself, as guest data. Returns the table's
/// offset.
fn share_table(bytes: &mut [u8]) -> u64 {
    let header = Header::parse(bytes).unwrap();
    let l1 = header.l1_offset.0 as usize;
    let entry = u64::from_be_bytes(bytes[l1..l1 + 8].try_into().unwrap());
    let table = entry & 0x00ff_ffff_ffff_fe00;
    let second = table as usize + 8;
    bytes[second..second + 8].copy_from_slice(&entry.to_be_bytes());
    table
}

/// Returns whether the image is marked dirty, or uses no cluster whose refcount is 0.
fn is_safe_to_write(file: &MemoryFile) -> bool {
    let header = Header::parse(&file.bytes()).unwrap();
    let mut has_unclaimed = false;
    let mut look = |line: &str| has_unclaimed |= line.contains("refcount=0 ");
    check(file, Format::Qcow2, &Options::default(), &mut look).unwrap();
    header.is_dirty() || !has_unclaimed
}

#[test]
fn repair_cut_short_leaves_no_unclaimed_table_behind() {
    let mut random = Random(0x5eed_0ffa_7403);
    // In an image of two clusters of refcounts, one of them may be missing.
    for (options, size) in [
        ("compat=0.10,cluster_size=1k", 128 << 10),
        ("cluster_size=512", 64 << 10),
        ("cluster_size=512,refcount_bits=64", 10 << 10),
        ("cluster_size=512,refcount_bits=64", 27 << 10),
        ("cluster_size=512,refcount_bits=64", 28 << 10),
    ] {
        let dir = dir();
        let dir = dir.path();
        create_file(dir, "i", "qcow2", &pairs(options), size);
        qemu_io(dir, "i", "qcow2", &[&format!("write -P 1 0 {size}")]);
        let mut broken = std::fs::read(dir.join("i")).unwrap();
        let table = share_table(&mut broken);
        let recorder = Recorder::new(&broken);
        assert_eq!(fix(&recorder).unwrap(), 0, "{options} {size}");
        let after = recorder.file.bytes().clone();
        let header = Header::parse(&after).unwrap();
        let l1 = header.l1_offset.0 as usize;
        let entry = u64::from_be_bytes(after[l1..l1 + 8].try_into().unwrap());
        assert_ne!(entry & 0x00ff_ffff_ffff_fe00, table, "it is still shared");
        assert!(!header.is_dirty());
        let steps = recorder.steps.into_inner();
        for end in (0..=steps.len()).flat_map(|end| [end; 10]) {
            let file = cut(&broken, &steps[..end], true, &mut random);
            assert!(is_safe_to_write(&file), "{options} {size} {end}");
            assert_eq!(fix(&file).unwrap(), 0, "{options} {size} {end}");
        }
    }
}

/// Counts how often a power cut during the creation of an image leaves something that is recognized
/// as an image but is not the intended one.
fn half_made(format: &str, options: &str, flushes: bool) -> usize {
    let mut random = Random(7);
    let format = Format::from_name(format).unwrap();
    let mut parsed = create::Options::new(format);
    for (name, value) in pairs(options) {
        parsed.set(name, value, parse_size).unwrap();
    }
    // The previous contents do not matter.
    let before = vec![0xa5; 1 << 20];
    let recorder = Recorder::new(&before);
    create(&recorder, None, &parsed, 1 << 20, support::keys().first()).unwrap();
    let whole = recorder.file.bytes().clone();
    let steps = recorder.steps.into_inner();
    let ends = (0..=steps.len()).flat_map(|end| [end; 5]);
    let is_half = |end: usize| {
        let file = cut(&before, &steps[..end], flushes, &mut random);
        Image::read(&file, format).is_ok() && *file.bytes() != whole
    };
    ends.map(is_half).filter(|half| *half).count()
}

#[test]
fn an_image_that_is_cut_short_is_none() {
    for (format, options) in [
        ("qcow2", "preallocation=metadata,cluster_size=4k"),
        ("qcow2", "cluster_size=512"),
        ("qed", "cluster_size=4k"),
    ] {
        assert_eq!(half_made(format, options, true), 0, "{options}");
        // Without flushes, the test must find problems.
        assert_ne!(half_made(format, options, false), 0, "{options}");
    }
}
