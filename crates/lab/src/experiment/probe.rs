//! What a machine does by itself: how fast its CPU is, its memory, and its disk.

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::workload::{self, Limit};

/// Numbers that are sorted: some hundred kilobytes, a few milliseconds of a CPU of today.
const NUMBERS: usize = 100_000;
/// The quickest counts: others were held up.
const TRIES: u32 = 5;
const CHASED: u32 = 200_000;
/// Larger than caches, and than what translations of 4 KiB pages are kept for.
const CHASED_OVER: usize = 64 << 20;
const READING: Duration = Duration::from_secs(2);

/// Seconds that a CPU takes to sort numbers that are in no order: memory, comparisons and branches, as
/// programs have them. (A loop in registers takes no longer where instructions are translated.)
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

/// Nanoseconds that a read takes whose place is known from the read before alone, all over memory of
/// so many bytes: few places are in a cache, and few of their pages' translations.
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

/// Of each place the next one, so that all are gone through in no order before the first comes again
/// (Sattolo's algorithm).
fn one_cycle(count: usize) -> Vec<u32> {
    let mut next: Vec<u32> = (0..count as u32).collect();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for last in (1..count).rev() {
        // xorshift64 (Marsaglia)
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        next.swap(last, (random % last as u64) as usize);
    }
    next
}

/// What is printed where the machine is another one; [`parse`] reads it.
pub fn print() -> String {
    format!("{} {}", sorting() * 1e9, chasing(CHASED_OVER))
}

/// Nanoseconds: of sorting, and of a read.
///
/// # Errors
/// When it is no such text.
pub fn parse(text: &str) -> Result<(f64, f64)> {
    let numbers = text.trim().split_once(' ');
    let numbers = numbers.and_then(|(sort, read)| Some((sort.parse().ok()?, read.parse().ok()?)));
    numbers.ok_or_else(|| Error::Protocol(format!("the probe has printed '{text}'")))
}

/// Reads of 4 KiB, past the page cache, one after the other: how many, and what one takes on the mean.
///
/// # Errors
/// When it cannot be read.
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
        // Sorting takes some comparisons of each number, a nanosecond each at the very least.
        assert!(sorting() * 1e9 > 1.0 * NUMBERS as f64);
        // What fits into a cache is there sooner.
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
