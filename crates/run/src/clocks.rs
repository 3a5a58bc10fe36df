//! The clocks of a round, and measurements of how they relate. The measurements are plain data: the
//! report fits the guest's clock to the host's.

use serde::{Deserialize, Serialize};

/// The clock of an event file's times.
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
    /// The time stamp counter of the remote host, which receives the requests.
    RemoteTsc,
    /// The remote host's CLOCK_MONOTONIC, in ns.
    RemoteMonotonic,
}

/// The same moment on two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pair {
    /// Time stamp counter in ticks.
    pub tsc: u64,
    /// CLOCK_MONOTONIC in ns, on the same machine.
    pub monotonic_ns: u64,
}

/// KVM's conversion to a vCPU's TSC: `guest = host * ratio / 2^frac_bits + offset` (64-bit,
/// wrapping).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestOffset {
    /// Offset in ticks before the measured window.
    pub before: i64,
    /// Offset in ticks after the measured window.
    pub after: i64,
    /// None if KVM reports no ratio; both counters then run at the same rate.
    pub ratio: Option<u64>,
    /// Number of fraction bits of `ratio`.
    pub frac_bits: u32,
}

/// All measurements of a round's clocks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Clocks {
    /// Pairs of the host's clocks, at least one before and one after the window.
    pub host: Vec<Pair>,
    /// Pairs of the guest's clocks.
    pub guest: Vec<Pair>,
    /// Pairs of the remote host's clocks. Since version 3.
    #[serde(default)]
    pub remote: Vec<Pair>,
    /// The host's CLOCK_REALTIME minus CLOCK_MONOTONIC in ns, for QEMU's log.
    pub realtime_minus_monotonic_ns: i64,
    /// Offset of all vCPUs from KVM's debugfs; None without debugfs, or if the vCPUs differ.
    pub guest_offset: Option<GuestOffset>,
}
