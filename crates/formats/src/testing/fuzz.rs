//! The bodies of the fuzz targets, which make images from bytes.
//!
//! The targets check that nothing panics, takes much memory or runs forever, and that parsed
//! structures are encoded unchanged. A repaired image must have nothing left to repair. A changed
//! image must be sound.

use super::MemoryFile;
use super::served::serve;
use crate::Image;
use crate::offline::check::{Options, Repair, check};
use crate::offline::create::{self, Preallocation, create};
use crate::offline::resize::{Resize, resize};
use crate::offline::snapshot;
use crate::qcow2::{
    CompressionType, Geometry, Header, L2Entry, bitmap::Bitmap, decompress, snapshot::Snapshot,
};
use crate::{Format, qed};
use fathom_files::ImageFile;
use flate2::{Compress, Compression, FlushCompress};

/// Maximum bytes of a file. (The header of an image with 2 MiB clusters takes one of them.)
const LIMIT: u64 = 8 << 20;
const MEMORY: u64 = 1 << 20;

/// Parses a qcow2 header with its extensions.
pub fn qcow2_header(data: &[u8]) {
    let mut bytes = data.to_vec();
    if let Some(magic) = bytes.get_mut(..4) {
        magic.copy_from_slice(&crate::qcow2::MAGIC);
    }
    let Ok(header) = Header::parse(&bytes) else {
        return;
    };
    // Headers that fill their cluster to the last byte may not fit again.
    if let Ok(encoded) = header.encode() {
        let again = Header::parse(&encoded).expect("what was written can be read");
        assert_eq!(again.extensions, header.extensions);
        assert_eq!(again.geometry(), header.geometry());
        assert_eq!(again.backing_file, header.backing_file);
    }
}

/// Parses entries of all tables.
pub fn qcow2_tables(data: &[u8]) {
    let Some((choices, data)) = data.split_first_chunk::<2>() else {
        return;
    };
    let extended_l2 = choices[0] & 0x10 != 0;
    let least = if extended_l2 { 14 } else { 9 };
    let geometry = Geometry {
        cluster_bits: (9 + u32::from(choices[0] & 15)).clamp(least, 21),
        refcount_order: u32::from(choices[1]) % 7,
        extended_l2,
        data_file: choices[0] & 0x20 != 0,
        version: 3,
    };
    let size = geometry.l2_entry_size() as usize;
    for at in (0..data.len() / size * size).step_by(size) {
        let entry = L2Entry::parse(data, at, &geometry);
        let mut encoded = vec![0; size];
        entry.encode(&mut encoded, 0, &geometry);
        assert_eq!(encoded, data[at..at + size]);
        let _ = entry.decode(&geometry);
    }
    if let Ok((snapshot, len)) = Snapshot::parse(data) {
        let mut encoded = Vec::new();
        snapshot.encode(&mut encoded);
        assert_eq!(encoded.len(), len);
        assert_eq!(Snapshot::parse(&encoded).ok(), Some((snapshot, len)));
    }
    let _ = Bitmap::parse(data, &geometry);
}

/// Decompresses a cluster: arbitrary bytes, or a sound stream with changes.
///
/// The latter reaches code that arbitrary bytes hardly ever reach.
pub fn compressed(data: &[u8]) {
    let Some((choices, data)) = data.split_first_chunk::<2>() else {
        return;
    };
    let kind = match choices[0] & 1 {
        0 => CompressionType::Deflate,
        _ => CompressionType::Zstd,
    };
    let mut cluster = vec![0x55; 512 << (choices[0] >> 4 & 7)];
    if choices[0] & 2 == 0 {
        return read_twice(kind, data, &mut cluster);
    }
    let (changes, pattern) = data.split_at(data.len().min(usize::from(choices[1] & 12)));
    if pattern.is_empty() {
        return;
    }
    let contents: Vec<u8> = pattern
        .iter()
        .copied()
        .cycle()
        .take(cluster.len())
        .collect();
    let mut stream = compress(kind, &contents);
    decompress(kind, &stream, &mut cluster).expect("a sound stream");
    assert!(cluster == contents);
    for change in changes.chunks_exact(4) {
        let place = usize::from(u16::from_be_bytes([change[0], change[1]])) % stream.len();
        stream[place] = change[2];
    }
    read_twice(kind, &stream, &mut cluster);
}

/// Decompresses twice, since the outcome must depend on the stream alone.
fn read_twice(kind: CompressionType, stream: &[u8], cluster: &mut [u8]) {
    let first = decompress(kind, stream, cluster);
    let mut again = vec![0xaa; cluster.len()];
    assert_eq!(decompress(kind, stream, &mut again), first);
    assert!(first.is_err() || again == cluster);
}

fn compress(kind: CompressionType, contents: &[u8]) -> Vec<u8> {
    let mut stream = vec![0; 2 * contents.len() + 100];
    let len = match kind {
        CompressionType::Deflate => {
            let mut encoder = Compress::new(Compression::fast(), false);
            let done = encoder.compress(contents, &mut stream, FlushCompress::Finish);
            done.expect("it can always go on");
            encoder.total_out() as usize
        }
        CompressionType::Zstd => zstd_safe::compress(&mut stream[..], contents, 1).expect("room"),
    };
    stream.truncate(len);
    stream
}

/// Creates a small sound image with the options in `choices`.
fn sound(choices: [u8; 2], format: Format) -> Option<MemoryFile> {
    let mut options = create::Options::new(format);
    let bit = |n: u8| choices[0] >> n & 1 == 1;
    if format == Format::Qcow2 {
        options.cluster_size = 512 << (choices[1] & 7);
        options.qcow2.extended_l2 = bit(0);
        if bit(0) {
            options.cluster_size = 16 << 10;
        }
        options.qcow2.refcount_bits = 1 << ((choices[1] >> 3) % 7);
        if bit(2) {
            options.preallocation = create::Preallocation::Metadata;
        }
        if bit(3) {
            options.qcow2.version = 2;
            options.qcow2.refcount_bits = 16;
            options.qcow2.extended_l2 = false;
        }
    } else {
        options.cluster_size = 4096 << (choices[1] & 3);
        options.table_size = 1 << (choices[1] >> 6);
    }
    let file = MemoryFile::new(Vec::new(), LIMIT);
    create(&file, None, &options, 64 << 10, None).ok()?;
    Some(file)
}

/// Changes a sound image.
///
/// Each change takes six bytes: a place and a number to put there, mostly the offset of a cluster
/// in the file.
fn change(file: &MemoryFile, format: Format, data: &[u8]) {
    let len = file.len().unwrap_or(0).max(1);
    for step in data.chunks_exact(6) {
        let place = u64::from(u32::from_be_bytes([0, step[0], step[1], step[2]])) * 8 % len;
        let value = match step[3] & 7 {
            0 => u64::from(step[4]),
            1 => u64::MAX << (step[5] & 63),
            2 => u64::from(step[4]) << (step[5] & 63),
            3 => 1 << 62 | u64::from(step[4]) << 9 | u64::from(step[5]) << 40,
            n => u64::from(step[4]) << 9 | u64::from(n & 1) << 63,
        };
        let bytes = match format {
            Format::Qed => (value & !(1 << 63)).to_le_bytes(),
            _ => value.to_be_bytes(),
        };
        let _ = file.write_at(&bytes, place);
    }
}

fn check_and_repair(file: &MemoryFile, format: Format) {
    let options = |repair| Options {
        repair,
        max_memory: MEMORY,
    };
    let mut silent = |line: &str| assert!(!line.contains('\n'));
    let before = file.bytes().clone();
    let looked = check(file, format, &options(Repair::Nothing), &mut silent);
    assert!(*file.bytes() == before, "a check has changed the image");
    if let Ok(looked) = &looked {
        assert!(!looked.repaired());
    }
    let Ok(repaired) = check(file, format, &options(Repair::All), &mut silent) else {
        return;
    };
    let again = check(file, format, &options(Repair::All), &mut silent).expect("it was checked");
    assert!(
        !again.repaired(),
        "the repair was not complete: {repaired:?}, then {again:?}"
    );
    let looked = check(file, format, &options(Repair::Nothing), &mut silent).expect("likewise");
    assert_eq!(looked.exit_status(), repaired.exit_status());
}

/// Checks and repairs a qcow2 image with changes.
pub fn qcow2_image(data: &[u8]) {
    let Some((choices, data)) = data.split_first_chunk::<2>() else {
        return;
    };
    let Some(file) = sound(*choices, Format::Qcow2) else {
        return;
    };
    change(&file, Format::Qcow2, data);
    let _ = Image::read(&file, Format::Qcow2);
    edit(&file, choices[0] >> 4, Format::Qcow2);
    check_and_repair(&file, Format::Qcow2);
}

/// Takes snapshots of an image, or resizes it.
///
/// An image that can be changed at all is sound afterwards. Otherwise it is unchanged, except for
/// free clusters.
fn edit(file: &MemoryFile, choice: u8, format: Format) {
    let before = file.bytes().clone();
    let edited = MemoryFile::new(before.clone(), LIMIT);
    let to = |size, preallocation| Resize {
        size,
        preallocation,
        data_file: None,
        below: None,
    };
    let taken = snapshot::create(&edited, "s", (0, 0)).is_ok();
    let done = match choice % 6 {
        0 => snapshot::apply(&edited, "1").is_ok(),
        1 => snapshot::delete(&edited, "1").is_ok(),
        2 => resize(&edited, format, &to(100_352, Preallocation::Off)).is_ok(),
        3 => resize(&edited, format, &to(40 << 20, Preallocation::Off)).is_ok(),
        4 => resize(&edited, format, &to(200 << 10, Preallocation::Metadata)).is_ok(),
        _ => resize(&edited, format, &to(9 << 10, Preallocation::Off)).is_ok(),
    };
    if taken || done {
        let report = check(&edited, format, &Options::default(), &mut |_| {});
        let report = report.expect("it can be checked");
        assert_eq!(report.corruptions + report.check_errors, 0, "{report:?}");
    } else if !is_dirty(&before, format) {
        let bytes = edited.bytes();
        assert_eq!(bytes.len(), before.len());
        assert!(bytes[..512] == before[..512], "the header was changed");
    }
}

/// Returns whether opening the image repairs it.
fn is_dirty(image: &[u8], format: Format) -> bool {
    let file = MemoryFile::new(image.to_vec(), LIMIT);
    match Image::read(&file, format) {
        Ok(Image::Qcow2(header)) => header.is_dirty(),
        Ok(image @ Image::Qed(_)) => image.needs_check(),
        _ => false,
    }
}

/// Checks and repairs a QED image with changes.
pub fn qed_image(data: &[u8]) {
    let Some((choices, data)) = data.split_first_chunk::<2>() else {
        return;
    };
    let Some(mut file) = sound(*choices, Format::Qed) else {
        return;
    };
    // Serves some requests first, so that the image has L2 tables.
    let requests = data.len().min(usize::from(choices[1] >> 2 & 15) * 5);
    let (requests, data) = data.split_at(requests);
    if !requests.is_empty() {
        let written = serve(file, Format::Qed, requests).expect("a sound image can be served");
        file = MemoryFile::new(written.file().bytes().clone(), LIMIT);
    }
    change(&file, Format::Qed, data);
    if let Ok(Image::Qed(qed::QedImage { header, .. })) = Image::read(&file, Format::Qed) {
        assert_eq!(qed::Header::parse(&header.encode()).ok(), Some(header));
    }
    edit(&file, 2 + choices[0] % 4, Format::Qed);
    check_and_repair(&file, Format::Qed);
}

/// Returns the number of header bytes before the first that may change.
///
/// A growing refcount table changes the header, and so do QED's features at activation.
fn steady(format: Format) -> usize {
    match format {
        Format::Qed => 16,
        _ => 48,
    }
}

/// Serves an image, changes it behind the server's back, and serves it again.
///
/// An image without changes stays sound. Guest data never gets into the header, even after
/// arbitrary changes.
pub fn served_image(data: &[u8]) {
    let Some((&[first, second, third], data)) = data.split_first_chunk::<3>() else {
        return;
    };
    let format = match third & 1 {
        0 => Format::Qcow2,
        _ => Format::Qed,
    };
    let Some(file) = sound([first, second], format) else {
        return;
    };
    let changes = data.len().min(usize::from(third >> 4) * 6);
    let (changes, steps) = data.split_at(changes);
    let (before, after) = steps.split_at(steps.len() / 10 * 5);
    let file = serve(file, format, before);
    let file = file.expect("a sound image can be served");
    assert_sound(file.file(), format);
    change(file.file(), format, changes);
    let bytes = file.file().bytes().clone();
    let header = bytes[..steady(format)].to_vec();
    let Some(file) = serve(MemoryFile::new(bytes, LIMIT), format, after) else {
        return;
    };
    if changes.is_empty() {
        assert_sound(file.file(), format);
    }
    assert!(file.file().bytes()[..header.len()] == header);
}

fn assert_sound(file: &MemoryFile, format: Format) {
    let mut silent = |_: &str| {};
    let report = check(file, format, &Options::default(), &mut silent).expect("it can be checked");
    assert_eq!(report.exit_status(), 0, "{report:?}");
}
