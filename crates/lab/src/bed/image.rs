//! Writes the image that a cell reads.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use rustix::io::Errno;

use crate::error::{Context, Error, Result};

/// Writes every block with incompressible contents, because reading a hole measures nothing.
pub fn fill(path: &Path, size: u64) -> Result<()> {
    if size == 0 || !size.is_multiple_of(512) {
        let reason = format!("a size of {size} bytes is not a positive multiple of 512");
        return Err(Error::Unusable {
            path: path.to_owned(),
            reason,
        });
    }
    let what = || format!("cannot write {}", path.display());
    let mut file = File::create(path).context(what)?;
    // Checked first, before the file fills the disk for all programs.
    let room = rustix::fs::fstatvfs(&file).map_err(io::Error::from);
    let room = room.context(what)?;
    if room.f_bavail.saturating_mul(room.f_frsize) < size {
        return Err(io::Error::from(Errno::NOSPC)).context(what);
    }
    let chunk = noise();
    let mut left = size;
    while left > 0 {
        let now = left.min(chunk.len() as u64);
        file.write_all(&chunk[..usize::try_from(now).unwrap_or(chunk.len())])
            .context(what)?;
        left -= now;
    }
    file.sync_all().context(what)
}

/// Returns a MiB of incompressible data, the same every time.
pub fn noise() -> Vec<u8> {
    let mut chunk = vec![0; 1 << 20];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for word in chunk.chunks_exact_mut(8) {
        // xorshift64 (Marsaglia)
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_ne_bytes());
    }
    chunk
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_written_to_its_last_byte() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("i");
        fill(&path, (1 << 20) + 512).unwrap();
        let data = std::fs::read(&path).unwrap();
        assert_eq!(data.len(), (1 << 20) + 512);
        assert!(data[data.len() - 8..].iter().any(|&b| b != 0));
        assert!(fill(&path, 100).is_err());
        let full = fill(&path, 1 << 60).unwrap_err().to_string();
        assert!(full.contains("no space left"), "{full}");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    }
}
