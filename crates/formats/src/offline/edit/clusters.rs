//! Sets of cluster numbers.

use std::ops::Range;

/// A set of cluster numbers, one bit each. Memory is proportional to the largest number, which
/// callers bound by the file's length.
#[derive(Default)]
pub(super) struct Clusters(Vec<u64>);

impl Clusters {
    pub(super) fn insert(&mut self, cluster: u64) {
        let word = (cluster / 64) as usize;
        if word >= self.0.len() {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (cluster % 64);
    }

    pub(super) fn remove(&mut self, cluster: u64) {
        if let Some(word) = self.0.get_mut((cluster / 64) as usize) {
            *word &= !(1 << (cluster % 64));
        }
    }

    pub(super) fn contains(&self, cluster: u64) -> bool {
        let word = self.0.get((cluster / 64) as usize);
        word.is_some_and(|word| word >> (cluster % 64) & 1 == 1)
    }

    /// The largest number plus one, or 0 if the set is empty.
    pub(super) fn end(&self) -> u64 {
        let last = self.0.iter().rposition(|word| *word != 0);
        last.map_or(0, |at| {
            at as u64 * 64 + 64 - u64::from(self.0[at].leading_zeros())
        })
    }

    /// Returns the numbers in order, as the fewest possible ranges.
    pub(super) fn ranges(&self) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (at, word) in self.0.iter().enumerate().filter(|(_, word)| **word != 0) {
            let set = (0..64).filter(|bit| word >> bit & 1 == 1);
            for cluster in set.map(|bit| at as u64 * 64 + bit) {
                match ranges.last_mut() {
                    Some(last) if last.end == cluster => last.end += 1,
                    _ => ranges.push(cluster..cluster + 1),
                }
            }
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_what_was_put_into_them() {
        let mut set = Clusters::default();
        assert_eq!((set.end(), set.ranges()), (0, vec![]));
        for cluster in [3, 4, 63, 64, 65, 200] {
            set.insert(cluster);
        }
        set.insert(66);
        set.remove(66);
        set.remove(10_000);
        assert!(set.contains(64) && !set.contains(66) && !set.contains(10_000));
        assert_eq!(set.end(), 201);
        assert_eq!(set.ranges(), [3..5, 63..66, 200..201]);
    }
}
