//! What a machine does by itself: how fast its CPU is, and its disk.

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::workload::{self, Limit};

/// Numbers that are sorted: some hundred kilobytes, a few milliseconds of a CPU of today.
const NUMBERS: usize = 100_000;
/// The quickest counts: others were held up.
const TRIES: u32 = 5;
const READING: Duration = Duration::from_secs(2);

/// Seconds that a CPU takes to sort numbers that are in no order: memory, comparisons and branches, as
/// programs have them. (A loop in registers takes no longer where instructions are translated.)
pub(super) fn sorting() -> f64 {
    let mut value = 0x9e37_79b9_u32;
    let numbers = std::iter::repeat_with(|| {
        value ^= value << 13;
        value ^= value >> 17;
        value ^= value << 5;
        value
    });
    let numbers: Vec<u32> = numbers.take(NUMBERS).collect();
    let one = |_| {
        let mut numbers = black_box(numbers.clone());
        let begin = Instant::now();
        numbers.sort_unstable();
        black_box(numbers);
        begin.elapsed()
    };
    let least = (0..TRIES).map(one).min().unwrap_or_default();
    least.as_secs_f64()
}

/// Reads of 4 KiB, past the page cache, one after the other: how many, and what one takes on the mean.
///
/// # Errors
/// When it cannot be read.
pub(super) fn reads(of: &Path) -> Result<(u64, f64)> {
    let options = workload::Options::new(of).with_limit(Limit::Time(READING));
    let outcome = workload::run(&options)?.benchmark;
    Ok((outcome.operations, outcome.mean_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_tells_of_itself() {
        // Sorting takes some comparisons of each number, a nanosecond each at the very least.
        assert!(sorting() * 1e9 > 1.0 * NUMBERS as f64);
    }
}
