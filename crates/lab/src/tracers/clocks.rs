//! Readings of this machine's clocks, to relate event files of different clocks.

use std::sync::OnceLock;
use std::time::Duration;

use fathom_run::Pair;
use fathom_trace::clock::monotonic_ns;
use rustix::time::{ClockId, clock_gettime};

/// Number of readings, of which the tightest is used. An interrupt between the two clocks would
/// appear as an error.
const READINGS: usize = 16;

/// Reads the time stamp counter and CLOCK_MONOTONIC at the same moment. On a machine without the
/// counter, its value is 0.
pub fn pair() -> Pair {
    let reading = |_| {
        let before = tsc();
        let monotonic_ns = monotonic_ns();
        let width = tsc().wrapping_sub(before);
        let tsc = before.wrapping_add(width / 2);
        (width, Pair { tsc, monotonic_ns })
    };
    let readings = (0..READINGS).map(reading);
    let tightest = readings.min_by_key(|(width, _)| *width);
    tightest.map(|(_, pair)| pair).expect("there are readings")
}

/// Returns the frequency of the time stamp counter in kHz, or 0 on a machine without the counter.
pub fn tsc_khz() -> u64 {
    const APART: Duration = Duration::from_millis(20);
    static SEEN: OnceLock<u64> = OnceLock::new();
    *SEEN.get_or_init(|| {
        let before = pair();
        std::thread::sleep(APART);
        let after = pair();
        let ns = after.monotonic_ns - before.monotonic_ns;
        let ticks = u128::from(after.tsc.wrapping_sub(before.tsc));
        u64::try_from(ticks * 1_000_000 / u128::from(ns.max(1))).unwrap_or(0)
    })
}

/// Returns CLOCK_REALTIME minus CLOCK_MONOTONIC, in nanoseconds.
pub fn realtime_minus_monotonic_ns() -> i64 {
    let reading = |_| {
        let before = monotonic_ns();
        let now = clock_gettime(ClockId::Realtime);
        let width = monotonic_ns() - before;
        let realtime = now.tv_sec * 1_000_000_000 + now.tv_nsec;
        (width, realtime - (before + width / 2) as i64)
    };
    let tightest = (0..READINGS).map(reading).min();
    tightest.map_or(0, |(_, difference)| difference)
}

#[cfg(target_arch = "x86_64")]
fn tsc() -> u64 {
    // SAFETY: RDTSC exists on every x86-64 and has no side effects.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn tsc() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn pairs_advance_and_the_wall_clock_agrees() {
        let (first, second) = (pair(), pair());
        assert!(second.monotonic_ns > first.monotonic_ns);
        #[cfg(target_arch = "x86_64")]
        assert!(second.tsc > first.tsc);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let ours = monotonic_ns() as i64 + realtime_minus_monotonic_ns();
        let off = now.unwrap().as_nanos() as i64 - ours;
        assert!(off.abs() < 1_000_000_000, "{off}");
    }
}
