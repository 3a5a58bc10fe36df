//! Whether to spin for work before sleeping, and for how long.

use fathom_trace::Clock;
use std::str::FromStr;
use std::time::Duration;

/// The setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Polling {
    /// Spin while work has been arriving fast enough to make it worthwhile.
    #[default]
    Auto,
    /// Always sleep at once.
    Off,
    /// Always spin for this long first.
    Fixed(Duration),
}

/// The longest spin that `Auto` makes.
pub const AUTO_MAX: Duration = Duration::from_micros(50);

/// What comes from a socket sooner than this was not asked for because of the
/// last answer.
const SOCKET_MIN: Duration = Duration::from_micros(8);

impl FromStr for Polling {
    type Err = String;

    fn from_str(text: &str) -> Result<Polling, String> {
        match text {
            "auto" => Ok(Polling::Auto),
            "off" | "0" => Ok(Polling::Off),
            _ => parse_duration(text)
                .map(Polling::Fixed)
                .ok_or_else(|| format!("'{text}' is not auto, off or a duration like 20us")),
        }
    }
}

/// A whole number with a unit: `500ms`.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let value: u64 = text[..digits].parse().ok()?;
    let ns_per_unit = match &text[digits..] {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => return None,
    };
    Some(Duration::from_nanos(value.checked_mul(ns_per_unit)?))
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

/// Decides for one worker. `Auto` remembers of the last waits which ended
/// within the longest spin, and spins while most of them did: a guest that
/// answers quickly is met awake, an idle one costs a few spins and then
/// nothing.
pub struct Poller {
    setting: Polling,
    max_ticks: u64,
    socket_min_ticks: u64,
    /// For each [`Awaited`] one bit a wait, the newest lowest: 1 = it is
    /// worth spinning for such.
    history: [u8; 3],
}

impl Poller {
    pub fn new(setting: Polling, clock: &Clock) -> Poller {
        let max = match setting {
            Polling::Auto => AUTO_MAX,
            Polling::Off => Duration::ZERO,
            Polling::Fixed(duration) => duration,
        };
        Poller {
            setting,
            max_ticks: clock.ticks(max),
            socket_min_ticks: clock.ticks(SOCKET_MIN),
            history: [0; 3],
        }
    }

    /// How long to spin this time, in ticks.
    #[inline]
    pub fn window(&self, awaited: Awaited) -> u64 {
        match self.setting {
            Polling::Auto if self.history[awaited as usize].count_ones() < 4 => 0,
            _ => self.max_ticks,
        }
    }

    /// A wait, spun or slept, ended after `ticks`; before it, `answered`
    /// requests were answered at once.
    #[inline]
    pub fn waited(&mut self, awaited: Awaited, ticks: u64, answered: usize) {
        let is_prompt =
            awaited != Awaited::Socket || ticks >= self.socket_min_ticks && answered == 1;
        let history = &mut self.history[awaited as usize];
        *history = *history << 1 | u8::from(is_prompt && ticks <= self.max_ticks);
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
        for bad in ["", "20", "us", "-1us", "20 us", "99999999999999999999s"] {
            assert!(bad.parse::<Polling>().is_err(), "{bad}");
        }
    }

    #[test]
    fn auto_spins_while_waits_are_short_and_stops_when_they_are_not() {
        let clock = Clock::get();
        let mut poller = Poller::new(Polling::Auto, clock);
        let max = clock.ticks(AUTO_MAX);
        assert_eq!(poller.window(Awaited::Peer), 0);
        (0..4).for_each(|_| poller.waited(Awaited::Peer, 1, 1));
        assert_eq!(poller.window(Awaited::Peer), max);
        assert_eq!(poller.window(Awaited::Device), 0);
        (0..8).for_each(|_| poller.waited(Awaited::Device, u64::MAX, 1));
        assert_eq!(poller.window(Awaited::Peer), max);
        (0..5).for_each(|_| poller.waited(Awaited::Peer, u64::MAX, 1));
        assert_eq!(poller.window(Awaited::Peer), 0);
    }

    #[test]
    fn auto_meets_those_behind_sockets_who_wait_for_each_answer() {
        let clock = Clock::get();
        let mut poller = Poller::new(Polling::Auto, clock);
        let turnaround = clock.ticks(Duration::from_micros(20));
        (0..8).for_each(|_| poller.waited(Awaited::Socket, turnaround, 1));
        assert!(poller.window(Awaited::Socket) > 0);
        // More were under way.
        (0..8).for_each(|_| poller.waited(Awaited::Socket, 1, 1));
        assert_eq!(poller.window(Awaited::Socket), 0);
        (0..8).for_each(|_| poller.waited(Awaited::Socket, turnaround, 3));
        assert_eq!(poller.window(Awaited::Socket), 0);
    }

    #[test]
    fn off_never_spins_and_fixed_always_does() {
        let clock = Clock::get();
        let mut off = Poller::new(Polling::Off, clock);
        (0..8).for_each(|_| off.waited(Awaited::Peer, 0, 1));
        assert_eq!(off.window(Awaited::Peer), 0);
        let fixed = Poller::new(Polling::Fixed(Duration::from_micros(10)), clock);
        assert!(fixed.window(Awaited::Device) > 0);
    }
}
