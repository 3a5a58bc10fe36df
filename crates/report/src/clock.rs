//! Converts all clocks of a round to one: the host's CLOCK_MONOTONIC, in ns.
//!
//! The round's pairs of readings fit the host's TSC to CLOCK_MONOTONIC. The guest's TSC follows
//! from KVM's offset if that is known and did not change, else from causality ([`bounds`]).

pub(crate) mod bounds;
pub(crate) mod crossings;
mod line;
pub(crate) mod trips;

use fathom_run::{Clock, Clocks, GuestOffset};

pub(crate) use line::Line;

/// How the guest's clock is converted.
#[derive(Clone, Debug)]
enum Guest {
    /// No guest exists, or its clock has no known relation to the host's.
    Unknown,
    /// By KVM's offset to the host's TSC.
    Offset(GuestOffset),
    /// By a line from the guest's ns to the host's, from bounds.
    Bounds(Line),
}

/// Converts ticks of any clock of a round to ns of the host's CLOCK_MONOTONIC.
#[derive(Clone, Debug)]
pub(crate) struct TimeBase {
    host: Option<Line>,
    /// The guest's TSC to the guest's CLOCK_MONOTONIC.
    guest_own: Option<Line>,
    guest: Guest,
    /// The remote host's TSC to its CLOCK_MONOTONIC, and that clock to this host's.
    remote_own: Option<Line>,
    remote: Option<Line>,
    realtime: i64,
    /// How the guest's clock was related to the host's, as text for the reader.
    pub(crate) method: String,
    /// The largest error in ns between guest and host times; None if they are not related.
    pub(crate) error: Option<i64>,
    /// How the remote host's clock was related, and its largest error in ns.
    pub(crate) remote_method: String,
    pub(crate) remote_error: Option<i64>,
}

impl TimeBase {
    /// Creates the time base of a round. The guest's clock is converted by `offset`, if given.
    /// `mixed` says that the round has stamps of CLOCK_MONOTONIC besides those of the TSC.
    pub(crate) fn new(clocks: &Clocks, offset: Option<GuestOffset>, mixed: bool) -> TimeBase {
        let host = Line::fit(&clocks.host);
        let guest_own = Line::fit(&clocks.guest);
        let mut base = TimeBase {
            realtime: clocks.realtime_minus_monotonic_ns,
            host,
            guest_own,
            guest: Guest::Unknown,
            remote_own: Line::fit(&clocks.remote),
            remote: None,
            method: "the guest's clock is not related to the host's".into(),
            error: None,
            remote_method:
                "the two servers have not seen enough of the same requests (were both recorded \
                            at the same time, and is this disk's the other one?)"
                    .into(),
            remote_error: None,
        };
        if let (Some(offset), Some(host)) = (offset, &base.host) {
            // Stamps of both TSCs use the same line, whose error shifts both alike. Stamps of
            // CLOCK_MONOTONIC do not.
            let apart = if mixed { host.residual() } else { 0 };
            base.error = Some(host.tick_ns().max(apart));
            base.method = "KVM's TSC offset".into();
            base.guest = Guest::Offset(offset);
        }
        base
    }

    /// Returns the time base with the guest's clock converted by bounds.
    pub(crate) fn with_bounds(mut self, found: bounds::Relation) -> TimeBase {
        self.method = found.method;
        self.error = Some(found.error);
        self.guest = Guest::Bounds(found.line);
        self
    }

    /// Returns the time base with the remote host's clock converted by bounds. `found` relates this
    /// host's requests to the remote server's part of them.
    pub(crate) fn with_remote(mut self, found: bounds::Relation) -> TimeBase {
        self.remote_method = found.method;
        self.remote_error = Some(found.error);
        self.remote = Some(found.line.inverse());
        self
    }

    /// Returns a time base that takes guest ns for host ns, for joining guest streams alone.
    pub(crate) fn guest_alone(mut self) -> TimeBase {
        self.guest = Guest::Bounds(Line::identity());
        self.method = "the guest's own clock".into();
        self.error = Some(0);
        self
    }

    /// Returns whether `clock` can be converted.
    pub(crate) fn knows(&self, clock: Clock) -> bool {
        self.ns(clock, 0).is_some()
    }

    /// Converts ticks of a guest clock to guest ns; None for other clocks.
    pub(crate) fn guest_ns(&self, clock: Clock, ticks: u64) -> Option<i64> {
        match clock {
            // Without pairs, assume that the guest's TSC runs at the host's rate; bounds correct
            // it.
            Clock::GuestTsc => match (&self.guest_own, &self.host) {
                (Some(own), _) => Some(own.y(ticks)),
                (None, Some(host)) => Some((ticks as f64 * host.slope()) as i64),
                (None, None) => None,
            },
            Clock::GuestMonotonic => Some(ticks as i64),
            _ => None,
        }
    }

    /// Converts ticks of a remote clock to the remote host's ns; None for other clocks.
    pub(crate) fn remote_ns(&self, clock: Clock, ticks: u64) -> Option<i64> {
        match clock {
            Clock::RemoteTsc => self.remote_own.as_ref().map(|own| own.y(ticks)),
            Clock::RemoteMonotonic => Some(ticks as i64),
            _ => None,
        }
    }

    /// Converts `ticks` of `clock` to ns of the host's CLOCK_MONOTONIC; None if they are not
    /// related.
    #[inline]
    pub(crate) fn ns(&self, clock: Clock, ticks: u64) -> Option<i64> {
        match clock {
            Clock::HostTsc => self.host.as_ref().map(|line| line.y(ticks)),
            Clock::HostMonotonic => Some(ticks as i64),
            Clock::HostRealtime => Some((ticks as i64).wrapping_sub(self.realtime)),
            Clock::RemoteTsc | Clock::RemoteMonotonic => {
                let ns = self.remote_ns(clock, ticks)?;
                self.remote.as_ref().map(|line| line.y(ns as u64))
            }
            Clock::GuestTsc | Clock::GuestMonotonic => match &self.guest {
                Guest::Unknown => None,
                Guest::Offset(offset) => {
                    let tsc = match clock {
                        Clock::GuestTsc => ticks,
                        _ => self.guest_own.as_ref()?.x(ticks as i64),
                    };
                    self.host.as_ref().map(|line| line.y(host_tsc(offset, tsc)))
                }
                Guest::Bounds(line) => Some(line.y(self.guest_ns(clock, ticks)? as u64)),
            },
        }
    }
}

/// Solves KVM's `guest = host * ratio / 2^frac_bits + offset` for the host.
#[inline]
fn host_tsc(offset: &GuestOffset, guest: u64) -> u64 {
    let scaled = guest.wrapping_sub(offset.before as u64);
    match offset.ratio {
        Some(ratio) if ratio != 0 => {
            ((u128::from(scaled) << offset.frac_bits.min(63)) / u128::from(ratio)) as u64
        }
        _ => scaled,
    }
}

/// Returns KVM's offset if it held for the whole round, else the reason why it did not. `written`
/// says that KVM changed the offset of a vCPU during the round.
pub(crate) fn trusted_offset(
    clocks: &Clocks,
    written: bool,
) -> std::result::Result<Option<GuestOffset>, String> {
    let Some(offset) = clocks.guest_offset else {
        return Ok(None);
    };
    if offset.before != offset.after {
        return Err(format!(
            "the guest's TSC offset changed during the round (from {} to {}): the clocks are \
             related by causality instead",
            offset.before, offset.after
        ));
    }
    if written {
        return Err(
            "KVM wrote the TSC offset of a vCPU during the round: the clocks are related by \
             causality instead"
                .into(),
        );
    }
    Ok(Some(offset))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_run::Pair;

    fn clocks() -> Clocks {
        let pair = |tsc, monotonic_ns| Pair { tsc, monotonic_ns };
        Clocks {
            // 2 GHz
            host: vec![pair(1_000_000, 5_000), pair(2_001_000_000, 1_000_005_000)],
            guest: vec![pair(500, 100), pair(2_000_000_500, 1_000_000_100)],
            remote: vec![pair(70, 700), pair(2_000_000_070, 1_000_000_700)],
            realtime_minus_monotonic_ns: 1_000_000,
            guest_offset: Some(GuestOffset {
                before: -999_500,
                after: -999_500,
                ratio: None,
                frac_bits: 0,
            }),
        }
    }

    #[test]
    fn every_clock_comes_to_the_hosts_nanoseconds() {
        let clocks = clocks();
        let base = TimeBase::new(&clocks, clocks.guest_offset, true);
        assert_eq!(base.ns(Clock::HostTsc, 1_002_000), Some(6_000));
        assert_eq!(base.ns(Clock::HostMonotonic, 7), Some(7));
        assert_eq!(base.ns(Clock::HostRealtime, 1_000_007), Some(7));
        assert_eq!(base.ns(Clock::GuestTsc, 2_500), Some(6_000));
        assert_eq!(base.ns(Clock::GuestMonotonic, 1_100), Some(6_000));
        let alone = TimeBase::new(&clocks, None, true);
        assert_eq!(alone.ns(Clock::GuestTsc, 2_500), None);
        assert_eq!(alone.remote_ns(Clock::RemoteTsc, 2_070), Some(1_700));
        assert_eq!(alone.ns(Clock::RemoteTsc, 2_070), None);
        assert_eq!(alone.guest_alone().ns(Clock::GuestTsc, 2_500), Some(1_100));
    }

    #[test]
    fn a_scaled_tsc_is_scaled_back() {
        let offset = GuestOffset {
            before: 12_345,
            after: 12_345,
            ratio: Some((3 << 48) / 2),
            frac_bits: 48,
        };
        for host in [0u64, 1_000, 123_456_789_012_345] {
            let guest = ((u128::from(host) * ((3 << 48) / 2)) >> 48) as u64 + 12_345;
            let error = host_tsc(&offset, guest).abs_diff(host);
            assert!(error <= 1, "{host}: {error}");
        }
    }

    #[test]
    fn an_offset_that_changed_is_not_trusted() {
        let mut clocks = clocks();
        assert!(trusted_offset(&clocks, false).unwrap().is_some());
        let why = trusted_offset(&clocks, true).unwrap_err();
        assert!(why.contains("KVM wrote the TSC offset"), "{why}");
        clocks.guest_offset.as_mut().unwrap().after += 1;
        assert!(trusted_offset(&clocks, false).is_err());
        clocks.guest_offset = None;
        assert_eq!(trusted_offset(&clocks, false), Ok(None));
    }
}
