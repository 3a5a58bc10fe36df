//! Contents of verified blocks.
//!
//! The contents of a sector are a function of three numbers: the seed of the run, the number of the
//! sector, and the generation of the block. The sector's first words store these numbers. Therefore
//! an unexpected sector shows its origin: an older generation (a lost write), another sector
//! (misplaced), or another run. Other sectors are zeroes or damaged. A block whose sectors disagree
//! is torn.

use std::fmt::Write as _;

use crate::memory::Buffer;
use crate::workload::mix;

/// Words per 512-byte sector.
pub const SECTOR_WORDS: usize = 64;
/// Marks a sector of this program. The first word is this number XOR the seed.
const MAGIC: u64 = 0x6661_7468_6f6d_2e31;
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// Every word of a buffer before a verified read. No sector that was written has it: the third word
/// of a pattern is a generation, which has 32 bits.
const UNREAD: u64 = 0xbad0_da7a_bad0_da7a;
const _: () = assert!(UNREAD > Generation::MAX as u64);

/// Number of writes to a block so far. The values 0 and 1 are [`UNKNOWN`] and [`ZEROES`].
pub type Generation = u32;
/// The block was never written, or was discarded, and may have any contents.
pub const UNKNOWN: Generation = 0;
/// Zeroes were written.
pub const ZEROES: Generation = 1;
/// The first generation with a pattern.
pub const FIRST: Generation = 2;

/// Identified contents of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Zeroes,
    /// The buffer as it was before the read.
    Unread,
    /// An intact sector written by some run.
    Pattern {
        seed: u64,
        sector: u64,
        generation: Generation,
    },
    Damaged,
}

/// Returns the word at `index` of a sector.
#[inline(always)]
fn word(seed: u64, sector: u64, generation: Generation, base: u64, index: usize) -> u64 {
    match index {
        0 => MAGIC ^ seed,
        1 => sector,
        2 => u64::from(generation),
        _ => base.wrapping_add((index as u64).wrapping_mul(STEP)),
    }
}

fn base(seed: u64, sector: u64, generation: Generation) -> u64 {
    mix(mix(seed ^ mix(sector)) ^ u64::from(generation))
}

/// Fills the buffer with generation `generation` of the block that starts at `sector`.
pub fn fill(buffer: Buffer, seed: u64, sector: u64, generation: Generation) {
    for s in 0..buffer.words() / SECTOR_WORDS {
        let number = sector + s as u64;
        let base = base(seed, number, generation);
        for i in 0..SECTOR_WORDS {
            let value = word(seed, number, generation, base, i);
            buffer.store(s * SECTOR_WORDS + i, value);
        }
    }
}

/// Overwrites the buffer of a read that will be verified. Otherwise the data of an earlier request
/// in the buffer could pass for data that was read.
pub fn mark_unread(buffer: Buffer) {
    for i in 0..buffer.words() {
        buffer.store(i, UNREAD);
    }
}

/// Returns whether sector `at` of the buffer is sector `sector` of the disk with this generation.
pub fn sector_is(
    buffer: Buffer,
    at: usize,
    seed: u64,
    sector: u64,
    generation: Generation,
) -> bool {
    let words = at * SECTOR_WORDS..(at + 1) * SECTOR_WORDS;
    if generation == ZEROES {
        return words.into_iter().all(|i| buffer.load(i) == 0);
    }
    let base = base(seed, sector, generation);
    (0..SECTOR_WORDS)
        .all(|i| buffer.load(at * SECTOR_WORDS + i) == word(seed, sector, generation, base, i))
}

/// Returns whether every sector has one of the generations in `allowed`.
pub fn matches(buffer: Buffer, seed: u64, sector: u64, allowed: &[Generation]) -> bool {
    (0..buffer.words() / SECTOR_WORDS).all(|s| {
        allowed
            .iter()
            .any(|g| sector_is(buffer, s, seed, sector + s as u64, *g))
    })
}

fn identify(buffer: Buffer, at: usize) -> Found {
    let load = |i| buffer.load(at * SECTOR_WORDS + i);
    if (0..SECTOR_WORDS).all(|i| load(i) == 0) {
        return Found::Zeroes;
    }
    if (0..SECTOR_WORDS).all(|i| load(i) == UNREAD) {
        return Found::Unread;
    }
    let (seed, sector) = (load(0) ^ MAGIC, load(1));
    match Generation::try_from(load(2)) {
        Ok(generation) if sector_is(buffer, at, seed, sector, generation) => Found::Pattern {
            seed,
            sector,
            generation,
        },
        _ => Found::Damaged,
    }
}

fn describe_sector(found: Found, seed: u64, sector: u64) -> String {
    match found {
        Found::Zeroes => "zeroes".into(),
        Found::Unread => "no data, because the read left its buffer unchanged".into(),
        Found::Damaged => "damaged or foreign data".into(),
        Found::Pattern { seed: other, .. } if other != seed => "data of another run".into(),
        Found::Pattern {
            sector: s,
            generation,
            ..
        } if s != sector => format!("sector {s} (generation {generation})"),
        Found::Pattern { generation, .. } => format!("generation {generation}"),
    }
}

/// Describes the contents of a block for an error message, as runs of equal sectors.
pub fn describe(buffer: Buffer, seed: u64, sector: u64) -> String {
    let sectors = buffer.words() / SECTOR_WORDS;
    let name = |s: usize| describe_sector(identify(buffer, s), seed, sector + s as u64);
    let mut runs: Vec<(usize, String)> = Vec::new();
    for s in 0..sectors {
        let text = name(s);
        if runs.last().is_none_or(|(_, last)| *last != text) {
            runs.push((s, text));
        }
    }
    if let [(_, only)] = &runs[..] {
        return only.clone();
    }
    let mut out = String::from("a torn block:");
    for (i, (start, text)) in runs.iter().take(4).enumerate() {
        let comma = if i == 0 { "" } else { "," };
        let _ = write!(out, "{comma} {text} from sector +{start}");
    }
    if runs.len() > 4 {
        let _ = write!(out, ", and {} more changes", runs.len() - 4);
    }
    out
}

/// Describes the expected contents for an error message.
pub fn describe_expected(allowed: &[Generation]) -> String {
    let name = |g: &Generation| match *g {
        ZEROES => "zeroes".to_owned(),
        g => format!("generation {g}"),
    };
    allowed.iter().map(name).collect::<Vec<_>>().join(" or ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block in ordinary memory.
    struct Block(Vec<u64>);

    impl Block {
        fn new(sectors: usize) -> Block {
            Block(vec![0; sectors * SECTOR_WORDS])
        }
        fn buffer(&mut self) -> Buffer {
            let len = self.0.len() * 8;
            // SAFETY: the vector is aligned to 8 and not touched otherwise
            // while the returned buffer is in use.
            unsafe { Buffer::new(self.0.as_mut_ptr().cast(), len) }
        }
        fn written(sectors: usize, sector: u64, generation: Generation) -> Block {
            let mut b = Block::new(sectors);
            fill(b.buffer(), 7, sector, generation);
            b
        }
    }

    #[test]
    fn a_written_block_matches_only_itself() {
        let mut b = Block::written(8, 40, 5);
        assert!(matches(b.buffer(), 7, 40, &[5]));
        assert!(matches(b.buffer(), 7, 40, &[4, 5]));
        assert!(!matches(b.buffer(), 7, 40, &[4]), "stale");
        assert!(!matches(b.buffer(), 7, 48, &[5]), "misplaced");
        assert!(!matches(b.buffer(), 8, 40, &[5]), "another run's");
        assert!(!matches(b.buffer(), 7, 40, &[ZEROES]));
        assert_eq!(describe(b.buffer(), 7, 40), "generation 5");
        assert_eq!(describe(b.buffer(), 9, 40), "data of another run");
    }

    #[test]
    fn any_flipped_bit_is_seen() {
        let mut b = Block::written(2, 0, 3);
        for i in 0..2 * SECTOR_WORDS {
            for bit in [0, 17, 63] {
                b.0[i] ^= 1 << bit;
                assert!(!matches(b.buffer(), 7, 0, &[3]), "word {i} bit {bit}");
                assert_ne!(describe(b.buffer(), 7, 0), "generation 3");
                b.0[i] ^= 1 << bit;
            }
        }
    }

    #[test]
    fn torn_blocks_match_only_when_both_generations_are_allowed() {
        let mut b = Block::written(8, 40, 5);
        let new = Block::written(8, 40, 6);
        b.0[..3 * SECTOR_WORDS].copy_from_slice(&new.0[..3 * SECTOR_WORDS]);
        assert!(!matches(b.buffer(), 7, 40, &[5]));
        assert!(!matches(b.buffer(), 7, 40, &[6]));
        assert!(matches(b.buffer(), 7, 40, &[5, 6]));
        assert_eq!(
            describe(b.buffer(), 7, 40),
            "a torn block: generation 6 from sector +0, generation 5 from sector +3"
        );
        // A write that is torn inside a sector counts as damage, even if both generations are
        // allowed.
        b.0[2 * SECTOR_WORDS + 30..3 * SECTOR_WORDS].fill(0);
        assert!(!matches(b.buffer(), 7, 40, &[5, 6]));
    }

    #[test]
    fn buffer_before_a_read_is_no_data() {
        let mut b = Block::written(2, 40, 5);
        mark_unread(b.buffer());
        assert!(!matches(b.buffer(), 7, 40, &[ZEROES, 5]));
        let found = describe(b.buffer(), 7, 40);
        assert!(found.starts_with("no data"), "{found}");
        // A read that transferred only the first sector is not right, either.
        let whole = Block::written(2, 40, 5);
        b.0[..SECTOR_WORDS].copy_from_slice(&whole.0[..SECTOR_WORDS]);
        assert!(!matches(b.buffer(), 7, 40, &[5]));
    }

    #[test]
    fn zeroes_are_zeroes() {
        let mut b = Block::new(8);
        assert!(matches(b.buffer(), 7, 0, &[ZEROES]));
        assert_eq!(describe(b.buffer(), 7, 0), "zeroes");
        b.0[100] = 1;
        assert!(!matches(b.buffer(), 7, 0, &[ZEROES]));
    }
}
