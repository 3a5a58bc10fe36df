//! Figures of this host from /proc.

use std::fs;
use std::time::Instant;

/// Ticks in a second of /proc/stat (USER_HZ).
const HZ: f64 = 100.0;

/// The idle time of all CPUs at a moment.
pub struct Idle {
    ticks: u64,
    at: Instant,
}

impl Idle {
    /// Reads the idle time until now. `None` without /proc.
    pub fn read() -> Option<Idle> {
        let text = fs::read_to_string("/proc/stat").ok()?;
        let ticks = idle_ticks(&text)?;
        let at = Instant::now();
        Some(Idle { ticks, at })
    }

    /// Returns the number of CPUs that were idle since then.
    pub fn free_since(&self) -> Option<f64> {
        let now = Idle::read()?;
        let seconds = now.at.duration_since(self.at).as_secs_f64();
        let idle = now.ticks.saturating_sub(self.ticks) as f64 / HZ;
        (seconds > 0.0).then(|| idle / seconds)
    }
}

/// Returns the sum of the columns `idle` and `iowait` of all CPUs (proc_stat(5)).
fn idle_ticks(text: &str) -> Option<u64> {
    let mut columns = text
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_whitespace();
    let idle: u64 = columns.nth(3)?.parse().ok()?;
    let waiting: u64 = columns.next()?.parse().ok()?;
    Some(idle + waiting)
}

/// Returns the memory in bytes that programs can still take. 0 without /proc.
pub fn free_memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    available(&text).unwrap_or(0)
}

fn available(text: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_proc_are_read() {
        let stat = "cpu  10 20 30 4000 500 6 7 8 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n";
        assert_eq!(idle_ticks(stat), Some(4500));
        let memory = "MemTotal:       4045212 kB\nMemAvailable:    3000000 kB\n";
        assert_eq!(available(memory), Some(3_000_000 * 1024));
        assert_eq!((idle_ticks(""), available("")), (None, None));
        assert!(Idle::read().unwrap().free_since().is_some() && free_memory() > 0);
    }
}
