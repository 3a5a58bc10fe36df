//! Alarms: report when a disk's requests take too long, and in which stage.
//!
//! `watch` checks the alarms of a disk. Every few seconds it examines existing counters, and the
//! oldest request in flight.
//!
//! Disks without alarms are not examined.

mod watch;

pub use watch::{AlarmInfo, Seen, Watches};
