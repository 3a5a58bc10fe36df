//! The clocks of a round, and what was measured of how they relate. Plain data: fitting the guest's
//! clock to the host's is the report's work.

use serde::{Deserialize, Serialize};

/// Whose ticks an event file's times are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Clock {
    /// The host's time stamp counter.
    HostTsc,
    /// The host's CLOCK_MONOTONIC, in ns.
    HostMonotonic,
    /// The time stamp counter as the guest reads it.
    GuestTsc,
    /// The guest's CLOCK_MONOTONIC, in ns.
    GuestMonotonic,
    /// The host's CLOCK_REALTIME, in ns (QEMU's log).
    HostRealtime,
    /// The time stamp counter of the remote host, to which requests go on.
    RemoteTsc,
    /// The remote host's CLOCK_MONOTONIC, in ns.
    RemoteMonotonic,
}

/// One instant by two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pair {
    pub tsc: u64,
    pub monotonic_ns: u64,
}

/// What KVM says of a vCPU's TSC: `guest = host * ratio / 2^frac_bits + offset` (64-bit, wrapping).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestOffset {
    /// Read before the measured window, and after it.
    pub before: i64,
    pub after: i64,
    /// None where KVM shows no ratio: then the two run at the same rate.
    pub ratio: Option<u64>,
    pub frac_bits: u32,
}

/// All that was measured of a round's clocks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Clocks {
    /// Pairs of the host, at least one before and one after the window.
    pub host: Vec<Pair>,
    /// The same of the guest, by its own clocks.
    pub guest: Vec<Pair>,
    /// The same of the remote host. Since version 3.
    #[serde(default)]
    pub remote: Vec<Pair>,
    /// The host's CLOCK_REALTIME minus CLOCK_MONOTONIC, in ns, for QEMU's log.
    pub realtime_minus_monotonic_ns: i64,
    /// From KVM's debugfs, of vCPU 0; None without it.
    pub guest_offset: Option<GuestOffset>,
}
