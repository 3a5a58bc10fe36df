//! Compressed clusters: those written by QEMU, those of other encoders, and hostile streams.

use crate::support::*;
use fathom_formats::GuestOffset;
use fathom_formats::qcow2::{
    Cluster, CompressionType, Header, L1Entry, L2Entry, StreamError, decompress,
};
use flate2::{Compress, Compression, FlushCompress, Status};
use proptest::prelude::*;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

const KINDS: [CompressionType; 2] = [CompressionType::Deflate, CompressionType::Zstd];

/// Compresses as QEMU does, but with this window size and level.
fn deflate(data: &[u8], window_bits: u8, level: u32) -> Vec<u8> {
    let mut out = Vec::with_capacity(data.len() * 2 + 1000);
    let mut encoder = Compress::new_with_window_bits(Compression::new(level), false, window_bits);
    let status = encoder.compress_vec(data, &mut out, FlushCompress::Finish);
    assert_eq!(status.unwrap(), Status::StreamEnd);
    out
}

fn zstd(data: &[u8], level: i32) -> Vec<u8> {
    let mut out = vec![0; zstd_safe::compress_bound(data.len())];
    let len = zstd_safe::compress(&mut out[..], data, level).unwrap();
    out.truncate(len);
    out
}

fn compress(kind: CompressionType, data: &[u8]) -> Vec<u8> {
    match kind {
        CompressionType::Deflate => deflate(data, 12, 6),
        CompressionType::Zstd => zstd(data, 3),
    }
}

/// Decompresses `stream` to a cluster of `len` bytes. Neither the previous contents of the cluster
/// nor the bytes after the stream affect the result.
fn cluster_of(kind: CompressionType, stream: &[u8], len: usize) -> Result<Vec<u8>, StreamError> {
    let mut cluster = vec![0x55; len];
    let first = decompress(kind, stream, &mut cluster);
    let mut again = vec![0xaa; len];
    let second = decompress(kind, stream, &mut again);
    assert_eq!(first, second);
    first?;
    assert!(cluster == again, "the cluster's old contents are in it");
    let followed = [stream, &[0xff; 511]].concat();
    decompress(kind, &followed, &mut again).expect("what follows does not matter");
    assert!(cluster == again);
    Ok(cluster)
}

/// Returns bytes that are partly repetitive, like those of disks: a mixture of text, numbers and
/// noise.
fn sample(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut out = Vec::with_capacity(len);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        match state % 8 {
            0 => out.extend(state.to_le_bytes()),
            1 => out.extend([0; 300]),
            2 if out.len() > 5000 => {
                let far = out.len() - 4500;
                out.extend_from_within(far..far + 200);
            }
            _ => out.extend(format!("inode {} of block {}\n", state % 100, state % 7).bytes()),
        }
    }
    out.truncate(len);
    out
}

/// Compares every compressed cluster of the image with `contents`. Returns the number of compressed
/// clusters.
fn compare_clusters(image: &Path, contents: &[u8]) -> usize {
    let file = File::open(image).unwrap();
    let len = file.metadata().unwrap().len();
    let read = |offset: u64, len: usize| {
        let mut bytes = vec![0; len];
        fathom_files::ImageFile::read_at(&file, &mut bytes, offset).unwrap();
        bytes
    };
    let mut start = vec![0; 112];
    file.read_exact_at(&mut start, 0).unwrap();
    let header = Header::parse(&read(0, Header::len_to_read(&start).unwrap())).unwrap();
    let geometry = header.geometry();
    let cluster_size = geometry.cluster_size() as usize;
    let l1 = read(header.l1_offset.0, header.l1_entries as usize * 8);
    let mut compressed = 0;
    for (number, expected) in contents.chunks(cluster_size).enumerate() {
        let guest = GuestOffset((number * cluster_size) as u64);
        let at = geometry.l1_index(guest) as usize * 8;
        let entry = u64::from_be_bytes(l1[at..at + 8].try_into().unwrap());
        let Some(table) = L1Entry(entry).l2_table(&geometry).unwrap() else {
            continue;
        };
        let at = table + geometry.l2_index(guest) * geometry.l2_entry_size();
        let entry = L2Entry::parse(&read(at.0, geometry.l2_entry_size() as usize), 0, &geometry);
        let Cluster::Compressed(place) = entry.decode(&geometry).unwrap() else {
            continue;
        };
        assert!(place.offset.0 < len);
        let stream = read(place.offset.0, place.len as usize);
        let mut cluster = vec![0xee; cluster_size];
        decompress(header.compression, &stream, &mut cluster).unwrap();
        assert!(cluster[..expected.len()] == *expected, "cluster {number}");
        assert!(cluster[expected.len()..].iter().all(|b| *b == 0));
        compressed += 1;
    }
    compressed
}

#[test]
fn what_qemu_compresses_is_what_it_was() {
    let dir = dir();
    let dir = dir.path();
    // The last cluster is incomplete.
    let contents = sample((5 << 20) + 512, 7);
    std::fs::write(dir.join("raw"), &contents).unwrap();
    for kind in ["zlib", "zstd"] {
        for more in [
            "cluster_size=512",
            "cluster_size=4k",
            "cluster_size=64k",
            "cluster_size=64k,extended_l2=on",
            "cluster_size=2M",
        ] {
            let options = format!("compression_type={kind},{more}");
            let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options];
            qemu_img(dir, &[&convert[..], &["raw", "qcow2"]].concat());
            let compressed = compare_clusters(&dir.join("qcow2"), &contents);
            // zstd sometimes cannot compress 512 bytes.
            let clusters = contents.len() / info(dir, "qcow2").cluster_size().unwrap() as usize;
            assert!(compressed * 2 > clusters, "{options}: {compressed}");
        }
    }
}

#[test]
fn other_encoders_are_understood() {
    let data = sample(1 << 16, 3);
    for window_bits in 9..=15 {
        for level in [0, 1, 6, 9] {
            let stream = deflate(&data, window_bits, level);
            let read = cluster_of(CompressionType::Deflate, &stream, data.len());
            assert!(read.unwrap() == data, "{window_bits} {level}");
        }
    }
    for level in [-5, 1, 3, 19, 22] {
        let read = cluster_of(CompressionType::Zstd, &zstd(&data, level), data.len());
        assert!(read.unwrap() == data, "{level}");
    }
}

#[test]
fn a_cluster_may_be_several_frames() {
    let data = sample(1 << 16, 4);
    let skippable = [&[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"abc"].concat();
    let (first, second) = data.split_at(1000);
    let stream = [zstd(first, 3), skippable, zstd(&[], 3), zstd(second, 3)].concat();
    let read = cluster_of(CompressionType::Zstd, &stream, data.len());
    assert!(read.unwrap() == data);
    let error = cluster_of(CompressionType::Zstd, &stream, data.len() + 1);
    assert!(error.is_err());
}

#[test]
fn a_stream_is_exactly_a_cluster() {
    let data = sample(4096, 5);
    for kind in KINDS {
        let stream = compress(kind, &data);
        let error = |len| cluster_of(kind, &stream, len).unwrap_err();
        assert_eq!(error(4095), StreamError::TooLong, "{kind:?}");
        assert_eq!(error(512), StreamError::TooLong, "{kind:?}");
        assert_ne!(error(4097), StreamError::TooLong, "{kind:?}");
        let mut cluster = [0; 4096];
        for end in 0..stream.len() {
            let cut = decompress(kind, &stream[..end], &mut cluster);
            assert!(cut.is_err(), "{kind:?}: {end} bytes of {}", stream.len());
        }
    }
}

/// Returns a zstd frame without content size, with a window of 2^(10 + exponent) bytes.
fn zstd_frame(exponent: u8, blocks: &[(u32, u32, &[u8])]) -> Vec<u8> {
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0, exponent << 3];
    for (number, (kind, len, bytes)) in blocks.iter().enumerate() {
        let last = u32::from(number + 1 == blocks.len());
        let header = last | kind << 1 | len << 3;
        frame.extend(&header.to_le_bytes()[..3]);
        frame.extend(*bytes);
    }
    frame
}

/// Returns the peak size of this process's address space in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmPeak:")).unwrap();
    let number = line.split_whitespace().nth(1).unwrap();
    number.parse::<u64>().unwrap() << 10
}

#[test]
fn what_a_stream_claims_costs_nothing() {
    let before = peak();
    // A window of 2 GiB, which is never needed.
    let raw = zstd_frame(21, &[(0, 512, &[7; 512])]);
    assert_eq!(
        cluster_of(CompressionType::Zstd, &raw, 512),
        Ok(vec![7; 512])
    );
    // Blocks of 128 KiB, each compressed to one byte: a gigabyte in total.
    let block = (1, 1 << 17, &[7][..]);
    let bomb = zstd_frame(21, &vec![block; 8192]);
    let error = cluster_of(CompressionType::Zstd, &bomb, 2 << 20);
    assert_eq!(error, Err(StreamError::TooLong));
    // A content of 2^60 bytes in one segment.
    let mut vast = vec![0x28, 0xb5, 0x2f, 0xfd, 0b1110_0000];
    vast.extend((1u64 << 60).to_le_bytes());
    vast.extend([1, 0, 0]);
    assert!(cluster_of(CompressionType::Zstd, &vast, 1 << 16).is_err());
    let zeroes = vec![0; 64 << 20];
    for kind in KINDS {
        let bomb = compress(kind, &zeroes);
        let error = cluster_of(kind, &bomb, 2 << 20);
        assert_eq!(error, Err(StreamError::TooLong), "{kind:?}");
    }
    assert!(peak() - before < 1 << 30, "{} bytes", peak() - before);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn what_was_compressed_comes_back(
        len in prop_oneof![Just(512usize), Just(4096), Just(65536), 1..70000usize],
        seed: u64, window_bits in 9u8..=15, level in 0u32..=9,
    ) {
        let data = sample(len, seed);
        let deflated = deflate(&data, window_bits, level);
        prop_assert!(cluster_of(CompressionType::Deflate, &deflated, len).unwrap() == data);
        let stream = zstd(&data, level as i32 - 3);
        prop_assert!(cluster_of(CompressionType::Zstd, &stream, len).unwrap() == data);
    }

    /// A damaged stream produces an error or a cluster, and the decoder works as before.
    #[test]
    fn damage_does_no_harm(
        seed: u64, changes in prop::collection::vec((any::<prop::sample::Index>(), 0..8u8), 1..5),
        zstd: bool,
    ) {
        let kind = KINDS[usize::from(zstd)];
        let data = sample(4096, seed);
        let sound = compress(kind, &data);
        let mut stream = sound.clone();
        for (place, bit) in changes {
            stream[place.index(sound.len())] ^= 1 << bit;
        }
        // Not `cluster_of`, because the bytes after a damaged stream may affect the result.
        let mut cluster = vec![0; 4096];
        let _ = decompress(kind, &stream, &mut cluster);
        prop_assert!(cluster_of(kind, &sound, 4096).unwrap() == data);
    }
}
