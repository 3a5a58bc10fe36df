//! Time stamps that cost as little as the processor allows.

use std::fs;
use std::time::Instant;

/// Raw ticks; [`Clock`] turns differences of them into nanoseconds.
pub type Ticks = u64;

/// Reads the time stamp counter where the kernel itself keeps time by it,
/// else CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    tsc: bool,
    start_ticks: Ticks,
    start: Instant,
}

/// How long a tick is.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    ns_per_tick: f64,
}

impl Clock {
    /// Starts the calibration too: it lasts until [`Clock::scale`].
    pub fn new() -> Self {
        let tsc = cfg!(target_arch = "x86_64") && tsc_is_steady();
        let (start_ticks, start) = pair(tsc);
        Clock {
            tsc,
            start_ticks,
            start,
        }
    }

    /// Now. The TSC read is not serialising: it may move by a few instructions,
    /// which is far below what is measured.
    #[inline(always)]
    pub fn now(&self) -> Ticks {
        read(self.tsc)
    }

    /// The tick's length, from all the time since [`Clock::new`]: call it at
    /// the end of a run.
    pub fn scale(&self) -> Scale {
        if !self.tsc {
            return Scale { ns_per_tick: 1.0 };
        }
        let (ticks, now) = pair(true);
        let ns = (now - self.start).as_nanos() as f64;
        let ticks = ticks.wrapping_sub(self.start_ticks).max(1) as f64;
        Scale {
            ns_per_tick: ns / ticks,
        }
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

impl Scale {
    /// A difference of ticks in nanoseconds.
    pub fn ns(&self, ticks: Ticks) -> f64 {
        ticks as f64 * self.ns_per_tick
    }
}

#[inline(always)]
fn read(tsc: bool) -> Ticks {
    #[cfg(target_arch = "x86_64")]
    if tsc {
        // SAFETY: rdtsc has no preconditions; user mode may use it on Linux
        // unless a process forbids it to itself by prctl.
        return unsafe { core::arch::x86_64::_rdtsc() };
    }
    let _ = tsc;
    monotonic_ns()
}

/// Both clocks at one instant: the tightest of a few readings, as a pause
/// between the two would be an error of the scale.
fn pair(tsc: bool) -> (Ticks, Instant) {
    let reading = |_| {
        let before = read(tsc);
        let now = Instant::now();
        let width = read(tsc).wrapping_sub(before);
        (width, before.wrapping_add(width / 2), now)
    };
    let tightest = (0..8).map(reading).min_by_key(|(width, _, _)| *width);
    let (_, ticks, now) = tightest.expect("eight readings");
    (ticks, now)
}

fn monotonic_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// The kernel's choice of clock source is the best judgement there is; a guest
/// on kvm-clock still has a steady TSC when the CPU promises one.
fn tsc_is_steady() -> bool {
    let source = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    if fs::read_to_string(source).is_ok_and(|s| s.trim() == "tsc") {
        return true;
    }
    fs::read_to_string("/proc/cpuinfo").is_ok_and(|s| {
        s.lines()
            .find(|l| l.starts_with("flags"))
            .is_some_and(|l| l.split_whitespace().any(|f| f == "nonstop_tsc"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_agree_with_the_monotonic_clock() {
        let clock = Clock::new();
        // The kernel's before and after: anything may come in between.
        let look = || (Instant::now(), clock.now(), Instant::now());
        let first = look();
        while first.2.elapsed().as_millis() < 20 {}
        let last = look();
        let ours = clock.scale().ns(last.1 - first.1);
        let least = (last.0 - first.2).as_nanos() as f64;
        let most = (last.2 - first.0).as_nanos() as f64;
        let told = format!("{ours}, between {least} and {most}");
        assert!(ours > 0.95 * least && ours < 1.05 * most, "{told}");
    }
}
