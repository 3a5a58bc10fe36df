//! Whether to spin for work before sleeping, and for how long.

use fathom_trace::Clock;
use fathom_units::{parse_duration, short_duration};
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

/// The setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Polling {
    /// Spin while it buys enough, and at most for [`AUTO_LIMIT`] of a second.
    #[default]
    Auto,
    /// Likewise, with a limit of its own.
    AutoWithin(Duration),
    /// Always sleep at once.
    Off,
    /// Always spin for this long first.
    Fixed(Duration),
}

/// The longest spin that `Auto` makes.
pub const AUTO_MAX: Duration = Duration::from_micros(50);

/// How much of a second `Auto` may spin.
pub const AUTO_LIMIT: Duration = Duration::from_millis(900);

/// The limit is kept in each of these: long enough for some spins, short
/// enough that nobody waits for the next one.
const PERIOD: Duration = Duration::from_millis(10);

/// A wake-up that is saved in so many times its own length, as the peer sees
/// it, is worth a CPU that spins.
const WORTHWHILE: u64 = 10;

/// So many spins may end with something found that then moves nothing (a completion that is one step of
/// a request's). After more of them, in a row, what is found is not there: a kernel's flag says that there
/// is work to be run (`IORING_SQ_TASKRUN`) until the next is, when it was raised a moment too late. Nothing
/// but a sleep ends that.
const FALSE_FINDS: u32 = 32;

/// What comes from a socket sooner than this was not asked for because of the
/// last answer.
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

/// As it is read.
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

/// What a sleep takes here beyond its time, in ticks: the kernel's way there
/// and back, and that of a CPU that was idle. Measured once in a process,
/// in a few milliseconds.
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
        // Others that run here make some of them late.
        late.sort_unstable();
        late[SAMPLES / 4].min(clock.ticks(AUTO_MAX))
    })
}

/// Whom a wait is for. The two are judged apart: a guest that answers an
/// interrupt within microseconds is worth meeting awake even when its disk
/// takes milliseconds, and the other way round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// Requests were answered last: the peer has the next move.
    Peer,
    /// Likewise, when all peers are at the other end of a socket. One that
    /// has several requests under way sends the next ones while it is awake
    /// anyway, and they had better come together: `Auto` sleeps. One that
    /// waits for each answer needs its time to wake up and ask again, and is
    /// met awake.
    Socket,
    /// Requests were submitted last: the device has it.
    Device,
}

/// A wait that is over.
#[derive(Clone, Copy, Debug)]
pub struct Waited {
    pub awaited: Awaited,
    pub ticks: u64,
    /// Not spun to its end: `ticks` have a wake-up in them.
    pub slept: bool,
    /// How many requests were answered at once before it.
    pub answered: usize,
}

/// Decides for one worker.
///
/// To spin costs what is waited for, and saves a wake-up. So `Auto` spins for
/// waits that are no longer than half a wake-up, which cost less than
/// sleeping would; and for up to [`AUTO_MAX`] while a wake-up is a good part
/// ([`WORTHWHILE`]) of what a request takes: a slow disk does not become
/// faster by it. It remembers of the last waits which ended within that, and
/// spins while most of them did: a guest that answers quickly is met awake, an
/// idle one costs a few spins and then nothing.
pub struct Poller {
    setting: Polling,
    max_ticks: u64,
    socket_min_ticks: u64,
    wake_up: u64,
    /// What the last answered request took.
    latency: u64,
    /// For each [`Awaited`] one bit a wait, the newest lowest: 1 = it is
    /// worth spinning for such.
    history: [u8; 3],
    period: u64,
    /// What may be spun in a period.
    limit: u64,
    /// When the present period began, and what has been spun in it.
    since: u64,
    spun: u64,
    /// How often in a row something was found and nothing moved.
    false_finds: u32,
}

impl Poller {
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

    /// The longest wait that is worth spinning for at present.
    fn worth(&self) -> u64 {
        if !self.is_auto() || self.latency < WORTHWHILE * self.wake_up {
            self.max_ticks
        } else {
            self.max_ticks.min(self.wake_up / 2)
        }
    }

    /// How long to spin from `now` on, in ticks.
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

    /// It has spun for `ticks`, until something was `found` or in vain.
    #[inline]
    pub fn spun(&mut self, ticks: u64, found: bool) {
        self.spun += ticks;
        self.false_finds = if found { self.false_finds + 1 } else { 0 };
    }

    /// Requests have moved.
    #[inline]
    pub fn moved(&mut self) {
        self.false_finds = 0;
    }

    /// A request was answered `ticks` after it came.
    #[inline]
    pub fn answered(&mut self, ticks: u64) {
        self.latency = ticks;
    }

    /// A wait, spun or slept, has ended.
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
        // More were under way.
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

    /// What requests one after the other take on a machine whose wake-ups
    /// take a while, and as much of a CPU.
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

        /// Requests of a device and a peer that take so many wake-ups.
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
        // A server's wake-up, and one of a virtual machine's host.
        for wake_up in [Duration::from_micros(3), Duration::from_micros(30)] {
            let cost = |device, peer| {
                let [auto, off] = [Polling::Auto, Polling::Off]
                    .map(|setting| Machine::new(setting, wake_up).run(device, peer));
                (
                    auto.cpu as f64 / off.cpu as f64,
                    auto.now as f64 / off.now as f64,
                )
            };
            // A slow device: no more of a CPU than sleeping takes.
            for device in [10.0, 12.0, 40.0] {
                for peer in [0.1, 0.4, 0.9, 3.0, 9.0, 100.0] {
                    let (cpu, _) = cost(device, peer);
                    assert!(cpu < 1.15, "{wake_up:?} {device} {peer}: {cpu}");
                }
            }
            // None, and a fast one: the time that is saved is the wake-ups'.
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
            // What moves now and then is work.
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
