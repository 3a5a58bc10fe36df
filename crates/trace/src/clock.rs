//! The clock of all stamps: the TSC if it is reliable, otherwise CLOCK_MONOTONIC.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// A monotonic clock that counts ticks.
///
/// A tick is one TSC cycle or one nanosecond; [`Clock::ns`] converts.
#[derive(Debug)]
pub struct Clock {
    tsc: bool,
    /// The clocks at the start of the process, or after the machine's last suspend. The older they
    /// are, the more exact the frequency that follows from them.
    anchor: Mutex<Anchor>,
    /// Frequency in ticks per second, as measured at the start.
    initial_hz: f64,
}

/// Readings of both clocks at the same instant.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    /// Reading of the clock of stamps, in ticks.
    pub ticks: u64,
    /// Reading of CLOCK_MONOTONIC, in nanoseconds.
    pub monotonic_ns: u64,
}

/// A reading from which the frequency is measured.
#[derive(Clone, Copy, Debug)]
struct Anchor {
    pair: Pair,
    /// Total time for which the machine was suspended since its boot, in nanoseconds.
    suspended_ns: u64,
}

/// Duration of the first measurement of the frequency.
const CALIBRATION: Duration = Duration::from_millis(5);
/// Age from which an anchor shows the frequency better than that measurement, in nanoseconds.
const MIN_AGE: u64 = 500_000_000;
/// Largest difference between two readings of the suspended time that is no suspend, in
/// nanoseconds. The kernel's two clocks are not read at the same instant.
const TOLERANCE: u64 = 1_000_000;

impl Clock {
    /// Returns the clock of this process. The first call calibrates the clock, which takes 5 ms.
    pub fn get() -> &'static Clock {
        static CLOCK: OnceLock<Clock> = OnceLock::new();
        CLOCK.get_or_init(|| Clock::new(tsc_is_trustworthy()))
    }

    fn new(tsc: bool) -> Clock {
        let anchor = Anchor::now(tsc);
        let initial_hz = if tsc {
            std::thread::sleep(CALIBRATION);
            hz_between(anchor.pair, pair(true))
        } else {
            1e9
        };
        Clock {
            tsc,
            anchor: Mutex::new(anchor),
            initial_hz,
        }
    }

    /// Returns whether ticks are TSC cycles; otherwise they are nanoseconds.
    pub fn is_tsc(&self) -> bool {
        self.tsc
    }

    /// Returns the current time in ticks.
    #[inline(always)]
    pub fn now(&self) -> u64 {
        if self.tsc { read_tsc() } else { monotonic_ns() }
    }

    /// Returns the frequency in ticks per second, as exactly as it is known by now.
    pub fn hz(&self) -> f64 {
        if !self.tsc {
            return 1e9;
        }
        let mut anchor = self.anchor.lock().unwrap_or_else(PoisonError::into_inner);
        anchor.hz(Anchor::now(true)).unwrap_or(self.initial_hz)
    }

    /// Converts ticks to nanoseconds.
    pub fn ns(&self, ticks: u64) -> u64 {
        (ticks as f64 * 1e9 / self.hz()) as u64
    }

    /// Converts a short time to nanoseconds, by the frequency measured at the start.
    ///
    /// The result is always the same for the same ticks, so sums of such times never decrease. A
    /// converted cumulative number of ticks could decrease, because [`Clock::hz`] becomes more
    /// exact.
    pub fn interval_ns(&self, ticks: u64) -> u64 {
        (ticks as f64 * 1e9 / self.initial_hz) as u64
    }

    /// Converts a duration to ticks, by the frequency measured at the start.
    ///
    /// Use the result for timeouts, not for measured results.
    pub fn ticks(&self, duration: Duration) -> u64 {
        (duration.as_secs_f64() * self.initial_hz) as u64
    }

    /// Converts ticks to a duration, rounded up: the inverse of [`Clock::ticks`].
    pub fn duration(&self, ticks: u64) -> Duration {
        Duration::from_nanos(self.interval_ns(ticks).saturating_add(1))
    }

    /// Reads both clocks together.
    pub fn pair(&self) -> Pair {
        pair(self.tsc)
    }
}

impl Anchor {
    fn now(tsc: bool) -> Anchor {
        let suspended_ns = boot_ns().saturating_sub(monotonic_ns());
        Anchor {
            pair: pair(tsc),
            suspended_ns,
        }
    }

    /// Returns the frequency since the anchor, or None if the anchor is too young. A suspend of the
    /// machine moves the anchor to `now`: CLOCK_MONOTONIC stood still, and the TSC continued or
    /// began again.
    fn hz(&mut self, now: Anchor) -> Option<f64> {
        let was_suspended = now.suspended_ns.abs_diff(self.suspended_ns) > TOLERANCE;
        if was_suspended || now.pair.ticks < self.pair.ticks {
            *self = now;
        }
        let age = now.pair.monotonic_ns.saturating_sub(self.pair.monotonic_ns);
        (age >= MIN_AGE).then(|| hz_between(self.pair, now.pair))
    }
}

fn hz_between(a: Pair, b: Pair) -> f64 {
    (b.ticks - a.ticks) as f64 * 1e9 / (b.monotonic_ns - a.monotonic_ns) as f64
}

/// Returns the tightest of eight pairs of readings, because an interrupt between the two clocks
/// would appear as an error of the frequency.
fn pair(tsc: bool) -> Pair {
    if !tsc {
        let ns = monotonic_ns();
        return Pair {
            ticks: ns,
            monotonic_ns: ns,
        };
    }
    (0..8)
        .map(|_| {
            let before = read_tsc();
            let monotonic_ns = monotonic_ns();
            let width = read_tsc() - before;
            let ticks = before + width / 2;
            (
                width,
                Pair {
                    ticks,
                    monotonic_ns,
                },
            )
        })
        .min_by_key(|(width, _)| *width)
        .map(|(_, pair)| pair)
        .expect("eight readings")
}

/// Returns CLOCK_MONOTONIC in nanoseconds.
#[inline]
pub fn monotonic_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

/// Returns CLOCK_BOOTTIME in nanoseconds, which also counts while the machine is suspended.
fn boot_ns() -> u64 {
    read(libc::CLOCK_BOOTTIME)
}

#[inline]
fn read(clock: libc::clockid_t) -> u64 {
    let mut ts = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `ts` is a valid timespec to write to. The two clocks that callers pass exist on every
    // Linux, so the call cannot fail.
    unsafe { libc::clock_gettime(clock, &mut ts) };
    ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn read_tsc() -> u64 {
    // SAFETY: RDTSC exists on every x86-64 and has no side effects.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn read_tsc() -> u64 {
    unreachable!("there is no TSC on this architecture")
}

/// Returns whether the TSC counts time on this machine.
#[cfg(target_arch = "x86_64")]
fn tsc_is_trustworthy() -> bool {
    let sources = |name: &str| {
        let path = format!("/sys/devices/system/clocksource/clocksource0/{name}_clocksource");
        std::fs::read_to_string(path).unwrap_or_default()
    };
    is_trusted(
        &sources("current"),
        &sources("available"),
        cpu_has_invariant_tsc(),
    )
}

/// Returns whether the kernel uses the TSC as its clock source, or offers the TSC and the CPU
/// guarantees that it neither stops nor changes its rate. The kernel no longer offers a TSC that it
/// has found to be wrong. Without the kernel's lists, the CPU decides.
#[cfg(any(test, target_arch = "x86_64"))]
fn is_trusted(current: &str, available: &str, is_invariant: bool) -> bool {
    let mut names = available.split_whitespace();
    // tsc-early is the TSC in the first second after the boot.
    let is_offered = names.any(|name| matches!(name, "tsc" | "tsc-early"));
    let is_unknown = available.trim().is_empty();
    current.trim() == "tsc" || is_invariant && (is_offered || is_unknown)
}

#[cfg(target_arch = "x86_64")]
fn cpu_has_invariant_tsc() -> bool {
    use core::arch::x86_64::__cpuid;
    const ADVANCED_POWER_MANAGEMENT: u32 = 0x8000_0007;
    const INVARIANT_TSC: u32 = 1 << 8;
    __cpuid(0x8000_0000).eax >= ADVANCED_POWER_MANAGEMENT
        && __cpuid(ADVANCED_POWER_MANAGEMENT).edx & INVARIANT_TSC != 0
}

#[cfg(not(target_arch = "x86_64"))]
fn tsc_is_trustworthy() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_and_the_kernel_agree() {
        for tsc in [tsc_is_trustworthy(), false] {
            let clock = Clock::new(tsc);
            // Reads the kernel's clock before and after, because the thread may be interrupted in
            // between.
            let look = || (monotonic_ns(), clock.now(), monotonic_ns());
            let first = look();
            std::thread::sleep(Duration::from_millis(100));
            let last = look();
            let spent = clock.ns(last.1 - first.1) as f64;
            let (least, most) = ((last.0 - first.2) as f64, (last.2 - first.0) as f64);
            let told = format!("tsc {tsc}: {spent}, between {least} and {most}");
            assert!(spent > 0.98 * least && spent < 1.02 * most, "{told}");
        }
    }

    /// A TSC of 2 GHz, which continues while the machine is suspended, or begins again.
    #[test]
    fn a_suspend_does_not_change_the_frequency() {
        const SECOND: u64 = 1_000_000_000;
        let at = |ticks, seconds, suspended| Anchor {
            pair: Pair {
                ticks,
                monotonic_ns: seconds * SECOND,
            },
            suspended_ns: suspended * SECOND,
        };
        for after in [2 * 3700 * SECOND, 5] {
            let mut anchor = at(2 * SECOND, 1, 0);
            let hz = anchor.hz(at(2 * 10 * SECOND, 10, 0));
            assert_eq!(hz, Some(2e9));
            // An hour later; the machine was awake for 90 s of it.
            assert_eq!(anchor.hz(at(after, 100, 3600)), None);
            let hz = anchor.hz(at(after + 2 * SECOND, 101, 3600));
            assert_eq!(hz, Some(2e9));
        }
    }

    #[test]
    fn durations_convert_both_ways() {
        let clock = Clock::get();
        let ticks = clock.ticks(Duration::from_secs(1));
        let ns = clock.ns(ticks) as f64;
        assert!((0.98e9..1.02e9).contains(&ns), "{ns}");
    }

    #[test]
    fn a_tsc_that_the_kernel_has_rejected_is_not_used() {
        for (current, available, is_invariant, wanted) in [
            ("tsc\n", "tsc hpet acpi_pm\n", false, true),
            ("kvm-clock\n", "kvm-clock tsc acpi_pm\n", true, true),
            ("kvm-clock\n", "kvm-clock tsc acpi_pm\n", false, false),
            ("tsc-early\n", "tsc-early acpi_pm\n", true, true),
            ("hpet\n", "hpet acpi_pm\n", true, false),
            ("", "", true, true),
            ("", "", false, false),
        ] {
            let trusted = is_trusted(current, available, is_invariant);
            assert_eq!(trusted, wanted, "{current} {available}");
        }
    }
}
