//! Tracks which bytes of a read have arrived.

use smallvec::SmallVec;

/// Maximum number of separate pieces of one reply. Servers send their chunks in order, or nearly
/// so.
const MAX_PIECES: usize = 256;

/// Ranges of a reply that have arrived, in ascending order and not adjacent.
#[derive(Debug, Default)]
pub(super) struct Coverage {
    pieces: SmallVec<[(u32, u32); 2]>,
}

/// The range overlaps an earlier one, or it is one piece too many.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Overlap;

impl Coverage {
    pub(super) fn clear(&mut self) {
        self.pieces.clear();
    }

    /// Adds the non-empty range `start..end`.
    #[inline]
    pub(super) fn add(&mut self, start: u32, end: u32) -> Result<(), Overlap> {
        if let Some(last) = self.pieces.last_mut()
            && last.1 == start
        {
            last.1 = end;
            return Ok(());
        }
        self.insert(start, end)
    }

    fn insert(&mut self, start: u32, end: u32) -> Result<(), Overlap> {
        let at = self.pieces.partition_point(|piece| piece.1 <= start);
        let follows = at > 0 && self.pieces[at - 1].1 == start;
        match self.pieces.get(at) {
            Some(next) if next.0 < end => return Err(Overlap),
            Some(next) if next.0 == end => {
                self.pieces[at].0 = start;
                if follows {
                    self.pieces[at - 1].1 = self.pieces[at].1;
                    self.pieces.remove(at);
                }
            }
            _ if follows => self.pieces[at - 1].1 = end,
            _ if self.pieces.len() == MAX_PIECES => return Err(Overlap),
            _ => self.pieces.insert(at, (start, end)),
        }
        Ok(())
    }

    /// Returns whether all of `len` bytes have arrived.
    #[inline]
    pub(super) fn is_whole(&self, len: u32) -> bool {
        self.pieces[..] == [(0, len)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_knows_what_a_list_of_bytes_would(
            ranges in prop::collection::vec((0..40u32, 1..12u32), 0..30)
        ) {
            let mut bytes = [false; 64];
            let mut coverage = Coverage::default();
            for (start, len) in ranges {
                let range = start as usize..(start + len) as usize;
                let fresh = bytes[range.clone()].iter().all(|come| !come);
                prop_assert_eq!(coverage.add(start, start + len).is_ok(), fresh);
                if fresh {
                    bytes[range].fill(true);
                }
                for len in 1..64 {
                    let whole = bytes[..len].iter().all(|come| *come)
                        && bytes[len..].iter().all(|come| !come);
                    prop_assert_eq!(coverage.is_whole(len as u32), whole);
                }
            }
        }
    }

    #[test]
    fn gaps_are_bounded() {
        let mut coverage = Coverage::default();
        for n in 0..MAX_PIECES as u32 {
            assert_eq!(coverage.add(4 * n, 4 * n + 1), Ok(()));
        }
        assert_eq!(coverage.add(1 << 20, 1 << 21), Err(Overlap));
        assert_eq!(coverage.add(1, 4), Ok(()));
    }
}
