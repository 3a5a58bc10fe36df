//! Speed of a machine's CPU, memory and disk.

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::workload::{self, Limit};

/// Count of numbers to sort: some hundred kilobytes, a few milliseconds on a current CPU.
const NUMBERS: usize = 100_000;
/// Number of repetitions; the fastest counts, because the others were delayed.
const TRIES: u32 = 5;
const CHASED: u32 = 200_000;
/// Larger than the caches, and than the range that the TLB covers with 4 KiB pages.
const CHASED_OVER: usize = 64 << 20;
const READING: Duration = Duration::from_secs(2);

/// Measures the time to sort numbers in random order, in seconds.
///
/// Sorting has memory accesses, comparisons and branches, as programs have them. A loop in
/// registers would not be slower on a CPU that translates instructions.
pub fn sorting() -> f64 {
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

/// Measures the time of a dependent read, in nanoseconds: its address is known only from the read
/// before. The reads are spread over `bytes` of memory; if these are many, caches and the TLB
/// seldom help.
pub fn chasing(bytes: usize) -> f64 {
    let mut next = one_cycle(bytes / size_of::<u32>());
    let mut at = 0;
    let one = |_| {
        let begin = Instant::now();
        for _ in 0..CHASED {
            at = black_box(&next)[at as usize];
        }
        begin.elapsed()
    };
    let least = (0..TRIES).map(one).min().unwrap_or_default();
    next[0] = black_box(at);
    least.as_secs_f64() * 1e9 / f64::from(CHASED)
}

/// Returns the next place for each place, in one random cycle through all places (Sattolo's
/// algorithm).
fn one_cycle(count: usize) -> Vec<u32> {
    let mut next: Vec<u32> = (0..count as u32).collect();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for last in (1..count).rev() {
        // xorshift64 (Marsaglia).
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        next.swap(last, (random % last as u64) as usize);
    }
    next
}

/// Measures, and formats the results for another machine, which reads them with [`parse`].
pub fn print() -> String {
    format!("{} {}", sorting() * 1e9, chasing(CHASED_OVER))
}

/// Parses the nanoseconds of sorting and of a read.
///
/// # Errors
/// If the text was not made by [`print()`].
pub fn parse(text: &str) -> Result<(f64, f64)> {
    let numbers = text.trim().split_once(' ');
    let numbers = numbers.and_then(|(sort, read)| Some((sort.parse().ok()?, read.parse().ok()?)));
    numbers.ok_or_else(|| Error::Protocol(format!("the probe has printed '{text}'")))
}

/// Reads 4 KiB blocks with O_DIRECT, one at a time. Returns their number and mean time in ns.
///
/// # Errors
/// If the file or device cannot be read.
pub fn reads(of: &Path) -> Result<(u64, f64)> {
    let options = workload::Options::new(of).with_limit(Limit::Time(READING));
    let outcome = workload::run(&options)?.benchmark;
    Ok((outcome.operations, outcome.mean_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_tells_of_itself() {
        // Sorting takes several comparisons per number, at least a nanosecond each.
        assert!(sorting() * 1e9 > 1.0 * NUMBERS as f64);
        // Memory that fits into a cache is faster.
        assert!(chasing(64 << 20) > chasing(16 << 10));
        let (sort, read) = parse(&format!("{}\n", print())).unwrap();
        assert!(sort > 0.0 && read > 0.0);
        assert!(parse("fathom: no such command").is_err());
    }

    #[test]
    fn every_place_comes_once_before_the_first_comes_again() {
        let next = one_cycle(1000);
        let mut at = 0;
        for step in 1..=1000 {
            at = next[at as usize];
            assert_eq!(at == 0, step == 1000);
        }
    }
}
