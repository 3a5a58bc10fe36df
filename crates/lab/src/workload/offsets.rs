//! Where the next operation goes.

/// An endless row of block-aligned offsets within a range.
#[derive(Clone, Debug)]
pub(super) struct Offsets {
    start: u64,
    blocks: u64,
    block_size: u64,
    next: u64,
    /// The state of the generator; None: in sequence.
    random: Option<u64>,
}

impl Offsets {
    /// Of the `blocks` (at least one) blocks that begin at `start`.
    pub fn new(start: u64, blocks: u64, block_size: u64, seed: Option<u64>) -> Offsets {
        Offsets {
            start,
            blocks,
            block_size,
            next: 0,
            random: seed,
        }
    }

    /// The next offset in bytes.
    #[inline]
    pub fn next_offset(&mut self) -> u64 {
        let block = match &mut self.random {
            Some(state) => scale(split_mix(state), self.blocks),
            None => {
                let block = self.next;
                self.next = if block + 1 == self.blocks {
                    0
                } else {
                    block + 1
                };
                block
            }
        };
        self.start + block * self.block_size
    }
}

/// Sebastiano Vigna's SplitMix64: one word of state, every value once.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// A word as a number below `below`, without a division.
fn scale(word: u64, below: u64) -> u64 {
    ((u128::from(word) * u128::from(below)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_starts_again_at_its_start() {
        let mut offsets = Offsets::new(8192, 3, 4096, None);
        let got: Vec<u64> = (0..5).map(|_| offsets.next_offset()).collect();
        assert_eq!(got, [8192, 12288, 16384, 8192, 12288]);
    }

    #[test]
    fn random_offsets_reach_all_of_the_range_evenly_and_nothing_else() {
        let mut offsets = Offsets::new(512, 16, 512, Some(7));
        let mut hits = [0u32; 16];
        for _ in 0..16_000 {
            let offset = offsets.next_offset();
            assert!(offset >= 512 && offset.is_multiple_of(512), "{offset}");
            hits[usize::try_from(offset / 512 - 1).unwrap()] += 1;
        }
        assert!(hits.iter().all(|n| (800..1200).contains(n)), "{hits:?}");
        let again = Offsets::new(512, 16, 512, Some(7)).next_offset();
        assert_eq!(again, Offsets::new(512, 16, 512, Some(7)).next_offset());
    }
}
