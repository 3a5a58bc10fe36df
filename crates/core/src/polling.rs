//! Decides whether a worker spins for work before it sleeps, and for how long.

use fathom_trace::Clock;
use fathom_units::{parse_duration, short_duration};
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

/// How a worker polls before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Polling {
    /// Spins while spinning pays, for at most [`AUTO_LIMIT`] of each second.
    #[default]
    Auto,
    /// Like `Auto`, but with this limit per second instead of [`AUTO_LIMIT`].
    AutoWithin(Duration),
    /// Never spins; sleeps at once.
    Off,
    /// Always spins for this long before sleeping.
    Fixed(Duration),
}

/// Longest single spin of `Auto`.
pub const AUTO_MAX: Duration = Duration::from_micros(50);

/// Time per second that `Auto` may spend spinning.
pub const AUTO_LIMIT: Duration = Duration::from_millis(900);

/// Period over which the spin limit is enforced. A period is long enough for several spins and
/// short enough that a used-up limit delays the next spin only briefly.
const PERIOD: Duration = Duration::from_millis(10);

/// Largest ratio of request latency to wake-up time at which spinning for up to [`AUTO_MAX`] pays.
const WORTHWHILE: u64 = 10;

/// Number of consecutive spins that may find work without moving a request. Completing one step of
/// a request is such a find, and it is legitimate. A longer series means that a kernel flag
/// (`IORING_SQ_TASKRUN`) announces task work that does not exist, because the flag was raised a
/// moment too late. Only a sleep clears such a flag.
const FALSE_FINDS: u32 = 32;

/// Shortest wait after which data from a socket can be a response to the last reply. Data that
/// arrives sooner was already on its way.
const SOCKET_MIN: Duration = Duration::from_micros(8);

impl FromStr for Polling {
    type Err = String;

    fn from_str(text: &str) -> Result<Polling, String> {
        match text {
            "auto" => Ok(Polling::Auto),
            "off" | "0" => Ok(Polling::Off),
            _ => match text.strip_prefix("auto:") {
                Some(limit) => parse_duration(limit).map(Polling::AutoWithin),
                None => parse_duration(text).map(Polling::Fixed),
            }
            .map_err(|_| {
                format!("'{text}' is not auto, auto:500ms, off or a duration such as 20us")
            }),
        }
    }
}

/// Writes the setting in the syntax that `from_str` reads.
impl fmt::Display for Polling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Polling::Auto => f.write_str("auto"),
            Polling::AutoWithin(limit) => write!(f, "auto:{}", short_duration(*limit)),
            Polling::Off => f.write_str("off"),
            Polling::Fixed(time) => f.write_str(&short_duration(*time)),
        }
    }
}

/// Returns how many ticks a sleep takes beyond its requested time: the kernel's entry and exit, and
/// the wake-up of an idle CPU. The measurement takes a few milliseconds, once per process.
fn wake_up(clock: &Clock) -> u64 {
    const SAMPLES: usize = 16;
    const SLEEP: Duration = Duration::from_micros(50);
    static TICKS: OnceLock<u64> = OnceLock::new();
    *TICKS.get_or_init(|| {
        let asleep = clock.ticks(SLEEP);
        let mut late = [0; SAMPLES];
        for late in &mut late {
            let start = clock.now();
            std::thread::sleep(SLEEP);
            *late = (clock.now() - start).saturating_sub(asleep);
        }
        // Other load on the machine delays some of the samples.
        late.sort_unstable();
        late[SAMPLES / 4].min(clock.ticks(AUTO_MAX))
    })
}

/// The kind of event that a worker waits for. The poller judges each kind separately. A guest that
/// responds to an interrupt within microseconds justifies spinning even if its disk takes
/// milliseconds, and vice versa.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// The worker has sent replies; the peer acts next.
    Peer,
    /// Like `Peer`, when all peers are at the other end of a socket. A peer with several requests
    /// in flight sends the next ones while it is awake, and they are cheaper as one batch, so
    /// `Auto` sleeps. A peer that waits for each reply needs time to wake up and send the next
    /// request, so `Auto` spins.
    Socket,
    /// The worker has submitted requests; the device acts next.
    Device,
}

/// A wait that has ended.
#[derive(Clone, Copy, Debug)]
pub struct Waited {
    /// Kind of the event for which the worker waited.
    pub awaited: Awaited,
    /// Duration of the wait, in ticks of the clock.
    pub ticks: u64,
    /// The wait did not end while spinning, so `ticks` include a wake-up.
    pub slept: bool,
    /// Number of requests answered together before the wait.
    pub answered: usize,
}

/// Polling decisions of one worker.
///
/// Spinning costs the CPU time of the wait and saves a wake-up. `Auto` therefore spins for waits of
/// at most half a wake-up, which cost less than sleeping. While a wake-up is a considerable part of
/// a request's latency (see [`WORTHWHILE`]), `Auto` spins for up to [`AUTO_MAX`]. Spinning does not
/// make a slow disk noticeably faster.
///
/// The poller remembers which of the last waits ended within that time, and spins while at least
/// half of them did. The poller therefore spins for a guest that responds quickly. An idle guest
/// costs a few spins, and then none.
pub struct Poller {
    setting: Polling,
    max_ticks: u64,
    socket_min_ticks: u64,
    wake_up: u64,
    /// Latency of the last answered request, in ticks.
    latency: u64,
    /// Each [`Awaited`] has one bit per wait, the newest in bit 0. A set bit: spinning would have
    /// paid.
    history: [u8; 3],
    period: u64,
    /// Ticks that may be spent spinning in one period.
    limit: u64,
    /// Start of the current period; `spun` is the time spent spinning since then, both in ticks.
    since: u64,
    spun: u64,
    /// Number of consecutive spins that found work but moved no request.
    false_finds: u32,
}

impl Poller {
    /// Creates the poller of a worker. `Auto` measures the time of a wake-up, once per process.
    pub fn new(setting: Polling, clock: &Clock) -> Poller {
        let wake_up = match setting {
            Polling::Auto | Polling::AutoWithin(_) => wake_up(clock),
            Polling::Off | Polling::Fixed(_) => 0,
        };
        Poller::with_wake_up(setting, clock, wake_up)
    }

    fn with_wake_up(setting: Polling, clock: &Clock, wake_up: u64) -> Poller {
        let (max, limit) = match setting {
            Polling::Auto => (AUTO_MAX, AUTO_LIMIT),
            Polling::AutoWithin(limit) => (AUTO_MAX, limit),
            Polling::Off => (Duration::ZERO, Duration::ZERO),
            Polling::Fixed(duration) => (duration, Duration::MAX),
        };
        let period = clock.ticks(PERIOD);
        Poller {
            setting,
            max_ticks: clock.ticks(max),
            socket_min_ticks: clock.ticks(SOCKET_MIN),
            wake_up,
            latency: 0,
            history: [0; 3],
            period,
            limit: (limit.as_secs_f64() * period as f64) as u64,
            since: 0,
            spun: 0,
            false_finds: 0,
        }
    }

    fn is_auto(&self) -> bool {
        matches!(self.setting, Polling::Auto | Polling::AutoWithin(_))
    }

    /// Returns the longest wait, in ticks, for which spinning currently pays.
    fn worth(&self) -> u64 {
        if !self.is_auto() || self.latency < WORTHWHILE * self.wake_up {
            self.max_ticks
        } else {
            self.max_ticks.min(self.wake_up / 2)
        }
    }

    /// Returns for how many ticks to spin, starting at `now`.
    #[inline]
    pub fn window(&mut self, awaited: Awaited, now: u64) -> u64 {
        if self.is_auto() && self.history[awaited as usize].count_ones() < 4 {
            return 0;
        }
        if self.false_finds > FALSE_FINDS {
            self.false_finds = 0;
            return 0;
        }
        if now.wrapping_sub(self.since) >= self.period {
            self.since = now;
            self.spun = 0;
        }
        if self.spun < self.limit {
            self.worth()
        } else {
            0
        }
    }

    /// Records a spin of `ticks`, and whether it found something.
    #[inline]
    pub fn spun(&mut self, ticks: u64, found: bool) {
        self.spun += ticks;
        self.false_finds = if found { self.false_finds + 1 } else { 0 };
    }

    /// Records that requests have moved.
    #[inline]
    pub fn moved(&mut self) {
        self.false_finds = 0;
    }

    /// Records the latency of an answered request.
    #[inline]
    pub fn answered(&mut self, ticks: u64) {
        self.latency = ticks;
    }

    /// Records a wait that has ended, whether the worker spun or slept.
    #[inline]
    pub fn waited(&mut self, wait: Waited) {
        let Waited { awaited, ticks, .. } = wait;
        let is_prompt =
            awaited != Awaited::Socket || ticks >= self.socket_min_ticks && wait.answered == 1;
        let needed = if wait.slept {
            ticks.saturating_sub(self.wake_up)
        } else {
            ticks
        };
        let worth = is_prompt && needed <= self.worth();
        let history = &mut self.history[awaited as usize];
        *history = *history << 1 | u8::from(worth);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_written_as_people_write_them() {
        assert_eq!("auto".parse(), Ok(Polling::Auto));
        assert_eq!("off".parse(), Ok(Polling::Off));
        assert_eq!(
            "20us".parse(),
            Ok(Polling::Fixed(Duration::from_micros(20)))
        );
        assert_eq!(
            "auto:500ms".parse(),
            Ok(Polling::AutoWithin(Duration::from_millis(500)))
        );
        for bad in [
            "",
            "20",
            "us",
            "auto:",
            "auto:x",
            "-1us",
            "20 us",
            "99999999999999999999s",
        ] {
            assert!(bad.parse::<Polling>().is_err(), "{bad}");
        }
    }

    fn slept(awaited: Awaited, ticks: u64, answered: usize) -> Waited {
        Waited {
            awaited,
            ticks,
            slept: true,
            answered,
        }
    }

    #[test]
    fn auto_spins_while_waits_are_short_and_stops_when_they_are_not() {
        let clock = Clock::get();
        let mut poller = Poller::new(Polling::Auto, clock);
        let max = clock.ticks(AUTO_MAX);
        assert_eq!(poller.window(Awaited::Peer, 0), 0);
        (0..4).for_each(|_| poller.waited(slept(Awaited::Peer, 1, 1)));
        assert_eq!(poller.window(Awaited::Peer, 0), max);
        assert_eq!(poller.window(Awaited::Device, 0), 0);
        (0..8).for_each(|_| poller.waited(slept(Awaited::Device, u64::MAX, 1)));
        assert_eq!(poller.window(Awaited::Peer, 0), max);
        (0..5).for_each(|_| poller.waited(slept(Awaited::Peer, u64::MAX, 1)));
        assert_eq!(poller.window(Awaited::Peer, 0), 0);
    }

    #[test]
    fn auto_meets_those_behind_sockets_who_wait_for_each_answer() {
        let clock = Clock::get();
        let mut poller = Poller::new(Polling::Auto, clock);
        let turnaround = clock.ticks(Duration::from_micros(20));
        (0..8).for_each(|_| poller.waited(slept(Awaited::Socket, turnaround, 1)));
        assert!(poller.window(Awaited::Socket, 0) > 0);
        // These peers have further requests in flight.
        (0..8).for_each(|_| poller.waited(slept(Awaited::Socket, 1, 1)));
        assert_eq!(poller.window(Awaited::Socket, 0), 0);
        (0..8).for_each(|_| poller.waited(slept(Awaited::Socket, turnaround, 3)));
        assert_eq!(poller.window(Awaited::Socket, 0), 0);
    }

    #[test]
    fn off_never_spins_and_fixed_always_does() {
        let clock = Clock::get();
        let mut off = Poller::new(Polling::Off, clock);
        (0..8).for_each(|_| off.waited(slept(Awaited::Peer, 0, 1)));
        assert_eq!(off.window(Awaited::Peer, 0), 0);
        let mut fixed = Poller::new(Polling::Fixed(Duration::from_micros(10)), clock);
        for _ in 0..10_000 {
            assert!(fixed.window(Awaited::Device, 0) > 0);
            fixed.spun(clock.ticks(Duration::from_millis(1)), false);
        }
    }

    /// A machine with slow wake-ups. Adds up the time and the CPU time of successive requests.
    struct Machine {
        poller: Poller,
        wake_up: u64,
        now: u64,
        cpu: u64,
        spun: u64,
    }

    impl Machine {
        fn new(setting: Polling, wake_up: Duration) -> Machine {
            let clock = Clock::get();
            let wake_up = clock.ticks(wake_up);
            Machine {
                poller: Poller::with_wake_up(setting, clock, wake_up),
                wake_up,
                now: 0,
                cpu: 0,
                spun: 0,
            }
        }

        fn wait(&mut self, awaited: Awaited, ticks: u64) -> u64 {
            let window = self.poller.window(awaited, self.now);
            let spun = window.min(ticks);
            self.poller.spun(spun, ticks <= window);
            let slept = ticks > window || window == 0;
            let took = if slept { ticks + self.wake_up } else { ticks };
            self.cpu += if slept { spun + self.wake_up } else { spun };
            self.spun += spun;
            self.now += took;
            self.poller.waited(Waited {
                awaited,
                ticks: took,
                slept,
                answered: 1,
            });
            took
        }

        /// Runs requests; `device` and `peer` give their times in wake-ups.
        fn run(mut self, device: f64, peer: f64) -> Machine {
            for _ in 0..10_000 {
                let device = (device * self.wake_up as f64) as u64;
                let latency = if device == 0 {
                    0
                } else {
                    self.wait(Awaited::Device, device)
                };
                self.poller.answered(latency);
                self.poller.moved();
                self.wait(Awaited::Peer, (peer * self.wake_up as f64) as u64);
            }
            self
        }
    }

    #[test]
    fn auto_spins_for_what_it_makes_faster() {
        // Wake-up times of a physical server and of a virtual machine.
        for wake_up in [Duration::from_micros(3), Duration::from_micros(30)] {
            let cost = |device, peer| {
                let [auto, off] = [Polling::Auto, Polling::Off]
                    .map(|setting| Machine::new(setting, wake_up).run(device, peer));
                (
                    auto.cpu as f64 / off.cpu as f64,
                    auto.now as f64 / off.now as f64,
                )
            };
            // Slow device: polling takes hardly more CPU time than sleeping.
            for device in [10.0, 12.0, 40.0] {
                for peer in [0.1, 0.4, 0.9, 3.0, 9.0, 100.0] {
                    let (cpu, _) = cost(device, peer);
                    assert!(cpu < 1.15, "{wake_up:?} {device} {peer}: {cpu}");
                }
            }
            // No device, and a fast device: polling saves the wake-ups.
            let saved = (0.2 / 1.2, 1.2 / 3.2);
            assert!(cost(0.0, 0.2).1 < 1.1 * saved.0, "{wake_up:?}");
            assert!(cost(1.0, 0.2).1 < 1.1 * saved.1, "{wake_up:?}");
        }
    }

    #[test]
    fn auto_spins_for_a_part_of_a_second() {
        let wake_up = Duration::from_micros(30);
        for (setting, most) in [("auto", 0.9), ("auto:250ms", 0.25), ("auto:0ms", 0.0)] {
            let machine = Machine::new(setting.parse().unwrap(), wake_up).run(1.5, 0.1);
            let part = machine.spun as f64 / machine.now as f64;
            // A spin that has begun is not cut short.
            assert!(part < most + 0.01, "{setting}: {part}");
            assert!(part >= most * 0.9, "{setting}: {part}");
        }
    }

    #[test]
    fn what_is_found_for_nothing_is_slept_on() {
        let clock = Clock::get();
        let mut fixed = Poller::new(Polling::Fixed(Duration::from_micros(10)), clock);
        let mut slept = 0;
        for turn in 0..10_000 {
            match fixed.window(Awaited::Peer, 0) {
                0 => slept += 1,
                _ => fixed.spun(1, true),
            }
            // Requests that move now and then count as work.
            if turn < 5_000 && turn % 30 == 0 {
                fixed.moved();
            }
            assert!(slept == 0 || turn >= 5_000);
        }
        assert!(slept > 100, "{slept}");
    }

    #[test]
    fn a_wake_up_is_measured() {
        let clock = Clock::get();
        let ticks = wake_up(clock);
        assert!(ticks > 0 && ticks <= clock.ticks(AUTO_MAX), "{ticks}");
    }
}
