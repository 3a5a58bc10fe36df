//! Contents of files: random bytes or, for verification, a pattern.
//!
//! A sector of a verified file is a function of three numbers: the seed of the run, the number of
//! the file, and the offset of the sector. The sector's first words store these numbers. Therefore
//! an unexpected sector shows its origin.

use super::options::SECTOR;
use crate::workload::{Rng, mix};

/// Alignment of memory for O_DIRECT in bytes, sufficient for any device.
const ALIGN: usize = 4096;
const SECTOR_LEN: usize = SECTOR as usize;
/// Marks a sector of this program. The first word is this number XOR the seed.
const MAGIC: u64 = 0x6661_7468_6f6d_2e32;
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// Every byte of memory before a verified read. No sector that was written has it: the second word
/// of a sector is the number of a file, which is far smaller.
const UNREAD: u8 = 0xba;

/// Memory aligned for O_DIRECT.
#[derive(Debug)]
pub struct Memory {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Memory {
    /// Allocates `len` random bytes, which storage cannot compress.
    pub fn new(len: usize, seed: u64) -> Memory {
        let mut bytes = vec![0; len + ALIGN];
        let start = bytes.as_ptr().align_offset(ALIGN);
        let mut rng = Rng::new(seed);
        for word in bytes[start..].chunks_exact_mut(8) {
            word.copy_from_slice(&rng.next().to_le_bytes());
        }
        Memory { bytes, start, len }
    }

    /// Returns all of the memory.
    pub fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// Position of a sector: the run, the file, and the offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub seed: u64,
    pub file: u64,
    /// Offset in bytes, a multiple of the sector size.
    pub offset: u64,
}

impl Place {
    fn sector(self) -> impl Iterator<Item = u64> {
        let base = mix(mix(self.seed ^ mix(self.file)) ^ self.offset);
        let rest = (3..64).map(move |i: u64| base.wrapping_add(i.wrapping_mul(STEP)));
        [MAGIC ^ self.seed, self.file, self.offset]
            .into_iter()
            .chain(rest)
    }

    fn is_at(self, sector: &[u8]) -> bool {
        words(sector).eq(self.sector())
    }

    /// Returns the places of the sectors from this one on.
    fn onwards(self) -> impl Iterator<Item = Place> {
        (0..).map(move |i| Place {
            offset: self.offset + i * u64::from(SECTOR),
            ..self
        })
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let word = |w: &[u8]| w.try_into().map_or(0, u64::from_le_bytes);
    bytes.chunks_exact(8).map(word)
}

/// Fills whole sectors with the contents for `place` and the following places.
pub fn fill(bytes: &mut [u8], place: Place) {
    for (sector, place) in bytes.chunks_exact_mut(SECTOR_LEN).zip(place.onwards()) {
        for (to, word) in sector.chunks_exact_mut(8).zip(place.sector()) {
            to.copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// Overwrites the memory of a read that will be verified. Otherwise the data of an earlier read
/// could pass for data that was read.
pub fn mark_unread(bytes: &mut [u8]) {
    bytes.fill(UNREAD);
}

/// Returns the offset of the first wrong sector, and a description of its contents.
pub fn find_wrong(bytes: &[u8], place: Place) -> Option<(u64, String)> {
    let sectors = bytes.chunks_exact(SECTOR_LEN).zip(place.onwards());
    let (sector, place) = { sectors }.find(|(sector, place)| !place.is_at(sector))?;
    Some((place.offset, describe(sector, place)))
}

fn describe(sector: &[u8], expected: Place) -> String {
    let mut head = words(sector);
    let mut next = || head.next().unwrap_or(0);
    let found = Place {
        seed: next() ^ MAGIC,
        file: next(),
        offset: next(),
    };
    if sector.iter().all(|b| *b == 0) {
        return "zeroes".into();
    }
    if sector.iter().all(|b| *b == UNREAD) {
        return "no data, because the read left its buffer unchanged".into();
    }
    if !found.is_at(sector) {
        return "damaged or foreign data".into();
    }
    match found {
        Place { seed, .. } if seed != expected.seed => "data of another run".into(),
        Place { file, offset, .. } => format!("data of file {file}, offset {offset}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Place = Place {
        seed: 7,
        file: 3,
        offset: 4096,
    };

    fn written(place: Place) -> Vec<u8> {
        let mut bytes = vec![0xaa; 4 * SECTOR_LEN];
        fill(&mut bytes, place);
        bytes
    }

    #[test]
    fn what_was_written_is_right_only_where_it_belongs() {
        let bytes = written(HERE);
        assert_eq!(find_wrong(&bytes, HERE), None);
        assert_eq!(
            find_wrong(
                &bytes[SECTOR_LEN..],
                Place {
                    offset: 4608,
                    ..HERE
                }
            ),
            None
        );
        let says = |place| find_wrong(&bytes, place).unwrap().1;
        assert_eq!(
            says(Place {
                offset: 8192,
                ..HERE
            }),
            "data of file 3, offset 4096"
        );
        assert_eq!(
            says(Place { file: 4, ..HERE }),
            "data of file 3, offset 4096"
        );
        assert_eq!(says(Place { seed: 8, ..HERE }), "data of another run");
    }

    #[test]
    fn any_flipped_bit_is_seen() {
        let mut bytes = written(HERE);
        for at in 0..bytes.len() {
            bytes[at] ^= 1 << (at % 8);
            let sector = (at / SECTOR_LEN * SECTOR_LEN) as u64;
            let (offset, _) = find_wrong(&bytes, HERE).unwrap();
            assert_eq!(offset, HERE.offset + sector, "byte {at}");
            bytes[at] ^= 1 << (at % 8);
        }
        bytes[SECTOR_LEN..2 * SECTOR_LEN].fill(0);
        assert_eq!(find_wrong(&bytes, HERE), Some((4608, "zeroes".into())));
    }

    #[test]
    fn memory_before_a_read_is_no_data() {
        let mut bytes = written(HERE);
        mark_unread(&mut bytes[SECTOR_LEN..]);
        let (offset, found) = find_wrong(&bytes, HERE).unwrap();
        assert_eq!(offset, HERE.offset + u64::from(SECTOR));
        assert!(found.starts_with("no data"), "{found}");
    }

    #[test]
    fn memory_is_aligned_and_random() {
        let mut memory = Memory::new(10_000, 1);
        assert_eq!(memory.get().len(), 10_000);
        assert_eq!(memory.get(), Memory::new(10_000, 1).get());
        assert!(memory.get().as_ptr().align_offset(ALIGN) == 0);
        let distinct: std::collections::BTreeSet<u64> = words(memory.get()).collect();
        assert!(distinct.len() > 1_200);
    }
}
