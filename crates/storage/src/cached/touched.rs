//! Records which stripes have been used. The keeper retains those, and learns what a boot reads
//! first.

use super::wire::{MAX_RUNS, Run};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub(super) struct Touched {
    bits: Box<[AtomicU64]>,
    any: AtomicBool,
}

impl Touched {
    pub(super) fn new(stripes: u64) -> Touched {
        let words = stripes.div_ceil(64) as usize;
        Touched {
            bits: (0..words).map(|_| AtomicU64::new(0)).collect(),
            any: AtomicBool::new(false),
        }
    }

    /// Marks the stripes of a request as used. Stripes that are marked already cost only a load.
    #[inline]
    pub(super) fn note(&self, (first, count): Run) {
        for stripe in first..first + count {
            let (word, bit) = (stripe as usize / 64, 1 << (stripe % 64));
            if self.bits[word].load(Ordering::Relaxed) & bit == 0 {
                self.bits[word].fetch_or(bit, Ordering::Relaxed);
                self.any.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Returns the stripes marked since the last call, in pieces that fit into one message each.
    pub(super) fn take(&self) -> Vec<Vec<Run>> {
        if !self.any.swap(false, Ordering::Relaxed) {
            return Vec::new();
        }
        let mut runs: Vec<Run> = Vec::new();
        for (index, word) in self.bits.iter().enumerate() {
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut left = word.swap(0, Ordering::Relaxed);
            while left != 0 {
                let stripe = (index * 64) as u32 + left.trailing_zeros();
                left &= left - 1;
                match runs.last_mut() {
                    Some((first, count)) if *first + *count == stripe => *count += 1,
                    _ => runs.push((stripe, 1)),
                }
            }
        }
        runs.chunks(MAX_RUNS).map(<[Run]>::to_vec).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_is_told_once() {
        let touched = Touched::new(200);
        assert!(touched.take().is_empty());
        for run in [(63, 3), (64, 1), (199, 1)] {
            touched.note(run);
        }
        assert_eq!(touched.take(), [vec![(63, 3), (199, 1)]]);
        assert!(touched.take().is_empty());
        let many = Touched::new(10_000);
        (0..5000).for_each(|n| many.note((2 * n, 1)));
        let told = many.take();
        assert_eq!(told.iter().map(Vec::len).sum::<usize>(), 5000);
        assert!(told.iter().all(|runs| runs.len() <= MAX_RUNS));
    }
}
