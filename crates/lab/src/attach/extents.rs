//! Maps bytes to devices: those of a file to its file system's device, and those of a mapped device
//! to the devices below it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;

/// A contiguous range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Offset in the file or device that is mapped, in bytes.
    pub offset: u64,
    /// Offset on the device below, in bytes.
    pub physical: u64,
    pub length: u64,
}

/// FS_IOC_FIEMAP of linux/fs.h: _IOWR('f', 11, struct fiemap).
const FIEMAP: libc::Ioctl = 0xc020_660b_u32 as libc::Ioctl;
const FIEMAP_HEADER: usize = 32;
const FIEMAP_EXTENT: usize = 56;
const BATCH: usize = 512;
const LAST: u32 = 1;
/// Flags of extents without a usable location: unknown, delayed allocation, encoded, encrypted, not
/// aligned, inline, packed.
const NOWHERE: u32 = 0x2 | 0x4 | 0x8 | 0x80 | 0x100 | 0x200 | 0x400;
/// Maximum number of pieces of a file. A file with more pieces is not mapped, because the map would
/// be too large.
const MAX_PIECES: usize = 1 << 20;

/// Returns the pieces of a file. Holes and data that the file system has not allocated yet are left
/// out.
pub(super) fn of_file(file: &File) -> io::Result<Vec<Piece>> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut start = 0u64;
    loop {
        let mut buffer = vec![0u8; FIEMAP_HEADER + BATCH * FIEMAP_EXTENT];
        buffer[..8].copy_from_slice(&start.to_ne_bytes());
        buffer[8..16].copy_from_slice(&(u64::MAX - start).to_ne_bytes());
        buffer[24..28].copy_from_slice(&(BATCH as u32).to_ne_bytes());
        ioctl(file, FIEMAP, &mut buffer)?;
        let mapped = (u32_at(&buffer, 20) as usize).min(BATCH);
        let mut is_last = mapped == 0;
        for extent in buffer[FIEMAP_HEADER..]
            .chunks_exact(FIEMAP_EXTENT)
            .take(mapped)
        {
            let (offset, length) = (u64_at(extent, 0), u64_at(extent, 16));
            let flags = u32_at(extent, 40);
            if flags & NOWHERE == 0 {
                push(&mut pieces, offset, u64_at(extent, 8), length);
            }
            is_last |= flags & LAST != 0;
            start = offset.saturating_add(length);
        }
        if pieces.len() > MAX_PIECES {
            return Err(io::Error::other("more than a million extents"));
        }
        if is_last {
            return Ok(pieces);
        }
    }
}

/// Appends a piece, or extends the last piece if the new one continues it.
pub(super) fn push(pieces: &mut Vec<Piece>, offset: u64, physical: u64, length: u64) {
    if let Some(last) = pieces.last_mut() {
        let continues = last.offset + last.length == offset;
        if continues && last.physical + last.length == physical {
            last.length += length;
            return;
        }
    }
    pieces.push(Piece {
        offset,
        physical,
        length,
    });
}

/// Maps the pieces `outer` through `inner`, which maps the device of `outer` to the device below.
pub(super) fn through(outer: &[Piece], inner: &[Piece]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for one in outer {
        let end = one.physical.saturating_add(one.length);
        let first = inner.partition_point(|piece| piece.offset + piece.length <= one.physical);
        for piece in inner[first..].iter().take_while(|piece| piece.offset < end) {
            let from = one.physical.max(piece.offset);
            let to = end.min(piece.offset + piece.length);
            let physical = piece.physical + (from - piece.offset);
            push(
                &mut pieces,
                one.offset + (from - one.physical),
                physical,
                to - from,
            );
        }
    }
    pieces
}

/// A target of a mapped device: a range of its sectors that is mapped in one way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// Start on the mapped device, in bytes.
    pub start: u64,
    pub length: u64,
    /// Type of the target: `linear`, `striped`, ...
    pub kind: String,
    pub parameters: String,
}

/// DM_TABLE_STATUS of linux/dm-ioctl.h: _IOWR(0xfd, 12, struct dm_ioctl).
const DM_TABLE_STATUS: libc::Ioctl = 0xc138_fd0c_u32 as libc::Ioctl;
const DM_HEADER: usize = 312;
/// Flag that requests the table instead of the targets' status.
const DM_STATUS_TABLE: u32 = 1 << 4;
const DM_SPEC: usize = 40;
const SECTOR: u64 = 512;

/// Reads the table of a mapped device.
pub(super) fn table(major: u32, minor: u32) -> io::Result<Vec<Target>> {
    let control = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/mapper/control")?;
    let mut buffer = vec![0u8; 256 << 10];
    let size = buffer.len() as u32;
    let dev = u64::from(minor & 0xff | (major & 0xfff) << 8) | u64::from(minor & !0xff) << 12;
    for (at, value) in [
        (0, 4u32),
        (12, size),
        (16, DM_HEADER as u32),
        (28, DM_STATUS_TABLE),
    ] {
        buffer[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }
    buffer[40..48].copy_from_slice(&dev.to_ne_bytes());
    ioctl(&control, DM_TABLE_STATUS, &mut buffer)?;
    let (start, count) = (u32_at(&buffer, 16) as usize, u32_at(&buffer, 20));
    let damaged = || io::Error::other("the device mapper's answer makes no sense");
    parse_table(buffer.get(start..).ok_or_else(damaged)?, count).ok_or_else(damaged)
}

fn parse_table(bytes: &[u8], count: u32) -> Option<Vec<Target>> {
    let mut targets = Vec::new();
    let mut at = 0;
    for _ in 0..count {
        let spec = bytes.get(at..at + DM_SPEC)?;
        let text = |bytes: &[u8]| {
            let text = bytes.split(|&byte| byte == 0).next().unwrap_or(&[]);
            String::from_utf8_lossy(text).into_owned()
        };
        targets.push(Target {
            start: u64_at(spec, 0).checked_mul(SECTOR)?,
            length: u64_at(spec, 8).checked_mul(SECTOR)?,
            kind: text(&spec[24..40]),
            parameters: text(&bytes[at + DM_SPEC..]),
        });
        let next = u32_at(spec, 20) as usize;
        if next <= at && count as usize > targets.len() {
            return None;
        }
        at = next;
    }
    Some(targets)
}

impl Target {
    /// Returns the underlying devices (`8:3`) with the pieces of the mapped device on each, in
    /// bytes. Returns `None` for an unsupported type of target.
    pub fn pieces(&self) -> Option<Vec<(String, Piece)>> {
        let words: Vec<&str> = self.parameters.split_whitespace().collect();
        match self.kind.as_str() {
            "linear" => {
                let physical = sectors(words.get(1)?)?;
                Some(vec![(
                    (*words.first()?).to_owned(),
                    self.piece(0, physical, self.length),
                )])
            }
            "striped" => self.stripes(&words),
            _ => None,
        }
    }

    fn piece(&self, from: u64, physical: u64, length: u64) -> Piece {
        Piece {
            offset: self.start + from,
            physical,
            length,
        }
    }

    /// Parses `2 128 8:16 0 8:32 0`: number of stripes, sectors per chunk, then device and start of
    /// each.
    fn stripes(&self, words: &[&str]) -> Option<Vec<(String, Piece)>> {
        let count: u64 = words.first()?.parse().ok()?;
        let chunk = sectors(words.get(1)?)?;
        if count == 0 || chunk == 0 || self.length / chunk > MAX_PIECES as u64 {
            return None;
        }
        let mut pieces = Vec::new();
        let mut from = 0;
        while from < self.length {
            let number = from / chunk;
            let stripe = (number % count) as usize;
            let device = words.get(2 + 2 * stripe)?;
            let start = sectors(words.get(3 + 2 * stripe)?)?;
            let length = chunk.min(self.length - from);
            let physical = start + number / count * chunk;
            pieces.push(((*device).to_owned(), self.piece(from, physical, length)));
            from += chunk;
        }
        Some(pieces)
    }
}

fn sectors(text: &str) -> Option<u64> {
    text.parse::<u64>().ok()?.checked_mul(SECTOR)
}

fn ioctl(file: &File, request: libc::Ioctl, buffer: &mut [u8]) -> io::Result<()> {
    // SAFETY: both requests read and write a structure at the pointer whose size the structure
    // itself states, which is that of `buffer`.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request, buffer.as_mut_ptr()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(offset: u64, physical: u64, length: u64) -> Piece {
        Piece {
            offset,
            physical,
            length,
        }
    }

    #[test]
    fn pieces_are_followed_through_pieces() {
        let file = [piece(0, 100, 50), piece(80, 300, 20)];
        let below = [
            piece(0, 1000, 120),
            piece(120, 5000, 30),
            piece(290, 9000, 15),
        ];
        assert_eq!(
            through(&file, &below),
            [piece(0, 1100, 20), piece(20, 5000, 30), piece(80, 9010, 5)]
        );
        assert_eq!(through(&file, &[]), []);
    }

    #[test]
    fn neighbours_become_one() {
        let mut pieces = Vec::new();
        for (offset, physical) in [(0, 100), (10, 110), (20, 500)] {
            push(&mut pieces, offset, physical, 10);
        }
        assert_eq!(pieces, [piece(0, 100, 20), piece(20, 500, 10)]);
    }

    #[test]
    fn stripes_go_round() {
        let target = Target {
            start: 1024,
            length: 5 * 4096,
            kind: "striped".into(),
            parameters: "2 8 8:16 0 8:32 100".into(),
        };
        let pieces = target.pieces().unwrap();
        let second = (
            "8:32".to_owned(),
            piece(1024 + 3 * 4096, 51200 + 4096, 4096),
        );
        assert_eq!((pieces.len(), &pieces[3]), (5, &second));
        let linear = Target {
            kind: "linear".into(),
            parameters: "254:3 2048".into(),
            ..target.clone()
        };
        let whole = ("254:3".to_owned(), piece(1024, 1 << 20, 5 * 4096));
        assert_eq!(linear.pieces().unwrap(), [whole]);
        let crypt = Target {
            kind: "crypt".into(),
            ..target
        };
        assert_eq!(crypt.pieces(), None);
    }

    #[test]
    fn a_table_that_makes_no_sense_is_refused() {
        let mut spec = vec![0; 64];
        spec[8] = 8;
        spec[24..30].copy_from_slice(b"linear");
        spec[40..46].copy_from_slice(b"8:0 16");
        let targets = parse_table(&spec, 1).unwrap();
        assert_eq!(
            (targets[0].kind.as_str(), targets[0].parameters.as_str()),
            ("linear", "8:0 16")
        );
        assert_eq!(parse_table(&spec, 2), None); // its `next` is itself
        assert_eq!(parse_table(&spec[..30], 1), None);
    }
}
