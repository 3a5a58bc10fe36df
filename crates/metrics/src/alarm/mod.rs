//! Alarms: who watches a disk is told when its requests take too long, and in which stage.
//!
//! `watch` checks the alarms of a disk: it looks at what is counted anyway, each few seconds, and at the oldest
//!   request that is not answered yet.
//!
//! Disks without alarms are never looked at.

mod watch;

pub use watch::{AlarmInfo, Seen, Watches};
