//! Compressed grains of streamOptimized VMDK images.
//!
//! Compressed grains are specified in "Virtual Disk Format" 5.0, "Stream-Optimized Compressed
//! Sparse Extents".

use crate::bytes::u32_at;
use crate::error::{Error, Result};
use flate2::{Decompress, FlushDecompress, Status};
use std::cell::RefCell;

/// Size in bytes of the marker before a grain's data, which contains its number and the data's
/// length.
pub(crate) const MARKER: usize = 12;

/// A compressed grain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grain {
    /// Number of the file: 0 is the file that was opened, 1 the first of
    /// [`Start::names`](crate::Start::names).
    pub file: usize,
    /// Offset in the file in bytes.
    pub at: u64,
    /// Number of bytes to read at `at`.
    ///
    /// All these bytes are inside the file. The range includes the whole grain and may extend
    /// beyond its end, up to the next grain that follows. The range is never longer than twice
    /// [`Grain::size`].
    pub len: u64,
    /// Uncompressed size in bytes: the size of a block.
    pub size: u64,
    /// Number of uncompressed bytes before the extent that was looked up.
    pub skip: u64,
    /// Number of uncompressed bytes that belong to the guest's disk; smaller at the end of a disk.
    pub(crate) used: u64,
    /// Whether a marker precedes the data.
    pub(crate) has_marker: bool,
}

impl Grain {
    /// Decompresses the grain into `out`.
    ///
    /// `stored` must be the [`Grain::len`] bytes at the grain's location, and `out` must have
    /// [`Grain::size`] bytes. Bytes after the end of the guest's disk may be zeroes.
    ///
    /// This method allocates no memory, even for malicious grains. Each thread keeps one decoder of
    /// about 50 KiB.
    pub fn inflate(&self, stored: &[u8], out: &mut [u8]) -> Result<()> {
        let data = match self.has_marker {
            true => self.data(stored)?,
            false => stored,
        };
        let filled = INFLATE.with_borrow_mut(|decoder| {
            decoder.reset(true);
            match decoder.decompress(data, out, FlushDecompress::Finish) {
                Ok(Status::StreamEnd) => Ok(decoder.total_out()),
                Ok(_) if decoder.total_in() == data.len() as u64 => Err("ends early"),
                Ok(_) => Err("is too long"),
                Err(_) => Err("is not what a compressor writes"),
            }
        });
        // QEMU compresses only the part of the last grain that belongs to the guest's disk.
        let filled = filled
            .and_then(|filled| match filled >= self.used {
                true => Ok(filled),
                false => Err("is too short"),
            })
            .map_err(|why| self.damaged(why))?;
        out[filled as usize..].fill(0);
        Ok(())
    }

    fn data<'a>(&self, stored: &'a [u8]) -> Result<&'a [u8]> {
        let marker = stored.get(..MARKER);
        let len = marker.map_or(0, |marker| u32_at(marker, 8)) as usize;
        let data = stored.get(MARKER..).and_then(|rest| rest.get(..len));
        data.filter(|data| !data.is_empty())
            .ok_or_else(|| self.damaged("has a wrong length"))
    }

    fn damaged(&self, why: &str) -> Error {
        let (file, at) = (self.file, self.at);
        Error::damaged(format!(
            "the compressed grain at {at} of its file {file} {why}"
        ))
    }
}

thread_local! {
    /// Decoder for zlib streams, including their checksums.
    static INFLATE: RefCell<Decompress> = RefCell::new(Decompress::new(true));
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::{Compress, Compression, FlushCompress};

    fn stored(data: &[u8]) -> Vec<u8> {
        let mut stream = Vec::with_capacity(4096);
        let mut encoder = Compress::new(Compression::fast(), true);
        let status = encoder.compress_vec(data, &mut stream, FlushCompress::Finish);
        assert_eq!(status.unwrap(), Status::StreamEnd);
        let mut stored = vec![0; MARKER];
        stored[8..].copy_from_slice(&(stream.len() as u32).to_le_bytes());
        stored.extend(stream);
        stored
    }

    fn grain(used: u64) -> Grain {
        Grain {
            file: 0,
            at: 4096,
            len: 0,
            size: 1024,
            skip: 0,
            used,
            has_marker: true,
        }
    }

    #[test]
    fn grains_are_inflated_whatever_follows_them() {
        let data: Vec<u8> = (0..1024_u32).map(|i| ((i * i) >> 5) as u8).collect();
        let mut bytes = stored(&data);
        bytes.extend([7; 100]);
        let mut out = vec![1; 1024];
        grain(1024).inflate(&bytes, &mut out).unwrap();
        assert!(out == data);
        let short = stored(&data[..700]);
        grain(700).inflate(&short, &mut out).unwrap();
        assert!(out[..700] == data[..700] && out[700..] == [0; 324]);
        let bare = Grain {
            has_marker: false,
            ..grain(1024)
        };
        bare.inflate(&bytes[MARKER..], &mut out).unwrap();
        assert!(out == data);
    }

    #[test]
    fn each_kind_of_damage_is_told() {
        let data: Vec<u8> = (0..1025_u32).map(|i| ((i * i) >> 5) as u8).collect();
        let whole = stored(&data[..1024]);
        let with = |at: usize, byte: u8| {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            bytes
        };
        let mut out = vec![0; 1024];
        let mut refused = |bytes: &[u8], words: &str| {
            let error = grain(1000).inflate(bytes, &mut out).unwrap_err();
            assert!(error.to_string().contains(words), "{words}: {error}");
        };
        refused(&whole[..11], "wrong length");
        refused(&whole[..12], "wrong length");
        refused(&whole[..whole.len() - 1], "wrong length");
        refused(&with(11, 1), "wrong length");
        refused(&with(8, whole[8] - 1), "early");
        refused(&with(12, 0), "compressor");
        refused(
            &with(whole.len() - 1, !whole[whole.len() - 1]),
            "compressor",
        );
        refused(&stored(&data), "too long");
        refused(&stored(&data[..999]), "too short");
        refused(&[&[0; 8][..], &[0; 4]].concat(), "wrong length");
    }
}
