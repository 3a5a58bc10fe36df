//! Compressed clusters.

use super::CompressionType;
use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};
use std::cell::RefCell;
use zstd_safe::{CCtx, DCtx, find_frame_compressed_size};

/// Why a compressed cluster cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// Before it has filled the cluster, or before its own end.
    #[error("the compressed data is truncated")]
    EndsEarly,
    /// It would fill more than the cluster.
    #[error("the compressed data exceeds a cluster")]
    TooLong,
    /// Not what any compressor writes.
    #[error("the compressed data is damaged")]
    Damaged,
}

/// Fills `cluster`, which has the size of one, from a compressed stream.
/// Whatever follows the stream is ignored: an L2 entry gives its length in
/// sectors. After an error, what `cluster` has in it means nothing.
///
/// Both decoders write straight into the cluster, which is their window, too.
/// Nothing is allocated for the stream's sake, however much it claims: each
/// thread keeps one decoder of a kind, of some 50 KiB for deflate and 160 KiB
/// for zstd.
///
/// QEMU writes deflate streams with a window of 4 KiB; any window is read.
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

/// Compresses a cluster into the start of `stream`: how many bytes that are,
/// or `None` if they are more than it takes.
///
/// For deflate that is the level whose streams are as small as QEMU's, which is
/// zlib's default: at the same level zlib-rs looks less hard for matches. Each
/// thread keeps one encoder of a kind, of some 200 KiB for deflate and up to 3 MiB for
/// zstd.
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
            // zlib-rs 0.6.8 does not forget all of a stream that has not ended: now and then it panics in
            // a later one.
            *encoder = encoder_of_deflate();
            None
        }
    }
}

fn encoder_of_deflate() -> Compress {
    Compress::new_with_window_bits(Compression::best(), false, WINDOW_BITS)
}

/// The window with which QEMU reads: 4 KiB.
const WINDOW_BITS: u8 = 12;

const ZSTD_LEVEL: i32 = zstd_safe::CLEVEL_DEFAULT;

thread_local! {
    static DEFLATE: RefCell<Compress> = RefCell::new(encoder_of_deflate());
    static ZSTD_ENCODER: RefCell<CCtx<'static>> = RefCell::new(CCtx::create());
    /// Raw deflate: no header, no checksum.
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

/// A cluster may be several frames, as QEMU reads it. Frames are decoded one
/// by one and each in one call: unlike zstd's streaming, this needs no window
/// of the size that the frame asks for.
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

/// zstd's errors are its enum's numbers, negated; those here have not changed
/// since 1.3.1, as zstd_errors.h promises.
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
    fn clusters_that_do_not_compress_leave_nothing_to_those_that_come_after() {
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
