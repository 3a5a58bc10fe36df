//! The contents of compressed clusters.

use super::CompressionType;
use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};
use std::cell::RefCell;
use zstd_safe::{CCtx, DCtx, find_frame_compressed_size};

/// Why a compressed cluster cannot be decompressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The stream ends before it has filled the cluster, or is cut off.
    #[error("the compressed data is truncated")]
    EndsEarly,
    /// The stream would fill more than a cluster.
    #[error("the compressed data exceeds a cluster")]
    TooLong,
    /// The stream is not valid.
    #[error("the compressed data is damaged")]
    Damaged,
}

/// Decompresses `stream` into `cluster`, whose length is the cluster size. Bytes after the end of
/// the compressed stream are ignored, because an L2 entry gives the length in sectors. After an
/// error, the contents of `cluster` are undefined.
///
/// Both decoders write directly into the cluster, which also serves as their window. The size that
/// a stream claims causes no allocation. Each thread keeps one decoder per compression type: about
/// 50 KiB for deflate and 160 KiB for zstd.
///
/// QEMU writes deflate streams with a window of 4 KiB. Streams with any window size are accepted.
pub fn decompress(
    kind: CompressionType,
    stream: &[u8],
    cluster: &mut [u8],
) -> Result<(), StreamError> {
    match kind {
        CompressionType::Deflate => INFLATE.with_borrow_mut(|i| inflate(i, stream, cluster)),
        CompressionType::Zstd => ZSTD.with_borrow_mut(|z| unzstd(z, stream, cluster)),
    }
}

/// Compresses a cluster into the start of `stream`. Returns the length in bytes, or `None` if
/// `stream` is too short for the result.
///
/// The deflate level is the one whose streams are as small as QEMU's, which uses zlib's default
/// level: at the same level, zlib-rs searches less for matches. Each thread keeps one encoder per
/// compression type: about 200 KiB for deflate and up to 3 MiB for zstd.
pub fn compress(kind: CompressionType, cluster: &[u8], stream: &mut [u8]) -> Option<usize> {
    match kind {
        CompressionType::Deflate => DEFLATE.with_borrow_mut(|d| deflate(d, cluster, stream)),
        CompressionType::Zstd => {
            ZSTD_ENCODER.with_borrow_mut(|z| z.compress(stream, cluster, ZSTD_LEVEL).ok())
        }
    }
}

fn deflate(encoder: &mut Compress, cluster: &[u8], stream: &mut [u8]) -> Option<usize> {
    encoder.reset();
    let status = encoder.compress(cluster, stream, FlushCompress::Finish);
    match status {
        Ok(Status::StreamEnd) => Some(encoder.total_out() as usize),
        _ => {
            // After a stream that did not end, zlib-rs 0.6.8 does not reset all of its state and
            // sometimes panics in a later stream.
            *encoder = encoder_of_deflate();
            None
        }
    }
}

fn encoder_of_deflate() -> Compress {
    Compress::new_with_window_bits(Compression::best(), false, WINDOW_BITS)
}

/// log2 of the window size in bytes with which QEMU decompresses: 4 KiB.
const WINDOW_BITS: u8 = 12;

const ZSTD_LEVEL: i32 = zstd_safe::CLEVEL_DEFAULT;

thread_local! {
    static DEFLATE: RefCell<Compress> = RefCell::new(encoder_of_deflate());
    static ZSTD_ENCODER: RefCell<CCtx<'static>> = RefCell::new(CCtx::create());
    /// Decoder of raw deflate streams, without header and checksum.
    static INFLATE: RefCell<Decompress> = RefCell::new(Decompress::new(false));
    static ZSTD: RefCell<DCtx<'static>> = RefCell::new(DCtx::create());
}

fn inflate(decoder: &mut Decompress, stream: &[u8], cluster: &mut [u8]) -> Result<(), StreamError> {
    decoder.reset(false);
    let status = decoder.decompress(stream, cluster, FlushDecompress::Finish);
    let is_full = decoder.total_out() == cluster.len() as u64;
    let is_used_up = decoder.total_in() == stream.len() as u64;
    match status {
        Ok(Status::StreamEnd) if is_full => Ok(()),
        Ok(Status::StreamEnd) => Err(StreamError::EndsEarly),
        Ok(_) if is_full && !is_used_up => Err(StreamError::TooLong),
        Ok(_) => Err(StreamError::EndsEarly),
        Err(_) => Err(StreamError::Damaged),
    }
}

/// Decompresses zstd frames. A cluster may consist of several frames, as in QEMU. Each frame is
/// decoded in one call: unlike zstd's streaming mode, this needs no window of the size that the
/// frame asks for.
fn unzstd(decoder: &mut DCtx, stream: &[u8], cluster: &mut [u8]) -> Result<(), StreamError> {
    let (mut rest, mut room) = (stream, cluster);
    while !room.is_empty() {
        if rest.is_empty() {
            return Err(StreamError::EndsEarly);
        }
        let frame = find_frame_compressed_size(rest).map_err(zstd_error)?;
        let filled = decoder.decompress(room, &rest[..frame]);
        let filled = filled.map_err(zstd_error)?;
        rest = &rest[frame..];
        room = &mut room[filled..];
    }
    Ok(())
}

/// Converts a zstd error code, which is a negated number of zstd's error enum. The numbers used
/// here have not changed since 1.3.1, as zstd_errors.h promises.
fn zstd_error(code: usize) -> StreamError {
    const DST_SIZE_TOO_SMALL: usize = 70;
    const SRC_SIZE_WRONG: usize = 72;
    match code.wrapping_neg() {
        DST_SIZE_TOO_SMALL => StreamError::TooLong,
        SRC_SIZE_WRONG => StreamError::EndsEarly,
        _ => StreamError::Damaged,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incompressible_cluster_does_not_affect_the_next() {
        let mut state = 88_172_645_463_325_252_u64;
        let mut noise = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        };
        for round in 0..200 {
            let size = [4096, 8192, 16384, 65536][round % 4];
            let mut stream = vec![0; size - 1];
            let mut compress = |cluster: &[u8]| {
                let len = compress(CompressionType::Deflate, cluster, &mut stream)?;
                let mut again = vec![1; size];
                decompress(CompressionType::Deflate, &stream[..len], &mut again).unwrap();
                assert!(again == cluster, "round {round}");
                Some(len)
            };
            for _ in 0..4 {
                let cluster: Vec<u8> = (0..size).map(|_| noise()).collect();
                assert_eq!(compress(&cluster), None);
            }
            let half: Vec<u8> = (0..size).map(|i| noise() * (i % 2) as u8).collect();
            assert!(compress(&half).is_some());
        }
    }
}
